"""Decides which server takes the next request, and which requests wait.

Requests wait here, not at a server, so an outage uses up no attempts, and a dead server's requests
(``mark_dead``) go to the next server that is up.

    waiting      the oldest document's first, until a server has a place and room in its KV cache.
                 So new documents do not push the prompts of open documents out of the caches. A
                 request whose leading text is in the caches of some servers (its homes in
                 ``PrefixIndex``) waits for one of these servers, and other requests go ahead,
                 as long as no server is idle
    quarantined  requests that were in flight at two deaths of a server (``Quarantine``)

A request that was in flight at two deaths of a server runs apart from all others, on a server that
first finishes its other requests. The request that was youngest at its first death runs first: a
poisonous request usually kills soon. A death of one request alone is attributed to it, and the
others leave the quarantine.

Quarantined requests run in groups: first one request, then each answer makes room for one more, up
to the square root of their peak number. If the server dies of a group, its members run alone.
Running only single requests would leave the server nearly idle for hours; halving groups would need
more deaths than ``server_max_restarts`` allows.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import TypeAlias

import xxhash

from datatrove_ckpt.common.counts import WorkCounts
from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.common.retrying import SERVER, Quota
from datatrove_ckpt.config.endpoints import EndpointConfig
from datatrove_ckpt.config.inference_config import FIRST_LIMIT, REQUESTS_WITHOUT_METRICS
from datatrove_ckpt.errors import ServerDied
from datatrove_ckpt.inference.client.body import AnyBody, RequestBody
from datatrove_ckpt.inference.client.evidence import Evidence
from datatrove_ckpt.inference.client.half_answers import Continuation, HalfAnswer
from datatrove_ckpt.inference.client.http1 import Transport
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.process.shutdown import Shutdown

MINUTE_SECONDS = 60.0
_MINUTE_MARGIN = 1.01  # a provider sees requests a little later, or earlier, than they are sent


@dataclass(eq=False, slots=True)
class QuotaUse:
    """The share of one request in the limits of a minute. ``requests``: 0 or 1."""

    at: float
    requests: int = 0
    tokens: float = 0.0


class MinuteLimits:
    """The limits of one endpoint. Providers count per minute, so all requests may go together.

    Attributes:
        opens_at: monotonic time at which the next request may be sent; 0: now.
    """

    def __init__(self, endpoint: EndpointConfig) -> None:
        self.opens_at = 0.0
        self._most_requests = endpoint.requests_per_minute or math.inf
        self._most_tokens = endpoint.tokens_per_minute or math.inf
        self._sent: deque[QuotaUse] = deque()
        self._requests = 0
        self._tokens = 0.0
        self._mean = 0.0  # tokens of an answered request

    @property
    def frees_at(self) -> float:
        ends = (sent.at + MINUTE_SECONDS * _MINUTE_MARGIN for sent in self._sent if sent.requests)
        return next(ends, math.inf)

    def sent(self, size: int) -> QuotaUse:
        sent = QuotaUse(time.monotonic())
        self._sent.append(sent)
        self._count(sent, 1, self._mean or size / 4)  # bytes of a token
        return sent

    def answered(self, sent: QuotaUse, tokens: int) -> None:
        weight = _WEIGHT if self._mean else 1
        self._mean += (tokens - self._mean) * weight
        self._count(sent, 1, tokens)

    def not_counted(self, sent: QuotaUse) -> None:
        """Uncounts a request: providers do not count refused requests."""
        self._count(sent, 0, 0)

    def _count(self, sent: QuotaUse, requests: int, tokens: float) -> None:
        if self._sent and sent.at >= self._sent[0].at:
            self._requests += requests - sent.requests
            self._tokens += tokens - sent.tokens
            sent.requests = requests
            sent.tokens = tokens
        minute = MINUTE_SECONDS * _MINUTE_MARGIN
        now = time.monotonic()
        while self._sent and self._sent[0].at + minute <= now:
            old = self._sent.popleft()
            self._requests -= old.requests
            self._tokens -= old.tokens
        number = self._requests
        total = self._tokens
        self.opens_at = 0.0
        for each in self._sent:
            if number < self._most_requests and total + self._mean <= self._most_tokens:
                break
            number -= each.requests
            total -= each.tokens
            self.opens_at = each.at + minute


def limits_of(endpoint: EndpointConfig) -> MinuteLimits:
    """Returns the limits of an endpoint, which the next tasks and steps of this process share."""
    return _limits_in(threading.get_ident(), replace(endpoint, prices=None, weight=None))


@cache
def _limits_in(thread: int, endpoint: EndpointConfig) -> MinuteLimits:
    return MinuteLimits(endpoint)


_DEATHS_TO_QUARANTINE = 2
_WORKS_WITHIN = 120.0  # seconds of an answer: two minutes of its limits
_FAILURES = 3  # in a row
# Share of a KV cache from which it counts as full: the requests that run grow.
_FULL = 0.9
# A server that other clients fill gets at least a quarter of its requests from this client.
_MOST_OTHERS = 3
_MARGIN = 0.25  # seconds by which a provider's window may end late
_TOGETHER = 0.1  # seconds within which a provider may get requests in another order
_WEIGHT = 1 / 8  # weight of the newest answer in the mean number of tokens
_GROWTH = 1 / 8  # growth of a limit in a round trip, after it was halved
_NOTHING_SENT = QuotaUse(-math.inf)

HealthProbe = Callable[[float, bool], Awaitable[None]]
"""Returns when the server is known to be alive. If it is dead, the attempt that waits for the probe
is aborted. Takes the start time of the failed attempt, and whether to wait for proof that the
server accepts new requests.
"""


class AttemptLost(Exception):
    """Reports that the server died, or will be killed. No attempt is used up."""


class MustDivide(Exception):
    """Reports that a shared request makes no progress: its parts must be sent."""


@dataclass(eq=False)
class ServerDeath:
    """The end of one server process.

    Attributes:
        attributed: whether a request is known to have caused it.
    """

    cause: str
    in_flight: int = 0
    attributed: bool = False


OnServer = Callable[[str, str, str | None, str], None]
"""Receives an event of a server: its kind ("start", "ready", "reused", "death", "restart"), the
server's name within the rank, its URL without secrets or None, and the cause of its death or "".
"""


@dataclass(eq=False)
class Sender:
    """A rank that sends requests to servers which it may share with other ranks.

    Args:
        shutdown: the rank's shutdown.
        order: priority; the lowest order goes first.

    Attributes:
        undecided: number of documents that wait for a decision whose fault a rejection is.
        may_grow: whether ``on_change`` is also called when a target could take a request, and none
            waits.
    """

    shutdown: Shutdown = field(default_factory=Shutdown)
    order: int = 0
    on_server: OnServer | None = None
    work: WorkCounts = field(default_factory=WorkCounts)
    on_change: Callable[[Sender], None] | None = None
    undecided: int = 0
    may_grow: bool = False

    def count_error(self, kind: str, endpoint: str) -> None:
        self.work.errors[kind] += 1
        if endpoint:
            self.work.endpoint_errors[endpoint] += 1

    @contextmanager
    def deciding(self, frees_place: bool) -> Iterator[None]:
        self.undecided += frees_place
        if self.on_change is not None:
            self.on_change(self)
        try:
            yield
        finally:
            self.undecided -= frees_place


class Request:
    """The history of one request over all its attempts.

    Args:
        order: priority; the lowest order goes first.

    Attributes:
        prefix_hashes: hashes of its leading texts; None before a router with several servers has
            received it.
        known_prefix: hash of the longest leading text that an earlier request had.
        is_shared: whether several texts share it.
        continues: whether what its attempt has received is kept if the attempt is cut off.
    """

    # Most requests keep these values, so no request stores them.
    prefix_hashes: Sequence[int] | None = None
    known_prefix = 0
    is_shared = False
    deaths: tuple[ServerDeath, ...] = ()
    age_at_first_death = 0.0
    quota_use = _NOTHING_SENT
    half: HalfAnswer | None = None
    continues = False

    def __init__(
        self,
        sender: Sender | None = None,
        document: str = "",
        order: int = 0,
        body: AnyBody = b"",
    ) -> None:
        self.sender = sender or Sender()
        self.document = document
        self.order = order
        self.body = body

    def copy(self) -> Request:
        request = Request(self.sender, self.document, self.order)
        request.deaths = self.deaths
        request.age_at_first_death = self.age_at_first_death
        return request

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

    def record_death(self, death: ServerDeath, age: float) -> None:
        self.age_at_first_death = self.age_at_first_death if self.deaths else age
        self.deaths += (death,)


class Attempt:
    """An attempt to send a request; ``lost`` if its server has died."""

    lost = False
    _handle: asyncio.Handle | None = None
    _cancelled = False

    def __init__(self, target: Target, request: Request) -> None:
        self.target = target
        self.request = request
        self.started_at = time.monotonic()
        # Cheaper than ``asyncio.timeout``, which takes three times the CPU time.
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()

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
        """Detaches the task, so that ``abort`` no longer cancels it."""
        if self._handle is not None:
            self._handle.cancel()
        if self._cancelled:
            self._task.uncancel()


@dataclass(eq=False)
class Target:
    """One server in the router, or one data-parallel rank of vLLM, which has a cache of its own.

    Args:
        bit: bit of this server in sets of servers.
        ranks: all ranks of this server, in their order.
        rank: number of this rank, as vLLM's header and metrics have it; "" if it is the only rank.
        attempts: attempts at all ranks of this server.

    Attributes:
        name: name of an endpoint; else "".
        order: priority; the lowest order with room goes first.
        virtual_time: counter that grows with each request, in inverse proportion to the weight.
        pace: adapts the limit; None: it is fixed, or follows the metrics.
        load: used share of its limit, or of its KV cache. At 1 it is full.
        reserved: whether it serves quarantined requests.
        cooldown_until: time until which other servers get the requests, because requests failed.
        alive_at: time at which the server last worked, or got its first request after idling.
        accepted_at: start of the youngest attempt that it answered.
    """

    bit: int = 1
    probe: HealthProbe | None = None
    ranks: list[Target] = field(default_factory=list, repr=False)
    rank: str = ""
    attempts: set[Attempt] = field(default_factory=set)
    url: HiddenUrl | None = None
    api_key: Secret | None = None
    name: str = ""
    model: str = ""
    order: int = 0
    weight: float = 1.0
    virtual_time: float = 0.0
    limits: MinuteLimits | None = None
    transports: dict[str, Transport] = field(default_factory=dict)
    up: bool = False
    limit: float = math.inf
    pace: AdaptiveLimit | None = None
    restricts_metrics: bool = True
    cache_share_per_request: float = 0.0
    foreign_requests: float = 0.0
    load: float = 0.0
    in_flight: int = 0
    cooldown_until: float = 0.0
    failures: int = 0
    failing_since: float = 0.0
    is_reported: bool = False
    reported_at: float = -math.inf
    reserved: bool = False
    alive_at: float = 0.0
    accepted_at: float = 0.0
    gives_reasons: bool = False
    answers: int = 0
    evidence: Evidence = field(default_factory=Evidence)
    continuation: Continuation | None = None

    def __post_init__(self) -> None:
        self.ranks.append(self)

    def add_in_flight(self, number: int) -> None:
        in_flight = self.in_flight = self.in_flight + number
        load = 0.0
        # Metrics of an idle engine may be old: a request must come to see new ones.
        if in_flight:
            load = in_flight / self.limit
            if self.cache_share_per_request:
                foreign = min(self.foreign_requests, _MOST_OTHERS * in_flight)
                cache = (in_flight + foreign) * self.cache_share_per_request / _FULL
                load = max(load, cache)
        self.load = load

    @property
    def is_closed(self) -> bool:
        return self.limits is not None and self.limits.opens_at > time.monotonic()

    @property
    def is_failing(self) -> bool:
        return self.failures >= _FAILURES

    def is_cooling_down(self, now: float) -> bool:
        """Returns whether the server gets no request now. A failing server gets one request at a
        time, after its cooldown.
        """
        return self.cooldown_until > now or (self.in_flight > 0 and self.is_failing)

    def start_attempt(self, request: Request) -> Attempt:
        if not self.attempts:
            self.mark_alive()
        attempt = Attempt(self, request)
        self.attempts.add(attempt)
        return attempt

    def mark_alive(self, started_at: float = 0.0) -> None:
        now = time.monotonic()
        for rank in self.ranks:
            rank.alive_at = now
            if started_at > rank.accepted_at:
                rank.accepted_at = started_at


class AdaptiveLimit:
    """Adapts a target's limit to its answers, as TCP does.

    - The limit doubles in each round trip until the first refusal. Then it is halved at most once
      per round trip, and grows by an eighth in each.
    - A refused request keeps its place while it waits, at least as long as an answer takes. So a
      server that refuses immediately gets no more requests than a server that works.
    - A provider that shows the rest of its limit gets no more requests than the rest.
    """

    def __init__(self, target: Target) -> None:
        self.seconds = 0.0
        self._target = target
        self._growth = 1.0
        self._max_limit = float(REQUESTS_WITHOUT_METRICS)
        self._halved_at = 0.0
        self._is_proven = True  # an answer came since the halving
        self._was_refused = False  # the last request
        self._tokens = 0.0
        # Requests until the reset, requests that each reset adds, and the time of this knowledge.
        self._remaining = math.inf
        self._resets_at = 0.0
        self._gain = math.inf
        self._every = 0.0
        self._known_at = 0.0
        self._lowest: dict[bool, Quota] = {}  # lowest rest of requests that were sent together
        target.limit = FIRST_LIMIT

    def take(self) -> float:
        now = time.monotonic()
        if now >= self._resets_at:
            self._remaining += self._gain
            self._resets_at = now + self._every
        if self._remaining < 1:
            self._target.cooldown_until = self._resets_at
            return self._resets_at - now
        self._remaining -= 1
        return 0.0

    def answered(self, sent_at: float, tokens: float, quotas: Sequence[Quota]) -> None:
        target = self._target
        self._was_refused = False
        self._is_proven |= sent_at > self._halved_at
        self.seconds = time.monotonic() - sent_at
        self._tokens += (tokens - self._tokens) * _WEIGHT
        if target.in_flight >= target.limit:
            target.limit = min(target.limit + self._growth, self._max_limit)
        if quotas and sent_at >= self._known_at - _TOGETHER:
            self._note(sent_at, quotas)

    def _note(self, sent_at: float, quotas: Sequence[Quota]) -> None:
        if sent_at > self._known_at + _TOGETHER:
            self._known_at = sent_at
            self._lowest = {}
        since = self._known_at - _TOGETHER
        sent_later = sum(other.started_at >= since for other in self._target.attempts) - 1
        self._remaining = math.inf
        for quota in quotas:
            lowest = min(quota, self._lowest.get(quota.of_tokens, quota))
            self._lowest[quota.of_tokens] = lowest
            each = max(1.0, self._tokens) if quota.of_tokens else 1.0
            remaining = lowest.left / each - sent_later
            if remaining < self._remaining:
                self._remaining = remaining
                self._max_limit = min(REQUESTS_WITHOUT_METRICS, quota.limit / each)
                # A bucket fills at most by this, because later requests use it.
                self._gain = max(1.0, (quota.limit - quota.left) / each)
                self._every = min(quota.seconds, SERVER.longest_advice) + _MARGIN
                self._resets_at = sent_at + self._every

    def refused(self, sent_at: float, retry_after: float) -> None:
        """Lowers the limit. Obeys ``retry_after`` (seconds) only after two refusals in a row: a
        single request may be refused for its content.
        """
        now = time.monotonic()
        if retry_after and self._was_refused:
            self._remaining = 0.0
            self._gain = math.inf
            self._known_at = now
            self._resets_at = now + min(retry_after, SERVER.longest_advice)
        self._was_refused = True
        if self._is_proven:
            self._is_proven = False
            self._halved_at = now
            self._growth = _GROWTH
            self._target.limit = max(1.0, min(self._target.limit, self._target.in_flight) / 2)


TargetFuture: TypeAlias = "asyncio.Future[Target]"
"""The future of the target for a waiting request."""


# The oldest waiting requests, which may go ahead of each other. So many more documents than places
# are in work.
WINDOW = 64
# Load below which a server is idle, and takes requests whose homes have no place.
_IDLE = 0.75
# A home may have this multiple of an idle server's requests, and a few more.
_BUSIER = 2

Waiting: TypeAlias = tuple[int, int, int, Request, TargetFuture]
"""A waiting request: the orders of its sender and its document, its arrival, itself, its future."""


class Availability:
    """Finds the servers that have a place now, or the time at which limits open again."""

    __slots__ = ("_free", "_idle", "_usable", "best", "opens_at")

    def __init__(self, targets: Sequence[Target]) -> None:
        self._usable: list[Target] = []
        self._free: list[Target] = []
        self._idle: Target | None = None
        self.best: Target | None = None
        self.opens_at = math.inf
        cooling = None
        for target in targets:
            if not target.up or target.reserved:
                continue
            load = target.load
            if target.limits is not None and target.is_closed:
                opens_at = max(target.limits.opens_at, target.cooldown_until)
                self.opens_at = min(self.opens_at, opens_at)
                continue
            may_cool_down = target.failures or target.cooldown_until
            if may_cool_down and target.is_cooling_down(time.monotonic()):
                if load < 1 and (cooling is None or load < cooling.load):
                    cooling = target
                continue
            self._usable.append(target)
            if load < 1:
                self._free.append(target)
        if self._free:
            self.best = self._free[0]
            if len(self._free) > 1:
                self.best = min(self._free, key=_business)
            if self.best.load < _IDLE:
                self._idle = self.best
        # A server that refuses immediately would always be the least busy, and get most requests.
        is_closed = self.opens_at < math.inf
        if not self._usable and not is_closed:
            self.best = cooling
        elif is_closed and cooling is not None and cooling.cooldown_until > time.monotonic():
            self.opens_at = min(self.opens_at, cooling.cooldown_until)

    def choose(self, homes: int) -> Target | None:
        """Returns the server that takes a request, or None if the request waits.

        Args:
            homes: servers that have its leading text. The request does not wait for a home that is
                down, reserved or cooling down: it may take no request for hours.
        """
        idle = self._idle
        free = [target for target in self._free if target.bit & homes]
        if free:
            home = min(free, key=_load)
            if idle is None or home.in_flight <= _BUSIER * idle.in_flight + FIRST_LIMIT:
                return home
        elif idle is None and any(target.bit & homes for target in self._usable):
            return None
        return self.best


class Router:
    """Chooses a target for each attempt. ``limit`` counts the requests at all targets together."""

    def __init__(self, limit: int) -> None:
        self.targets: list[Target] = []
        self.senders: list[Sender] = []
        self.has_homes = True
        self.has_limits = False
        self._limit = limit
        self.in_flight = 0
        self._waiting: list[Waiting] = []  # in order: the window is at the start
        self._arrivals = 0
        self._prefixes = PrefixIndex()
        self._quarantine = Quarantine()
        self._failure = ""
        self._looks_at = math.inf
        self._look: asyncio.TimerHandle | None = None
        self._turn = 0.0

    def add(self, probe: HealthProbe | None = None) -> Target:
        target = Target(1 << len(self.targets), probe)
        self.targets.append(target)
        return target

    def divide(self, server: Target, ranks: int) -> None:
        while len(server.ranks) < ranks:
            server.rank = "0"
            number = str(len(server.ranks))
            bit = 1 << len(self.targets)
            self.targets.append(Target(bit, server.probe, server.ranks, number, server.attempts))

    @property
    def servers(self) -> list[Target]:
        return [target for target in self.targets if target is target.ranks[0]]

    @property
    def waiting(self) -> int:
        return len(self._all_waiting())

    def waiting_of(self, sender: Sender) -> int:
        return sum(request.sender is sender for request, _ in self._all_waiting())

    def in_flight_of(self, sender: Sender) -> list[Attempt]:
        attempts = []
        for target in self.servers:
            copied = list(target.attempts)  # a copy, because other threads also call this
            attempts += [attempt for attempt in copied if attempt.request.sender is sender]
        return attempts

    def oldest_of(self, sender: Sender) -> Attempt | None:
        attempts = self.in_flight_of(sender)
        return min(attempts, key=lambda attempt: attempt.started_at, default=None)

    @property
    def capacity(self) -> int:
        return int(min(self._limit, sum(target.limit for target in self.targets if target.up)))

    def take(self, request: Request) -> Target | None:
        """Returns a target for one attempt, if one is free. Pass it to ``release`` afterwards.

        Raises:
            ServerDied: no server will be up again.
        """
        if self._failure:
            raise ServerDied(self._failure)
        several = len(self.targets) > 1
        if several and self.has_homes and request.prefix_hashes is None:
            request.prefix_hashes, request.known_prefix = self._prefixes.find(request.body)
        sender = request.sender
        if sender.shutdown.is_stopping or (request.deaths and request.is_quarantined):
            return None
        waiting = self._waiting
        if len(waiting) >= WINDOW and (sender.order, request.order) > waiting[WINDOW - 1][:2]:
            return None
        if several:
            homes = request.known_prefix and self._prefixes.homes(request.known_prefix)
            best = self._room().choose(homes)
            return None if best is None else self.assign(best, request)
        # One server needs no ``Availability``, which takes four times the CPU time.
        for target in self.targets:
            if (
                target.load < 1
                and self.in_flight < self._limit
                and target.up
                and not target.reserved
                and (target.limits is None or not target.is_closed)
            ):
                return self.assign(target, request)
        return None

    async def acquire(self, request: Request) -> Target:
        target = self.take(request)
        if target is not None:
            return target
        future: TargetFuture = asyncio.get_running_loop().create_future()
        self._prefixes.add(request.prefix_hashes or (), 0)
        self._enqueue(request, future)
        if len(self._waiting) >= WINDOW:  # cancelled requests may fill the window
            self.admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise

    def release(self, target: Target) -> None:
        was_full = target.reserved or self.in_flight >= self._limit
        load = target.load
        target.add_in_flight(-1)
        self.in_flight -= 1
        if target.reserved and self._quarantine.in_flight:
            self._quarantine.finish_one()
        # No waiting request could be sent before. Only these changes may free a request, and, if
        # requests wait for the next minute, an answer with fewer tokens than expected, or the first
        # answer of a server that failed.
        may_free = not self._waiting or was_full or self.has_limits
        if may_free or load >= _IDLE > target.load or load >= 1 > target.load:
            self.admit()

    def admit(self, resized: bool = False) -> None:
        """Assigns servers to waiting requests. ``resized``: after a change of limits."""
        if resized:
            for target in self.targets:
                target.add_in_flight(0)
        if self._quarantine.arrivals:
            self._admit_quarantined()
        if self._waiting:
            self._admit_waiting()
        for sender in self.senders:
            is_due = resized or (sender.may_grow and not self._waiting)
            if is_due and sender.on_change is not None:
                sender.on_change(sender)

    def _admit_waiting(self) -> None:
        waiting = self._waiting
        room = self._room()
        number = 0
        while number < min(WINDOW, len(waiting)) and room.best is not None:
            _, _, _, request, place = waiting[number]
            chosen = room.choose(self._prefixes.homes(request.known_prefix))
            # A request that may not be sent waits until its rank cancels it.
            is_wanted = not place.done() and not request.may_not_be_sent
            if is_wanted and chosen is None:
                number += 1
                continue
            del waiting[number]
            if is_wanted and chosen is not None:
                place.set_result(self.assign(chosen, request))
                room = self._room()
        if waiting and room.opens_at < self._looks_at:
            self._look_later(room.opens_at)

    def _look_later(self, when: float) -> None:

        def look() -> None:
            self._looks_at = math.inf
            self.admit()

        if self._look is not None:
            self._look.cancel()
        self._looks_at = when
        self._look = asyncio.get_running_loop().call_later(when - time.monotonic(), look)

    def has_other(self, target: Target) -> bool:
        now = time.monotonic()
        return any(
            other.ranks is not target.ranks
            and other.up
            and not other.reserved
            and not other.is_cooling_down(now)
            for other in self.targets
        )

    @property
    def has_spent(self) -> bool:
        works_since = time.monotonic() - _WORKS_WITHIN
        return any(
            target.up and target.is_closed and not target.failures and target.alive_at > works_since
            for target in self.targets
        )

    def mark_dead(self, target: Target, cause: str) -> ServerDeath:
        for rank in target.ranks:
            rank.up = rank.reserved = False
            self._prefixes.forget(rank.bit)
        death = ServerDeath(cause, len(target.attempts))
        now = time.monotonic()
        for attempt in target.attempts:
            attempt.request.record_death(death, now - attempt.started_at)
            attempt.abort()
        self.admit()
        return death

    def attribute_deaths(self, request: Request) -> None:
        for death in request.deaths:
            death.attributed = True
        released = self._quarantine.all()
        self._quarantine.clear()
        for other, future in released:
            self._enqueue(other, future)
        self.admit()

    def fail(self, cause: str) -> None:
        self._failure = cause
        waiting = self._all_waiting()
        self._waiting = []
        self._quarantine.clear()
        for _, future in waiting:
            future.set_exception(ServerDied(cause))

    def _all_waiting(self) -> list[tuple[Request, TargetFuture]]:
        waiting = [(request, future) for *_, request, future in self._waiting]
        waiting += self._quarantine.all()
        return [(request, future) for request, future in waiting if not future.done()]

    def _enqueue(self, request: Request, future: TargetFuture) -> None:
        if request.is_quarantined:
            self._quarantine.add(request, future)
            self.admit()
        else:
            self._arrivals += 1
            order = (request.sender.order, request.order, self._arrivals)
            insort(self._waiting, (*order, request, future))
            if self.has_limits:
                self.admit()

    def assign(self, target: Target, request: Request) -> Target:
        if request.prefix_hashes:
            self._prefixes.add(request.prefix_hashes, target.bit)
        target.add_in_flight(1)
        if not self.has_homes:
            # A server that was down does not catch up.
            self._turn = max(self._turn, target.virtual_time)
            target.virtual_time = self._turn + 1 / target.weight
        if target.limits is not None:
            request.quota_use = target.limits.sent(len(request.body))
        self.in_flight += 1
        return target

    def _room(self) -> Availability:
        if self.in_flight < self._limit:
            return Availability(self.targets)
        return Availability(())

    def _admit_quarantined(self) -> None:
        quarantine = self._quarantine
        reserved = next((target for target in self.targets if target.reserved), None)
        if reserved is None and quarantine.has_waiting():
            now = time.monotonic()
            reserved = min(
                (target for target in self.targets if target.up),
                key=lambda target: (target.cooldown_until > now, target.load),
                default=None,
            )
            quarantine.restart()
        if reserved is None:
            return
        in_flight = sum(rank.in_flight for rank in reserved.ranks)
        is_reserved = quarantine.has_waiting() or in_flight > 0
        for rank in reserved.ranks:
            rank.reserved = is_reserved
        # The server has answered the others when only quarantined requests are in flight.
        others = in_flight - quarantine.in_flight
        while not others and quarantine.has_room() and self.in_flight < self._limit:
            request, future = quarantine.start_next()
            future.set_result(self.assign(reserved, request))


_load = attrgetter("load")


def _business(target: Target) -> tuple[float, ...]:
    return target.order, target.load / target.weight, target.virtual_time


# Leading texts are compared at every 256 bytes, and further back at every quarter of the text
# before. Only the last kilobyte of a long piece is hashed: texts that differ only elsewhere are
# routed as equal texts.
_STEP = 256
_PART = 4
_HASHED = 1024
_ENDS = [0]
while _ENDS[-1] < 1 << 24:
    _ENDS.append(_ENDS[-1] + max(_STEP, _ENDS[-1] // _PART))
_PIECES = [(max(start, end - _HASHED), end) for start, end in pairwise(_ENDS)]
_REMEMBERED = 80_000  # texts in each of two generations, which take up to 16 MB together
# The engine's prompt begins here.
_STARTS = (b'"messages":', b'"prompt":', b'"input":')


class PrefixIndex:
    """Maps hashes of leading texts to servers, which are bits of an integer.

    A text that no request has had for a whole generation is forgotten.
    """

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def find(self, body: AnyBody) -> tuple[Sequence[int], int]:
        """Returns the hashes of all leading texts of a request, and the hash of the longest text
        that an earlier request had; 0 if there is none.
        """
        texts = _leading_hashes(body)
        for text in reversed(texts):
            if text in self._young or text in self._old:
                return texts, text
        return texts, 0

    def homes(self, text: int) -> int:
        return self._young.get(text) or self._old.get(text, 0)

    def add(self, texts: Sequence[int], server: int) -> None:
        """Adds the leading texts of a request. ``server``: its bit; 0 for a waiting request."""
        if len(self._young) >= _REMEMBERED:
            self._old = self._young
            self._young = {}
        young = self._young
        old = self._old
        if texts and not young.get(texts[-1], 0) & server:
            for text in texts:
                young[text] = (young.get(text) or old.get(text, 0)) | server

    def forget(self, server: int) -> None:
        for texts in (self._young, self._old):
            for text, homes in texts.items():
                texts[text] = homes & ~server


def _leading_hashes(body: AnyBody) -> list[int]:
    if isinstance(body, RequestBody):
        body = body.with_media_hashed()
    start = next((at for at in map(body.find, _STARTS) if at >= 0), 0)
    length = len(body) - start
    hashes: list[int] = []
    last = 0
    for begin, end in _PIECES:
        if end > length:
            break
        last = xxhash.xxh3_64_intdigest(body[start + begin : start + end], last)
        hashes.append(last)
    return hashes


class Quarantine:
    def __init__(self) -> None:
        self.in_flight = 0
        self.arrivals = 0
        self._waiting: list[tuple[float, int, Request, TargetFuture]] = []
        self._group_limit = 1
        self._peak = 0
        self._runs_alone = False

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
        self.in_flight = 0
        self._group_limit = 1
        self._peak = len(self._waiting)

    def add(self, request: Request, future: TargetFuture) -> None:
        self.arrivals += 1
        heapq.heappush(self._waiting, (request.age_at_first_death, self.arrivals, request, future))
        self._peak = max(self._peak, self.in_flight + len(self._waiting))

    def start_next(self) -> tuple[Request, TargetFuture]:
        _, _, request, future = heapq.heappop(self._waiting)
        self.in_flight += 1
        self._runs_alone = request.must_run_alone
        return request, future

    def finish_one(self) -> None:
        self.in_flight -= 1
        self._group_limit += 1

    def all(self) -> list[tuple[Request, TargetFuture]]:
        return [(request, future) for _, _, request, future in self._waiting]

    def clear(self) -> None:
        self._waiting = []
