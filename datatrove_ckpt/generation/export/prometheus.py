"""A rank's metrics for Prometheus, at a port of its process. Needs prometheus-client.

Counters (``_total``) start from zero in each attempt, as Prometheus' ``rate`` expects. Sums over all attempts are
gauges: after a kill they may be a little lower, as if a counter had started again.

Each process has a port of its own, the first free one from ``metrics_port`` on. A rank that has ended is shown for two
more minutes, if its process still runs: Prometheus may look every minute only.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, NamedTuple

from loguru import logger
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_records import Buckets, Progress, Spread, WorkCounts

_KEEP_ENDED_SECONDS = 120.0
_PORTS = 1000  # that are tried

PREFIX = "datatrove_ckpt_"
RANK_LABELS = ("run", "rank")
STATES = ("starting", "running", "stopping", "done", "stopped", "failed")
"""``stopping`` drains; the last three are ends."""


class Histogram(NamedTuple):
    """Each upper end with the number of values up to it, and the sum of all values."""

    buckets: list[tuple[str, float]]
    sum: float


class Metric(NamedTuple):
    """A metric of one rank.

    Attributes:
        values: by label values, or the only one. None: not known.
        labels: besides ``RANK_LABELS``.
    """

    name: str
    help: str
    values: Mapping[Any, float] | Histogram | float | None
    labels: tuple[str, ...] = ()

    def family(self) -> Family:
        """Returns an empty family of such metrics. Only what grows is a ``_total``."""
        kind: Any = GaugeMetricFamily
        if isinstance(self.values, Histogram):
            kind = HistogramMetricFamily
        elif self.name.endswith("_total"):
            kind = CounterMetricFamily
        family: Family = kind(PREFIX + self.name, self.help, labels=(*RANK_LABELS, *self.labels))
        return family


@dataclass(frozen=True)
class RankNow:
    """A rank now.

    Attributes:
        run: name of the run.
        job: of Slurm, or "".
        started_at, now: Unix seconds.
        ranks: number of ranks of the run.
        state: one of ``STATES``.
    """

    run: str
    rank: int
    host: str
    job: str
    started_at: float
    ranks: int
    state: str
    now: float
    progress: Progress
    spread: Spread

    def metrics(self) -> list[Metric]:
        """Returns the same metrics, in the same order, for every rank."""
        total = self.progress
        own = total.own
        seconds = {("inference",): total.seconds.inference, ("total",): total.seconds.total}
        outcomes = {(name,): getattr(total.documents, name) for name in ("written", "dropped", "dead")}
        states = {(state,): int(state == self.state) for state in STATES}
        retries = {("error",): own.retries, ("server_lost",): own.resent}
        errors = {(kind,): count for kind, count in own.errors.items()}
        latency = _histogram(self.spread.milliseconds, 22, 1000.0)  # 1 ms to 35 min
        where = {(__version__, self.host, self.job): 1.0}
        return [
            Metric(
                "rank_info",
                "Always 1; its labels tell where the rank works.",
                where,
                ("version", "host", "job"),
            ),
            Metric(
                "rank_state",
                f"1 for the state that the rank is in, one of {', '.join(STATES)}.",
                states,
                ("state",),
            ),
            Metric("job_ranks", "How many ranks the job has, those that work nowhere included.", self.ranks),
            Metric("updated_timestamp_seconds", "When these values were read, in Unix seconds.", self.now),
            Metric(
                "attempt_start_timestamp_seconds",
                "When this attempt of the rank started, in Unix seconds.",
                self.started_at,
            ),
            Metric("rank_seconds", "Time that all attempts of the rank took.", seconds, ("phase",)),
            Metric(
                "rank_documents",
                "Documents that all attempts of the rank have finished.",
                outcomes,
                ("outcome",),
            ),
            Metric(
                "rank_requests",
                "Requests of the documents that all attempts of the rank have finished.",
                total.documents.requests,
            ),
            Metric(
                "rank_tokens",
                "Tokens of the documents that all attempts of the rank have finished.",
                _tokens(total.documents),
                ("type",),
            ),
            Metric("rank_chunks", "Chunks that all attempts of the rank have committed.", total.chunks),
            Metric(
                "input_done_ratio",
                "Part of the rank's input that is done, from 0 to 1; missing if not known.",
                total.position.share,
            ),
            Metric("documents_total", "Documents that this attempt has finished.", own.documents),
            Metric("documents_in_progress", "Documents that rollouts work on now.", total.in_work),
            Metric(
                "requests_total",
                "Requests of this attempt that ended at a server.",
                {("answered",): own.requests, ("failed",): own.failed},
                ("outcome",),
            ),
            Metric("requests_in_flight", "Requests that servers work on now.", total.in_flight),
            Metric(
                "requests_waiting",
                "Requests that wait for a server, a free slot or their next attempt now.",
                total.waiting,
            ),
            Metric(
                "unanswered_seconds",
                "For so long servers have answered no request, although some failed.",
                total.silence.seconds,
            ),
            Metric(
                "request_attempts_total",
                "Times that a request was sent to a server in this attempt.",
                own.sent,
            ),
            Metric(
                "request_retries_total",
                "Requests sent again in this attempt: after an error, or because their server was lost.",
                retries,
                ("cause",),
            ),
            Metric(
                "request_errors_total",
                "Requests of this attempt that failed once, by kind of error.",
                errors,
                ("kind",),
            ),
            Metric("cache_hits_total", "Requests of this attempt that the request cache answered.", own.cached),
            Metric(
                "tokens_total",
                "Tokens of this attempt's answers, as servers count them.",
                _tokens(own),
                ("type",),
            ),
            Metric("server_restarts_total", "Restarts of model servers in this attempt.", own.restarts),
            Metric("request_duration_seconds", "Time from sending a request to its answer.", latency),
            Metric(
                "request_prompt_tokens",
                "Prompt tokens of each answer.",
                _histogram(self.spread.prompt_tokens, 18),
            ),
            Metric(
                "request_completion_tokens",
                "Completion tokens of each answer.",
                _histogram(self.spread.completion_tokens, 18),
            ),
        ]


def _tokens(counts: DocumentCounts | WorkCounts) -> dict[tuple[str, ...], float]:
    return {("prompt",): counts.prompt_tokens, ("completion",): counts.completion_tokens}


def _histogram(buckets: Buckets, ends: int, divisor: float = 1.0) -> Histogram:
    """``ends``: upper ends of the buckets, as powers of two from 1 on. The sum is of their middles, at most 9 % off."""
    found: list[tuple[str, float]] = []
    for power in range(ends):
        upto = sum(count for bucket, count in buckets.items() if bucket <= 4 * power)  # the last one below 2 ** power
        found.append((repr(2.0**power / divisor), upto))
    found.append(("+Inf", sum(buckets.values())))
    middles = (count * (buckets.lower(bucket) + buckets.lower(bucket + 1)) / 2 for bucket, count in buckets.items())
    return Histogram(found, sum(middles) / divisor)


def families(ranks: Sequence[RankNow]) -> Iterator[Family]:
    for same in zip(*[rank.metrics() for rank in ranks], strict=True):
        family = same[0].family()
        for rank, metric in zip(ranks, same, strict=True):
            of_rank = (rank.run, str(rank.rank))
            if isinstance(metric.values, Histogram):
                family.add_metric(of_rank, *metric.values)
            elif isinstance(metric.values, Mapping):
                for own, value in metric.values.items():
                    family.add_metric((*of_rank, *own), value)
            elif metric.values is not None:
                family.add_metric(of_rank, metric.values)
        if family.samples:
            yield family


GetRank = Callable[[], RankNow]


# the port -------------------------------------------------------------------------------------------------------------


class ShownRanks:
    """A collector of prometheus-client's registry."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[tuple[str, int], tuple[GetRank, float]] = {}

    @contextmanager
    def shows(self, rank: GetRank) -> Iterator[None]:
        """Shows a rank inside the block, and its last values for a while after it."""
        first = rank()
        key = first.run, first.rank
        with self._lock:
            self._shown[key] = rank, inf
        try:
            yield
        finally:
            last = rank()
            with self._lock:
                self._shown[key] = lambda: last, time.monotonic() + _KEEP_ENDED_SECONDS

    def collect(self) -> Iterator[Family]:
        with self._lock:
            self._shown = {key: one for key, one in self._shown.items() if one[1] > time.monotonic()}
            shown = list(self._shown.values())
        return families([rank() for rank, _ in shown])


@cache
def _port(process: int, host: str, first: int) -> ShownRanks | None:
    shown = ShownRanks()
    registry = CollectorRegistry()
    registry.register(shown)
    why = "no port is free"
    for port in range(first, min(first + _PORTS, 1 << 16)):
        try:
            server, _ = start_http_server(port, host, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            why = error.strerror or str(error)
            break
        os.register_at_fork(after_in_child=server.socket.close)  # a fork of a rollout's may outlive this process
        if port != first:
            logger.info(f"metrics_port: {first} is taken; this process has {host}:{port}.")
        return shown
    logger.warning(f"metrics_port: {host}:{first} cannot be used: {why}. The run goes on without metrics there.")
    return None


def metrics_port(host: str, first: int) -> ShownRanks | None:
    """Returns the port of this process; None, with a warning, if none can be used. A fork has another one."""
    return _port(os.getpid(), host, first)
