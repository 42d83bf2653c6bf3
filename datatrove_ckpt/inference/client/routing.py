"""Decides which server takes the next request, and which requests wait.

Requests wait here, not at a server, so an outage uses up no attempts, and a dead server's requests
(``mark_dead``) go to the next server that is up.

    waiting      the oldest document's first, until a server has a place for it. A document's first
                 request also waits while the KV caches are full: new documents would push the
                 prompts of open documents out of them. A request whose leading text some servers
                 have in their caches (its homes, see ``prefixes.py``) waits for a place at one of
                 these, and others go ahead, as long as no server stands idle
    quarantined  requests that were in flight at two deaths of a server: see ``quarantine.py``
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from bisect import insort
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TypeAlias

from datatrove_ckpt.common.redaction import Key
from datatrove_ckpt.errors import ServerDied
from datatrove_ckpt.inference.client.body import AnyBody
from datatrove_ckpt.inference.client.prefixes import Prefixes
from datatrove_ckpt.inference.client.quarantine import Quarantine
from datatrove_ckpt.inference.client.transport import Transport
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.process.shutdown import Shutdown

# Requests in flight at a server that has just started, under ``max_concurrent_generations: auto``.
FIRST_LIMIT = 16
_DEATHS_TO_QUARANTINE = 2
_IN_A_ROW = 20  # documents
# The oldest of the waiting requests: they may go ahead of each other. So many documents more than
# places are in work, so that there is a choice.
WINDOW = 64
# Share of a KV cache from which it counts as full: the requests that run grow.
_FULL = 0.85
# Load below which a server stands idle, and takes requests whose homes have no place.
_IDLE = 0.75

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
        on_change: called when targets may have more or fewer places than before.
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
        self.on_change: Callable[[], None] | None = None

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
        order: of its document: requests of the document with the lowest order are sent first.
        opened: the routers that have let through a request of its document.
        body: what is sent.
        is_suspect: an earlier attempt has found its document at fault.

    Attributes:
        texts: hashes of its leading texts; None before it has come to a router.
        known: the longest of them that an earlier request had.
        deaths: of servers at which it was in flight.
        age: seconds it had been in flight at the first death.
        is_shared: by several texts. It is divided before it fails.
    """

    __slots__ = (
        "age",
        "body",
        "deaths",
        "document",
        "is_shared",
        "is_suspect",
        "known",
        "opened",
        "order",
        "sender",
        "texts",
    )

    def __init__(
        self,
        sender: Sender | None = None,
        document: str = "",
        order: int = 0,
        opened: set[Router] | None = None,
        body: AnyBody = b"",
        is_suspect: bool = False,
    ) -> None:
        self.sender = sender or Sender()
        self.document = document
        self.order = order
        self.opened = set() if opened is None else opened
        self.body = body
        self.texts: Sequence[int] | None = None
        self.known = 0
        self.is_shared = False
        self.is_suspect = is_suspect
        self.deaths: list[Death] = []
        self.age = 0.0

    def copy(self) -> Request:
        other = Request(self.sender, self.document, self.order, self.opened)
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

    __slots__ = ("_cancelled", "_cancelling", "_handle", "_task", "lost", "request", "started_at")

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

    Args:
        bit: stands for this server in sets of servers.

    Attributes:
        transports: by path.
        limit: how many requests may be in flight.
        usage_each: share of the KV cache that a running request takes, on average.
        others: requests in flight that other clients have sent.
        load: share of its places, or of its KV cache, that is taken. From 1 on it gets no document.
        reserved: for quarantined requests, once the others are answered.
        cooldown_until: until then other servers are preferred, because a connection failed.
        alive_at: when the server last worked, or got its first request after an idle time.
        accepted_at: start of the youngest attempt that it answered.
        gives_reasons: an answer had a finish_reason.
        answers: how many it has given.
    """

    def __init__(self, bit: int = 1, probe: HealthProbe | None = None) -> None:
        self.bit = bit
        self.url: HiddenUrl | None = None
        self.api_key: Key | None = None
        self.transports: dict[str, Transport] = {}
        self.up = False
        self.limit = math.inf
        self.usage_each = 0.0
        self.others = 0.0
        self.load = 0.0
        self.in_flight = 0
        self.attempts: set[Attempt] = set()
        self.cooldown_until = 0.0
        self.reserved = False
        self.alive_at = 0.0
        self.accepted_at = 0.0
        self.probe = probe
        self.gives_reasons = False
        self.answers = 0

    def add_in_flight(self, number: int) -> None:
        self.in_flight += number
        cache = (self.in_flight + self.others) * self.usage_each / _FULL
        self.load = max(self.in_flight / self.limit, cache)

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


Waiting: TypeAlias = tuple[int, int, int, Request, Place]
"""A waiting request: the orders of its sender and its document, its arrival, what it waits for."""


class WaitingLine:
    """Requests that wait, the oldest document's first.

    Attributes:
        window: the first of them.
    """

    def __init__(self) -> None:
        self.window: list[Waiting] = []
        self._later: list[Waiting] = []

    def __len__(self) -> int:
        return len(self.window) + len(self._later)

    def add(self, waiting: Waiting) -> None:
        if len(self.window) == WINDOW and waiting > self.window[-1]:
            heapq.heappush(self._later, waiting)
            return
        insort(self.window, waiting)
        if len(self.window) > WINDOW:
            heapq.heappush(self._later, self.window.pop())

    def remove(self, index: int) -> None:
        del self.window[index]
        if self._later:
            self.window.append(heapq.heappop(self._later))

    def all(self) -> list[tuple[Request, Place]]:
        return [(request, place) for *_, request, place in (*self.window, *self._later)]


class Room:
    """Which servers have a place for a request now.

    Attributes:
        best: the least busy one; None: all are full.
    """

    __slots__ = ("_away", "_free", "_load", "_targets", "best")

    def __init__(self, targets: Sequence[Target]) -> None:
        now = time.monotonic()
        self._targets = targets
        self._free = 0
        self._away = 0  # nothing waits for these, which may take no request for hours
        self._load = 1.0
        self.best: Target | None = None
        cooling = None
        for target in targets:
            is_up = target.up and not target.reserved
            is_cooling = target.cooldown_until > now
            if not is_up or is_cooling:
                self._away |= target.bit
            if not is_up or target.in_flight >= target.limit:
                continue
            self._free |= target.bit
            if is_cooling:
                cooling = target
            elif self.best is None or target.load < self._load:
                self.best = target
                self._load = target.load
        if self.best is None and cooling is not None:
            self.best = cooling
            self._load = cooling.load

    def choose(self, homes: int, is_open: bool) -> Target | None:
        """Returns the server that takes a request, or None if the request waits.

        Args:
            homes: the servers that have its leading text.
            is_open: a request of its document was sent before.
        """
        if self._load >= 1 and not is_open:
            return None
        if not homes:
            return self.best
        if usable := homes & self._free & ~self._away:
            home = min((target for target in self._targets if target.bit & usable), key=_load)
            if is_open or home.load < 1:
                return home
        if self._load >= _IDLE and homes & ~self._away:
            return None
        return self.best


class Router:
    """Gives each attempt a target. ``limit``: requests in flight at all targets together."""

    def __init__(self, limit: int) -> None:
        self.targets: list[Target] = []
        self.senders: list[Sender] = []
        self._limit = limit
        self.in_flight = 0
        self._waiting = WaitingLine()
        self._arrivals = 0
        self._prefixes = Prefixes()
        self._quarantine = Quarantine()
        self._failure: str | None = None

    def add(self, probe: HealthProbe | None = None) -> Target:
        """Adds a server, which is not up yet."""
        target = Target(1 << len(self.targets), probe)
        self.targets.append(target)
        return target

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._quarantine.waiting

    def waiting_of(self, sender: Sender) -> int:
        waiting = [*self._waiting.all(), *self._quarantine.all()]
        return sum(request.sender is sender for request, _ in waiting)

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
        if request.texts is None:
            request.texts = ()
            if len(self.targets) > 1:
                request.texts, request.known = self._prefixes.enter(request.body)
        if len(self._waiting) >= WINDOW or request.may_not_be_sent:
            return None
        if request.deaths and request.is_quarantined:
            return None
        target = self._choose(self._room(), request)
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
        target.add_in_flight(-1)
        self.in_flight -= 1
        request.sender.in_flight -= 1
        if target.reserved and self._quarantine.in_flight:
            self._quarantine.finish_one()
        self.admit()
        if request.sender.on_release is not None:
            request.sender.on_release()

    def admit(self, resized: bool = False) -> None:
        """Gives servers to waiting requests. ``resized``: servers have other limits than before."""
        if resized:
            for target in self.targets:
                target.add_in_flight(0)
        if self._quarantine.arrivals:
            self._admit_quarantined()
        window = self._waiting.window
        room = self._room()
        number = 0
        while number < len(window) and room.best is not None:
            _, _, _, request, place = window[number]
            # What may not be sent waits until its rank cancels it.
            if not place.done() and not request.may_not_be_sent:
                target = self._choose(room, request)
                if target is None:
                    number += 1
                    continue
                place.set_result(self._assign(target, request))
                room = self._room()
            self._waiting.remove(number)
        if resized or not window:
            for sender in self.senders:
                if sender.on_change is not None:
                    sender.on_change()

    def mark_dead(self, target: Target, cause: str) -> Death:
        """Sends the target's requests in flight to other targets."""
        target.up = target.reserved = False
        self._prefixes.forget(target.bit)
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
        released = self._quarantine.all()
        self._quarantine.clear()
        for other, place in released:
            self._enqueue(other, place)
        self.admit()

    def fail(self, cause: str) -> None:
        """Makes ``acquire`` raise ServerDied."""
        self._failure = cause
        waiting = [*self._waiting.all(), *self._quarantine.all()]
        self._waiting = WaitingLine()
        self._quarantine.clear()
        for _, place in waiting:
            if not place.done():
                place.set_exception(ServerDied(cause))

    def _enqueue(self, request: Request, future: Place) -> None:
        if request.is_quarantined:
            self._quarantine.add(request, future)
        else:
            self._arrivals += 1
            order = (request.sender.order, request.order, self._arrivals)
            self._waiting.add((*order, request, future))

    def _assign(self, target: Target, request: Request) -> Target:
        request.opened.add(self)
        self._prefixes.add(request.texts or (), target.bit)
        target.add_in_flight(1)
        self.in_flight += 1
        request.sender.in_flight += 1
        return target

    def _room(self) -> Room:
        if self.in_flight < self._limit:
            return Room(self.targets)
        return Room(())

    def _choose(self, room: Room, request: Request) -> Target | None:
        return room.choose(self._prefixes.homes(request.known), self in request.opened)

    def _admit_quarantined(self) -> None:
        quarantine = self._quarantine
        reserved = next((target for target in self.targets if target.reserved), None)
        if reserved is None and quarantine.has_waiting():
            up = [target for target in self.targets if target.up]
            reserved = min(up, key=_load, default=None)
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


_load = attrgetter("load")
