"""Which server takes the next request, and which requests wait.

Requests wait here, not at a server, so a server that is away for a minute costs its work nothing: nobody's attempts
are used up, and what it had in flight (``died``) comes back and goes to whoever is up.

    waiting     in order of arrival, until a server is up and a slot of ``max_concurrent_generations`` is free
    suspects    were in flight at two deaths of servers: they are tried apart, on a server that is first let run empty.
                The youngest at its first death goes first: what kills a server mostly does so soon. If a server dies
                of one, that explains its earlier deaths, and the others that had a part in them are suspects no more.

Strictly one by one, a server that died twice for other reasons under thousands of requests would be nearly idle for
hours. So suspects go in groups: of one first, and each answer makes room for one more, up to the square root of their
number. If the server dies of a group, its members are tried alone. So a request that kills costs one death more than
if all were tried alone, and the others wait twice the square root of their number, in requests, at most. Halving would
be quicker, but with more deaths than ``server_max_restarts`` usually allows.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable

from yarl import URL

from datatrove_ckpt.errors import ServerDied
from datatrove_ckpt.inference.client.transport import Transport

_DEATHS_OF_A_SUSPECT = 2

HealthProbe = Callable[[float, bool], Awaitable[None]]
"""Waits until it is known whether a server lives; if not, the attempt that waits is lost meanwhile. Takes the time at
which the failed attempt began, and whether to wait on for proof that the server still takes new requests."""


class ServerLost(Exception):
    """The server died, or is about to be killed; the request is to be sent again."""


class Death:
    """The end of one server.

    Attributes:
        lost: how many requests it had.
        explained: a request is known to have caused it.
    """

    def __init__(self, cause: str, lost: int = 0) -> None:
        self.cause = cause
        self.lost = lost
        self.explained = False


class Request:
    """What is known of one request over all its attempts."""

    __slots__ = ("age", "deaths")

    def __init__(self) -> None:
        self.deaths: list[Death] = []
        self.age = 0.0

    @property
    def is_suspect(self) -> bool:
        return self._unexplained >= _DEATHS_OF_A_SUSPECT

    @property
    def goes_alone(self) -> bool:
        """A group of suspects died with it."""
        return self._unexplained > _DEATHS_OF_A_SUSPECT

    @property
    def _unexplained(self) -> int:
        return sum(not death.explained for death in self.deaths)

    def was_there(self, death: Death, age: float) -> None:
        """It had been in flight for ``age`` seconds when a server died."""
        self.age = self.age if self.deaths else age
        self.deaths.append(death)


class Attempt:
    """One sending of a request. ``lost`` once its server is given up, whatever still arrives."""

    __slots__ = ("began", "lost", "request", "scope")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.began = time.monotonic()
        self.lost = False
        self.scope = asyncio.timeout(None)

    def lose(self) -> None:
        """End it from outside."""
        if not self.lost:
            self.lost = True
            self.scope.reschedule(asyncio.get_running_loop().time())


class Target:
    """One server, as the client sees it.

    Attributes:
        up: requests may be sent.
        limit: how many may be in flight here.
        alive_at: when the server last gave a sign of life, or was given work after it had none.
        accepted_at: when the youngest request that it answered was sent.
        check: see ``HealthProbe``.
    """

    def __init__(self, check: HealthProbe | None = None) -> None:
        self.url = URL()
        self.transport: Transport | None = None
        self.up = False
        self.limit = math.inf
        self.in_flight = 0
        self.attempts: set[Attempt] = set()
        self.cools_until = 0.0
        self.reserved = False
        self.alive_at = 0.0
        self.accepted_at = 0.0
        self.check = check

    def begin(self, request: Request) -> Attempt:
        if not self.attempts:
            self.alive()
        attempt = Attempt(request)
        self.attempts.add(attempt)
        return attempt

    def alive(self, began: float = 0.0) -> None:
        """It gave a sign of life: an answer to the request sent at ``began``, or another one."""
        self.alive_at = time.monotonic()
        self.accepted_at = max(self.accepted_at, began)


class Router:
    """Hands out targets.

    Args:
        limit: requests in flight at all targets together.
    """

    def __init__(self, limit: int) -> None:
        self.targets: list[Target] = []
        self._limit = limit
        self._in_flight = 0
        self._waiting: deque[tuple[Request, asyncio.Future[Target]]] = deque()
        self._suspects: list[tuple[float, int, Request, asyncio.Future[Target]]] = []
        self._order = 0
        # Of the suspects that are being tried: how many, at most how many now, ever together, and one that goes alone.
        self._tried = 0
        self._room = 1
        self._crowd = 0
        self._alone = False
        self._failure: str | None = None
        self._on_release: Callable[[], None] | None = None

    @property
    def in_flight(self) -> int:
        """Attempts under way at all targets together."""
        return self._in_flight

    @property
    def closed(self) -> bool:
        """No further attempt is begun, ever."""
        return self._on_release is not None

    def close(self, on_release: Callable[[], None]) -> None:
        """Begin no further attempt: who waits, or comes, waits on. ``on_release`` is called when one has ended."""
        self._on_release = on_release

    async def acquire(self, request: Request) -> Target:
        """A target for one attempt, to be given back with ``release``.

        Raises:
            ServerDied: no server will ever be up again.
        """
        if self._failure is not None:
            raise ServerDied(self._failure)
        if not self._waiting and not request.is_suspect and (target := self._free()) is not None:
            return self._take(target)
        future: asyncio.Future[Target] = asyncio.get_running_loop().create_future()
        self._enqueue(request, future)
        self.admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise

    def release(self, target: Target) -> None:
        target.in_flight -= 1
        self._in_flight -= 1
        if target.reserved and self._tried:
            self._tried -= 1
            self._room += 1
        self.admit()
        if self._on_release is not None:
            self._on_release()

    def admit(self) -> None:
        """Give targets to those that wait, as far as there are any."""
        if self.closed:
            return
        self._admit_suspects()
        while self._waiting:
            _, future = self._waiting[0]
            target = self._free() if not future.done() else None
            if target is None and not future.done():
                return
            self._waiting.popleft()
            if target is not None:
                future.set_result(self._take(target))

    def died(self, target: Target, cause: str) -> Death:
        """The server of a target is gone: what it has in flight is lost."""
        target.up = target.reserved = False
        death = Death(cause, len(target.attempts))
        now = time.monotonic()
        for attempt in target.attempts:
            attempt.request.was_there(death, now - attempt.began)
            attempt.lose()
        self.admit()
        return death

    def explain(self, request: Request) -> None:
        """The deaths this request had a part in were its doing: nobody else is suspected because of them."""
        for death in request.deaths:
            death.explained = True
        suspects, self._suspects = self._suspects, []
        for _, _, other, future in suspects:
            self._enqueue(other, future)
        self.admit()

    def fail(self, cause: str) -> None:
        """No server will be up again: everybody who waits, or comes, is told."""
        self._failure = cause
        for future in [future for _, future in self._waiting] + [entry[3] for entry in self._suspects]:
            if not future.done():
                future.set_exception(ServerDied(cause))
        self._waiting.clear()
        self._suspects.clear()

    def _enqueue(self, request: Request, future: asyncio.Future[Target]) -> None:
        if request.is_suspect:
            self._order += 1
            heapq.heappush(self._suspects, (request.age, self._order, request, future))
        else:
            self._waiting.append((request, future))

    def _take(self, target: Target) -> Target:
        target.in_flight += 1
        self._in_flight += 1
        return target

    def _free(self) -> Target | None:
        """The least busy target that can take a request."""
        if self._in_flight >= self._limit or self.closed:
            return None
        free = [target for target in self.targets if target.up and not target.reserved]
        free = [target for target in free if target.in_flight < target.limit]
        return _least_busy(free)

    def _admit_suspects(self) -> None:
        while self._suspects and self._suspects[0][3].done():
            heapq.heappop(self._suspects)
        reserved = next((target for target in self.targets if target.reserved), None)
        if reserved is None and self._suspects:
            reserved = _least_busy([target for target in self.targets if target.up])
            self._tried, self._room, self._crowd = 0, 1, 0
        if reserved is None:
            return
        reserved.reserved = bool(self._suspects) or reserved.in_flight > 0
        self._crowd = max(self._crowd, self._tried + len(self._suspects))
        # It has run empty when all that it has in flight are suspects.
        while self._suspects and reserved.in_flight == self._tried < self._group() and self._in_flight < self._limit:
            _, _, request, future = heapq.heappop(self._suspects)
            if not future.done():
                self._tried += 1
                self._alone = request.goes_alone
                future.set_result(self._take(reserved))

    def _group(self) -> int:
        """How many suspects may be tried together now."""
        if (self._tried and self._alone) or self._suspects[0][2].goes_alone:
            return 1
        return min(self._room, math.isqrt(self._crowd))


def _least_busy(targets: list[Target]) -> Target | None:
    if len(targets) < 2:
        return targets[0] if targets else None
    now = time.monotonic()
    return min(targets, key=lambda target: (target.cools_until > now, target.in_flight))
