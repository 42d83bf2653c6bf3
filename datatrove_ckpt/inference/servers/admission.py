"""Adapts the number of requests at an engine to its /metrics."""

import asyncio
import math
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NoReturn

from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.config.inference_config import (
    ENGINES,
    FIRST_LIMIT,
    REQUESTS_WITHOUT_METRICS,
    MetricNames,
)
from datatrove_ckpt.errors import TooManyOpenFiles
from datatrove_ckpt.inference.client.client import ExchangeFailed, get
from datatrove_ckpt.inference.client.routing import AdaptiveLimit, Router, Target
from datatrove_ckpt.process.shutdown import wait_until_cancelled


@dataclass(frozen=True)
class Metrics:
    """An engine's metrics at one moment, summed over its data-parallel parts.

    Attributes:
        running, waiting: number of running and of waiting requests.
        tokens: number of tokens generated and processed since its start.
        preemptions: number of requests that lost their place in the KV cache since its start.
        cache_usage: share of the KV cache that running requests use.
    """

    running: float
    waiting: float
    tokens: float
    preemptions: float = 0.0
    cache_usage: float = 0.0


def parse_metrics(names: MetricNames, text: str) -> Metrics | None:
    running, waiting, preemptions, tokens, usage = names
    sums = defaultdict[str, float](float)
    caches = 0  # a KV cache for each of a server's ``dp``
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name and name in (running, waiting, preemptions, usage, *tokens):
            number, *_ = line[len(name) :].rpartition("}")[2].split()  # a time may follow
            sums[name] += float(number)
            caches += name == usage
    if not sums or not all(map(math.isfinite, sums.values())):
        return None
    return Metrics(
        sums[running],
        sums[waiting],
        sum(sums[name] for name in tokens),
        sums[preemptions],
        sums[usage] / max(1, caches),
    )


async def _read_page(target: Target, seconds: float) -> str:
    """Returns the text at /metrics; "" if the server shows none, or does not answer in time."""
    assert target.url is not None
    is_external = target.probe is None
    try:
        response = await get(target.url.api("/metrics"), target.api_key, seconds, is_external)
        if response.status == 200:
            return response.body.decode()
        return ""
    except (ExchangeFailed, TooManyOpenFiles, ValueError):
        return ""


async def read_metrics(target: Target, names: MetricNames | None, seconds: float) -> Metrics | None:
    """Returns the metrics; None if the engine has none, or does not answer in time."""
    if names is None:
        return None
    try:
        return parse_metrics(names, await _read_page(target, seconds))
    except ValueError:
        return None


# At most twice the target waits, even if the engine runs a single request at a time.
_LEAST_TARGET = FIRST_LIMIT // 2
_USUAL_SAMPLES = 5
# Requests per sample: a request in 2.5 seconds, twice as many after 9 s without a preemption.
_GROWTH_AFTER_PREEMPTION = 0.1
_ACCELERATION = 1.02
_SAMPLE_SECONDS = 0.25
_METRICS_TIMEOUT = 5.0  # seconds
_WAIT_FOR_METRICS_SECONDS = 30.0


class Admission:
    """Decides the number of requests in flight for ``max_concurrent_generations: auto``.

    An engine is busiest when a few requests always wait in its own queue; further requests would
    only be lost with a dead server. So the limit follows the engine's metrics.

    - All requests on the way to the queue, or back, may reach the queue together. So only requests
      that are always on the way count as normal, and the limit grows by at most ``target`` per
      sample: the queue stays below twice the target.
    - Until a request waits in the queue, the limit grows twice as fast.
    - vLLM's numbers describe its last step. A sample that equals the sample before changes nothing.
    - With an empty queue the limit never falls: the missing requests are on the way.
    - An engine that runs more requests than its KV cache can hold preempts requests, which lose
      their work and wait again. So after a preemption the limit is the number of running requests,
      and grows slowly.

    Attributes:
        limit: maximum number of requests in flight.
        target: number of requests that should wait in the engine: at least 8, an eighth of the
            running requests, and the number that is always on the way.
    """

    def __init__(self) -> None:
        self.limit = FIRST_LIMIT
        self.target = _LEAST_TARGET
        self._last = Metrics(0.0, 0.0, 0.0, preemptions=math.inf)
        self._has_queued = False
        self._on_the_way: deque[float] = deque(maxlen=_USUAL_SAMPLES)
        self._growth = math.inf  # requests more per sample
        self._exact = float(FIRST_LIMIT)  # the limit with its fraction

    def update(self, metrics: Metrics, in_flight: int) -> None:
        last = self._last
        self._last = metrics
        if metrics == last:
            return
        usual = 0.0
        if len(self._on_the_way) == _USUAL_SAMPLES:
            usual = min(self._on_the_way)
        on_the_way = max(0.0, in_flight - metrics.running - metrics.waiting)
        self._on_the_way.append(on_the_way)
        self.target = math.ceil(max(_LEAST_TARGET, metrics.running / 8, usual))
        preempted = metrics.preemptions > last.preemptions
        if preempted:
            self._growth = _GROWTH_AFTER_PREEMPTION
            wanted = metrics.running
        else:
            self._growth *= _ACCELERATION
            self._has_queued = self._has_queued or metrics.waiting > 0
            more = self.target
            if not self._has_queued:
                more *= 2
            missing = more - metrics.waiting - max(0.0, on_the_way - usual)
            wanted = in_flight + self._exact % 1 + min(missing, self._growth)
        falls = metrics.waiting or preempted
        self._exact = max(_LEAST_TARGET, wanted if falls else max(self._exact, wanted))
        self.limit = math.floor(self._exact)


async def adapt_admission(
    name: str, target: Target, router: Router, names: MetricNames | None
) -> NoReturn:
    """Adapts the target's limit to its engine until cancelled.

    Without metrics (vLLM's ``disable-log-stats``) the answers decide. The answers also decide if a
    counter of tokens falls twice: a load balancer then shows another server's metrics each time,
    and the limit would grow without bound. If the metrics stop, the limit stays, and the measured
    use of the cache is dropped.
    """
    admission = Admission()  # new for each process of the server
    read_at = time.monotonic()
    tokens: float | None = None
    falls = 0
    reason = "shows no metrics at /metrics"
    while True:
        await asyncio.sleep(_SAMPLE_SECONDS)
        metrics = await read_metrics(target, names, _METRICS_TIMEOUT)
        if metrics is not None:
            read_at = time.monotonic()
            falls += tokens is not None and metrics.tokens < tokens
            tokens = metrics.tokens
            # A restart also lets the counter fall, once.
            if falls == 2:
                reason = "shows the metrics of several servers in turn, as a load balancer does"
                break
            admission.update(metrics, target.in_flight)
            target.limit = admission.limit
            # Space that no request uses may belong to transfers to other servers.
            target.cache_share_per_request = metrics.cache_usage / (metrics.running or math.inf)
            target.foreign_requests = max(0.0, metrics.running + metrics.waiting - target.in_flight)
        elif time.monotonic() - read_at < _WAIT_FOR_METRICS_SECONDS:
            continue
        elif tokens is None:
            break
        else:
            target.cache_share_per_request = 0.0
        router.admit(resized=True)
    target.pace = AdaptiveLimit(target)
    target.cache_share_per_request = 0.0
    target.foreign_requests = 0.0
    router.admit(resized=True)
    logger.warning(
        f"{name} {reason}, so max_concurrent_generations: auto starts with {FIRST_LIMIT} requests "
        f"at once and goes up to {REQUESTS_WITHOUT_METRICS}. Let the server show its own "
        "metrics, or set a number."
    )
    await wait_until_cancelled()


async def follow_endpoint(target: Target, router: Router) -> None:
    """Adapts a target's limit to its engine, if /metrics has the names of an engine.

    Some names appear with the first request. So the page is read until an answer has come.
    """
    looks = 0
    while True:
        is_last = target.answers > 0
        page = await _read_page(target, _METRICS_TIMEOUT)
        for engine in ENGINES.values():
            names = engine.metrics
            if names is not None and names.are_in(page):
                target.pace = None
                await adapt_admission(str(target.url), target, router, names)
        if is_last:
            return
        looks += 1
        await asyncio.sleep(retrying.RESTART.wait(looks))
