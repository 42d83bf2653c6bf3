"""Decides which server takes the next request, and which requests wait.

Requests wait here, not at a server, so an outage uses up no attempts, and a dead server's requests
(``mark_dead``) go to the next server that is up.

    waiting      in order of arrival, until a server is up and a slot of
                 ``max_concurrent_generations`` is free
    quarantined  requests that were in flight at two deaths of a server. They run apart from all
                 others, on a server that first finishes its other requests. The youngest at its
                 first death goes first: a poisonous request mostly kills soon. A death of one
                 request alone is attributed to it, with its earlier deaths, and the other requests
                 leave the quarantine.

Quarantined requests run in groups: first one request, then each answer makes room for one more, up
to the square root of their peak number. If the server dies of a group, its members run alone.
Running only single requests would leave the server nearly idle for hours; halving groups would need
more deaths than ``server_max_restarts`` allows.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from datatrove_ckpt.common.redaction import Key
from datatrove_ckpt.errors import ServerDied
from datatrove_ckpt.inference.client.transport import Transport
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.process.shutdown import Shutdown

# Requests in flight at a server that has just started, under ``max_concurrent_generations: auto``.
FIRST_LIMIT = 16
_DEATHS_TO_QUARANTINE = 2
_IN_A_ROW = 20  # documents
# How much busier than the least busy server the server may be that has the document's prompt in its
# cache. Simulated engines took 156 s in place of 234 s with three prompts of a document at a time.
_BUSIER = 1.25

HealthProbe = Callable[[float, bool], Awaitable[None]]
"""Returns once the server is known to be alive. If it is dead, the attempt that waits for the probe
is aborted. Takes the time at which the failed attempt started, and whether to wait for proof that
the server accepts new requests.
"""


class AttemptLost(Exception):
    """The server died, or is about to be killed. No attempt is used up."""


class MustDivide(Exception):
    """A shared request makes no progress: its parts must be sent."""


@dataclass(eq=False)
class Death:
    """The end of one server process.

    Attributes:
        in_flight: how many requests the server had.
        attributed: a request is known to have caused it.
    """

    cause: str
    in_flight: int = 0
    attributed: bool = False


OnServer = Callable[[str, str, str | None, str], None]
"""Gets what happened to a server: what ("start", "ready", "reused", "death", "restart"), the
server's name within the rank, its URL without secrets or None, and why it died or "".
"""


class RankWork(Protocol):
    """``documents``: how many a rank has finished."""

    documents: int


class Sender:
    """A rank that sends requests to servers which it may share with other ranks.

    Args:
        shutdown: the rank's. Once the rank stops, its requests are not sent any more.
        order: requests of the sender with the lowest order are sent first.
        work: what the rank has done.

    Attributes:
        at_fault: numbers of documents whose requests fail while others are answered.
        on_release: called after each attempt that ends.
        on_free: called when a target could take a request, and none waits.
    """

    def __init__(
        self,
        shutdown: Shutdown | None = None,
        order: int = 0,
        on_server: OnServer | None = None,
        work: RankWork | None = None,
    ) -> None:
        self.shutdown = shutdown or Shutdown()
        self.order = order
        self.on_server = on_server
        self._work = work
        self.at_fault: set[int] = set()
        self.in_flight = 0
        self.on_release: Callable[[], None] | None = None
        self.on_free: Callable[[], None] | None = None

    @property
    def most_at_fault(self) -> int:
        """How many documents may be at fault for requests that fail.

        If they are more than 1 %, the server is at fault, which may fail at long prompts.
        """
        if self._work is None:
            return 1
        return max(1, self._work.documents // 100)

    @property
    def may_blame(self) -> bool:
        """Whether one more document may be at fault: not if too many are, in all or in a row."""
        if len(self.at_fault) >= self.most_at_fault:
            return False
        ordinals = sorted(self.at_fault)
        ends_of_rows = ordinals[_IN_A_ROW - 2 :]
        rows = zip(ordinals, ends_of_rows, strict=False)
        return all(end - start >= _IN_A_ROW for start, end in rows)


class Request:
    """The history of one request over all its attempts.

    Args:
        document: the id of its document.
        near: the servers that its document's last requests had, if there are several.
        is_suspect: an earlier attempt has found its document at fault.

    Attributes:
        deaths: of servers at which it was in flight.
        age: seconds it had been in flight at the first death.
        is_shared: by several texts. It is divided before it fails.
    """

    def __init__(
        self,
        sender: Sender | None = None,
        document: str = "",
        near: dict[Router, Target] | None = None,
        is_suspect: bool = False,
    ) -> None:
        self.sender = sender or Sender()
        self.document = document
        self.near = {} if near is None else near
        self.is_shared = False
        self.is_suspect = is_suspect
        self.deaths: list[Death] = []
        self.age = 0.0

    def copy(self) -> Request:
        other = Request(self.sender, self.document)
        other.deaths = list(self.deaths)
        other.age = self.age
        return other

    @property
    def may_not_be_sent(self) -> bool:
        return self.sender.shutdown.is_stopping

    @property
    def is_quarantined(self) -> bool:
        return self._unattributed_deaths >= _DEATHS_TO_QUARANTINE

    @property
    def must_run_alone(self) -> bool:
        return self._unattributed_deaths > _DEATHS_TO_QUARANTINE

    @property
    def _unattributed_deaths(self) -> int:
        return sum(not death.attributed for death in self.deaths)

    def record_death(self, death: Death, age: float) -> None:
        self.age = self.age if self.deaths else age
        self.deaths.append(death)


class Attempt:
    """One sending of a request.

    ``lost``: its server is given up, and its answer would be dropped.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started_at = time.monotonic()
        self.lost = False
        # Cheaper than ``asyncio.timeout``, which takes three times the CPU time.
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._handle: asyncio.Handle | None = None
        self._cancelled = False

    def abort(self) -> None:
        if not self.lost:
            self.lost = True
            self._handle = asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        self._cancelled = self._task.cancel()

    @property
    def is_cancelled(self) -> bool:
        return self._task.cancelling() > self._cancelling + self._cancelled

    def end(self) -> None:
        """Detaches the task, so that ``abort`` does not reach it."""
        if self._handle is not None:
            self._handle.cancel()
        if self._cancelled:
            self._task.uncancel()


class Target:
    """One server, as the client sees it.

    Attributes:
        transports: by path.
        limit: how many requests may be in flight.
        reserved: for quarantined requests, once the others are answered.
        cooldown_until: until then other servers are preferred, because a connection failed.
        alive_at: when the server last worked, or got its first request after an idle time.
        accepted_at: start of the youngest attempt that it answered.
        gives_reasons: an answer had a finish_reason.
        answers: how many it has given.
    """

    def __init__(self, probe: HealthProbe | None = None) -> None:
        self.url: HiddenUrl | None = None
        self.api_key: Key | None = None
        self.transports: dict[str, Transport] = {}
        self.up = False
        self.limit = math.inf
        self.in_flight = 0
        self.attempts: set[Attempt] = set()
        self.cooldown_until = 0.0
        self.reserved = False
        self.alive_at = 0.0
        self.accepted_at = 0.0
        self.probe = probe
        self.gives_reasons = False
        self.answers = 0

    def start_attempt(self, request: Request) -> Attempt:
        if not self.attempts:
            self.mark_alive()
        attempt = Attempt(request)
        self.attempts.add(attempt)
        return attempt

    def mark_alive(self, started_at: float = 0.0) -> None:
        self.alive_at = time.monotonic()
        self.accepted_at = max(self.accepted_at, started_at)


Place: TypeAlias = "asyncio.Future[Target]"
"""What a request waits for."""


class Quarantine:
    """Requests that may have killed servers."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.arrivals = 0
        self._waiting: list[tuple[float, int, Request, Place]] = []
        self._group_limit = 1
        self._peak = 0
        self._runs_alone = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def has_waiting(self) -> bool:
        while self._waiting:
            _, _, request, future = self._waiting[0]
            if not future.done() and not request.may_not_be_sent:
                return True
            heapq.heappop(self._waiting)
        return False

    def has_room(self) -> bool:
        if not self.has_waiting():
            return False
        if (self.in_flight and self._runs_alone) or self._waiting[0][2].must_run_alone:
            return self.in_flight == 0
        return self.in_flight < min(self._group_limit, math.isqrt(self._peak))

    def restart(self) -> None:
        """Begins with a group of one, on another server."""
        self.in_flight = 0
        self._group_limit = 1
        self._peak = len(self._waiting)

    def add(self, request: Request, future: Place) -> None:
        self.arrivals += 1
        heapq.heappush(self._waiting, (request.age, self.arrivals, request, future))
        self._peak = max(self._peak, self.in_flight + len(self._waiting))

    def start_next(self) -> tuple[Request, Place]:
        """Starts the next request. Call only if ``has_room``."""
        _, _, request, future = heapq.heappop(self._waiting)
        self.in_flight += 1
        self._runs_alone = request.must_run_alone
        return request, future

    def finish_one(self) -> None:
        self.in_flight -= 1
        self._group_limit += 1

    def requests(self) -> list[Request]:
        return [request for _, _, request, _ in self._waiting]

    def clear(self) -> list[tuple[Request, Place]]:
        waiting = self._waiting
        self._waiting = []
        return [(request, future) for _, _, request, future in waiting]


class Router:
    """Gives each attempt a target. ``limit``: requests in flight at all targets together."""

    def __init__(self, limit: int) -> None:
        self.targets: list[Target] = []
        self.senders: list[Sender] = []
        self._limit = limit
        self.in_flight = 0
        self._waiting: list[tuple[int, int, Request, Place]] = []
        self._arrivals = 0
        self._quarantine = Quarantine()
        self._failure: str | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._quarantine.waiting

    def waiting_of(self, sender: Sender) -> int:
        waiting = [request for _, _, request, _ in self._waiting] + self._quarantine.requests()
        return sum(request.sender is sender for request in waiting)

    def oldest_of(self, sender: Sender) -> Attempt | None:
        own = []
        for target in self.targets:
            attempts = list(target.attempts)  # a copy, because other threads ask, too
            own += [attempt for attempt in attempts if attempt.request.sender is sender]
        return min(own, key=lambda attempt: attempt.started_at, default=None)

    @property
    def capacity(self) -> int:
        return int(min(self._limit, sum(target.limit for target in self.targets if target.up)))

    def take(self, request: Request) -> Target | None:
        """Returns a target for one attempt, if one is free. Pass it to ``release`` afterwards.

        Raises:
            ServerDied: no server will be up again.
        """
        if self._failure is not None:
            raise ServerDied(self._failure)
        if self._waiting or request.may_not_be_sent:
            return None
        if request.deaths and request.is_quarantined:
            return None
        target = self._free(request)
        if target is not None:
            self._assign(target, request)
        return target

    async def acquire(self, request: Request) -> Target:
        target = self.take(request)
        if target is not None:
            return target
        future: Place = asyncio.get_running_loop().create_future()
        self._enqueue(request, future)
        self.admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result(), request)
            raise

    def release(self, target: Target, request: Request) -> None:
        target.in_flight -= 1
        self.in_flight -= 1
        request.sender.in_flight -= 1
        if target.reserved and self._quarantine.in_flight:
            self._quarantine.finish_one()
        self.admit()
        if request.sender.on_release is not None:
            request.sender.on_release()

    def admit(self) -> None:
        if self._quarantine.arrivals:
            self._admit_quarantined()
        while self._waiting:
            _, _, request, future = self._waiting[0]
            if not future.done() and not request.may_not_be_sent:
                target = self._free(request)
                if target is None:
                    return
                future.set_result(self._assign(target, request))
            heapq.heappop(self._waiting)  # what may not be sent waits until its rank cancels it
        for sender in self.senders:
            if sender.on_free is not None:
                sender.on_free()

    def mark_dead(self, target: Target, cause: str) -> Death:
        """Sends the target's requests in flight to other targets."""
        target.up = target.reserved = False
        death = Death(cause, len(target.attempts))
        now = time.monotonic()
        for attempt in target.attempts:
            attempt.request.record_death(death, now - attempt.started_at)
            attempt.abort()
        self.admit()
        return death

    def attribute_deaths(self, request: Request) -> None:
        """Attributes all deaths during this request to it: they count against no other request."""
        for death in request.deaths:
            death.attributed = True
        for other, future in self._quarantine.clear():
            self._enqueue(other, future)
        self.admit()

    def fail(self, cause: str) -> None:
        """Makes ``acquire`` raise ServerDied."""
        self._failure = cause
        waiting = self._waiting
        self._waiting = []
        for _, future in [*(entry[2:] for entry in waiting), *self._quarantine.clear()]:
            if not future.done():
                future.set_exception(ServerDied(cause))

    def _enqueue(self, request: Request, future: Place) -> None:
        if request.is_quarantined:
            self._quarantine.add(request, future)
        else:
            self._arrivals += 1
            heapq.heappush(self._waiting, (request.sender.order, self._arrivals, request, future))

    def _assign(self, target: Target, request: Request) -> Target:
        if len(self.targets) > 1:
            request.near[self] = target
        target.in_flight += 1
        self.in_flight += 1
        request.sender.in_flight += 1
        return target

    def _free(self, request: Request) -> Target | None:
        if self.in_flight >= self._limit:
            return None
        free = [t for t in self.targets if t.up and not t.reserved and t.in_flight < t.limit]
        if len(free) == 1:
            return free[0]
        return _least_busy(free, request.near.get(self))

    def _admit_quarantined(self) -> None:
        quarantine = self._quarantine
        reserved = next((target for target in self.targets if target.reserved), None)
        if reserved is None and quarantine.has_waiting():
            reserved = _least_busy([target for target in self.targets if target.up])
            quarantine.restart()
        if reserved is None:
            return
        reserved.reserved = quarantine.has_waiting() or reserved.in_flight > 0
        # The target has answered its other requests when all that it has in flight are quarantined.
        while (
            quarantine.has_room()
            and reserved.in_flight == quarantine.in_flight
            and self.in_flight < self._limit
        ):
            request, future = quarantine.start_next()
            future.set_result(self._assign(reserved, request))


def _least_busy(targets: list[Target], near: Target | None = None) -> Target | None:
    if len(targets) < 2:
        if targets:
            return targets[0]
        return None
    now = time.monotonic()
    best = min(targets, key=lambda target: (target.cooldown_until > now, target.in_flight))
    if (
        near in targets
        and near.cooldown_until <= now
        and near.in_flight <= _BUSIER * best.in_flight + 1
    ):
        return near
    return best
