"""Requests, the attempts to send them, and the servers that get them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.common.retrying import SERVER, Quota
from datatrove_ckpt.config.inference_config import FIRST_LIMIT, REQUESTS_WITHOUT_METRICS
from datatrove_ckpt.inference.client.body import AnyBody
from datatrove_ckpt.inference.client.transport import Transport
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.process.shutdown import Shutdown

_DEATHS_TO_QUARANTINE = 2
_IN_A_ROW = 20  # documents
_FAILURES = 3  # in a row
# Share of a KV cache from which it counts as full: the requests that run grow. Simulated engines
# are slower by half from 1.0 on, and by 2 % at 0.85.
_FULL = 0.9
# A server that other clients fill gets at least a quarter of its requests from this one.
_MOST_OTHERS = 3
_MARGIN = 0.25  # seconds by which a provider's window may end later than it says
_TOGETHER = 0.1  # seconds within which a provider may get requests in another order
_WEIGHT = 1 / 8  # of the newest answer in the mean number of tokens
_GROWTH = 1 / 8  # of a limit in a round trip, once it was halved

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
        self.on_change: Callable[[], None] | None = None
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
        order: of its document: requests of the document with the lowest order are sent first.
        body: what is sent.
        is_suspect: an earlier attempt has found its document at fault.

    Attributes:
        texts: hashes of its leading texts; None before it has come to a router.
        known: the longest of them that an earlier request had.
        deaths: of servers at which it was in flight.
        age: seconds it had been in flight at the first death.
        is_shared: by several texts. It is divided before it fails.
    """

    def __init__(
        self,
        sender: Sender | None = None,
        document: str = "",
        order: int = 0,
        body: AnyBody = b"",
        is_suspect: bool = False,
    ) -> None:
        self.sender = sender or Sender()
        self.document = document
        self.order = order
        self.body = body
        self.texts: Sequence[int] | None = None
        self.known = 0
        self.is_shared = False
        self.is_suspect = is_suspect
        self.deaths: list[Death] = []
        self.age = 0.0

    def copy(self) -> Request:
        other = Request(self.sender, self.document, self.order)
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

    Args:
        bit: stands for this server in sets of servers.

    Attributes:
        transports: by path.
        limit: how many requests may be in flight.
        pace: adapts the limit; None: it is a number, or follows the server's metrics.
        usage_each: share of the KV cache that a running request takes, on average.
        others: requests in flight that other clients have sent.
        load: share of its places, or of its KV cache, that is taken. From 1 on it is full.
        reserved: for quarantined requests, once the others are answered.
        cooldown_until: until then it gets no request that another server may take, because its
            requests failed.
        failures: since its last answer.
        failing_since: when the first of them was.
        is_said: the log says that it fails.
        alive_at: when the server last worked, or got its first request after an idle time.
        accepted_at: start of the youngest attempt that it answered.
        gives_reasons: an answer had a finish_reason.
        answers: how many it has given.
    """

    def __init__(self, bit: int = 1, probe: HealthProbe | None = None) -> None:
        self.bit = bit
        self.url: HiddenUrl | None = None
        self.api_key: Secret | None = None
        self.transports: dict[str, Transport] = {}
        self.up = False
        self.limit = math.inf
        self.pace: Pace | None = None
        self.usage_each = 0.0
        self.others = 0.0
        self.load = 0.0
        self.in_flight = 0
        self.attempts: set[Attempt] = set()
        self.cooldown_until = 0.0
        self.failures = 0
        self.failing_since = 0.0
        self.is_said = False
        self.reserved = False
        self.alive_at = 0.0
        self.accepted_at = 0.0
        self.probe = probe
        self.gives_reasons = False
        self.answers = 0

    def add_in_flight(self, number: int) -> None:
        self.in_flight += number
        self.load = 0.0
        # Metrics of an idle engine may be old: a request must come to see new ones.
        if self.in_flight:
            others = min(self.others, _MOST_OTHERS * self.in_flight)
            cache = (self.in_flight + others) * self.usage_each / _FULL
            self.load = max(self.in_flight / self.limit, cache)

    @property
    def fails(self) -> bool:
        """Whether it fails at every request, not at one that is at fault."""
        return self.failures >= _FAILURES

    def start_attempt(self, request: Request) -> Attempt:
        if not self.attempts:
            self.mark_alive()
        attempt = Attempt(request)
        self.attempts.add(attempt)
        return attempt

    def mark_alive(self, started_at: float = 0.0) -> None:
        self.alive_at = time.monotonic()
        self.accepted_at = max(self.accepted_at, started_at)


class Pace:
    """Adapts a target's limit to its answers, as TCP does.

    - The limit doubles in each round trip until the first refusal. Then it is halved at most once
      per round trip, and grows by an eighth in each.
    - A refused request keeps its place while it waits, for as long as an answer takes at least. So
      a server that refuses at once gets no more requests than one that works.
    - A provider that shows what is left of its limit gets no more requests than that.
    """

    def __init__(self, target: Target) -> None:
        self.seconds = 0.0  # that the last answer took
        self._target = target
        self._growth = 1.0  # of the limit, with each answer
        self._most = float(REQUESTS_WITHOUT_METRICS)
        self._halved_at = 0.0
        self._is_proven = True  # a request that was sent after that was answered
        self._was_refused = False  # the last request
        self._tokens = 0.0  # of a request
        # What may be sent until the reset, how much each reset adds, and when that was known.
        self._left = math.inf
        self._resets_at = 0.0
        self._gain = math.inf
        self._every = 0.0
        self._known_at = 0.0
        self._lowest: dict[bool, Quota] = {}  # after requests that were sent together
        target.limit = FIRST_LIMIT

    def take(self) -> float:
        """Returns 0 if a request may be sent now, else the seconds to wait."""
        now = time.monotonic()
        if now >= self._resets_at:
            self._left += self._gain
            self._resets_at = now + self._every
        if self._left < 1:
            self._target.cooldown_until = self._resets_at
            return self._resets_at - now
        self._left -= 1
        return 0.0

    def answered(self, sent_at: float, tokens: float, quotas: Sequence[Quota]) -> None:
        target = self._target
        self._was_refused = False
        self._is_proven |= sent_at > self._halved_at
        self.seconds = time.monotonic() - sent_at
        self._tokens += (tokens - self._tokens) * _WEIGHT
        if target.in_flight >= target.limit:
            target.limit = min(target.limit + self._growth, self._most)
        if quotas and sent_at >= self._known_at - _TOGETHER:
            self._note(sent_at, quotas)

    def _note(self, sent_at: float, quotas: Sequence[Quota]) -> None:
        if sent_at > self._known_at + _TOGETHER:
            self._known_at = sent_at
            self._lowest = {}
        # Without the answered request itself.
        since = self._known_at - _TOGETHER
        sent_later = sum(other.started_at >= since for other in self._target.attempts) - 1
        self._left = math.inf
        for quota in quotas:
            lowest = min(quota, self._lowest.get(quota.of_tokens, quota))
            self._lowest[quota.of_tokens] = lowest
            each = max(1.0, self._tokens) if quota.of_tokens else 1.0
            left = lowest.left / each - sent_later
            if left < self._left:
                self._left = left
                self._most = min(REQUESTS_WITHOUT_METRICS, quota.limit / each)
                # A bucket fills by no more, because of what was sent later.
                self._gain = max(1.0, (quota.limit - quota.left) / each)
                self._every = min(quota.seconds, SERVER.longest_advice) + _MARGIN
                self._resets_at = sent_at + self._every

    def refused(self, sent_at: float, asked: float) -> None:
        """``asked``: seconds. One request may be refused for what it is, so the next decides."""
        now = time.monotonic()
        if asked and self._was_refused:
            self._left = 0.0
            self._gain = math.inf
            self._known_at = now
            self._resets_at = now + min(asked, SERVER.longest_advice)
        self._was_refused = True
        if self._is_proven:
            self._is_proven = False
            self._halved_at = now
            self._growth = _GROWTH
            self._target.limit = max(1.0, min(self._target.limit, self._target.in_flight) / 2)


Place: TypeAlias = "asyncio.Future[Target]"
"""What a request waits for."""
