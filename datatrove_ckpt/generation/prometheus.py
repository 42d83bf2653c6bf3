"""A rank's metrics for Prometheus, at a port of its process. Needs prometheus-client.

Names and units follow Prometheus: seconds, bytes, and ``_total`` for counters. Counters start from
zero in each attempt, which ``rate`` and ``increase`` understand. Sums over all attempts are gauges,
because they may fall a little after a kill.

Each process has a port of its own: the first free port from ``metrics_port`` on. While its process
runs, an ended rank is shown for two more minutes, because Prometheus may scrape only every minute.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, NamedTuple

from loguru import logger
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.counts import DocumentCounts, LogHistogram
from datatrove_ckpt.checkpoint.history import ProgressRecord, RequestHistograms
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.common.formatting import error_text
from datatrove_ckpt.common.work_counts import WorkCounts
from datatrove_ckpt.config.monitoring import name_of_folder
from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.process.slurm_job import job_id

_KEEP_ENDED_SECONDS = 120.0
_PORTS = 1000  # that are tried
_ENDS = {"done": "done", "stopped": "stopped", "error": "failed"}

PREFIX = "datatrove_ckpt_"
RANK_LABELS = ("run", "rank")
STATES = ("starting", "running", "stopping", "done", "stopped", "failed")
"""``stopping`` drains; the last three are ends."""


Histogram = tuple[list[tuple[str, float]], float]
"""Upper bounds, each with its number of values, and the values' sum."""


class Metric(NamedTuple):
    """A metric of one rank.

    Attributes:
        values: by the value of its own label, or the values, or the only one. None: not known.
        labels: its own, besides ``RANK_LABELS``.
    """

    name: str
    help: str
    values: Mapping[Any, float] | Histogram | float | None
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> Any:
        """Its class of prometheus-client."""
        if self.name.endswith("_total"):
            return CounterMetricFamily
        if isinstance(self.values, tuple):
            return HistogramMetricFamily
        return GaugeMetricFamily


@dataclass(frozen=True)
class RankSnapshot:
    """Which rank it is, where it works, and how far it is.

    Attributes:
        run: the job's name.
        job: of Slurm; "" outside of it.
        started_at: Unix seconds.
        state: one of ``STATES``.
    """

    run: str
    rank: int
    host: str
    job: str
    started_at: float
    state: str
    progress: ProgressRecord
    spread: RequestHistograms


def _tokens(counts: DocumentCounts | WorkCounts) -> dict[str, float]:
    return {"prompt": counts.prompt_tokens, "completion": counts.completion_tokens}


def _histogram(buckets: LogHistogram, ends: int, divisor: float = 1.0) -> Histogram:
    """``ends``: upper ends of the buckets, as powers of two from 1 on.

    The sum is of their middles, at most 9 % off.
    """
    found: list[tuple[str, float]] = []
    for power in range(ends):
        # The last one below 2 ** power.
        upto = sum(count for bucket, count in buckets.items() if bucket <= 4 * power)
        found.append((repr(2.0**power / divisor), upto))
    found.append(("+Inf", sum(buckets.values())))
    middles = (
        count * (buckets.lower(bucket) + buckets.lower(bucket + 1)) / 2
        for bucket, count in buckets.items()
    )
    return found, sum(middles) / divisor


def metrics(rank: RankSnapshot) -> tuple[Metric, ...]:
    """Returns all metrics of a rank, in the same order for each rank."""
    return *_of_documents(rank.progress.documents, rank), *_of_requests(rank.progress, rank.spread)


def _of_documents(done: DocumentCounts, rank: RankSnapshot) -> tuple[Metric, ...]:
    progress = rank.progress
    return (
        Metric(
            "rank_info",
            "Always 1; its labels tell where the task works.",
            {(__version__, rank.host, rank.job): 1.0},
            ("version", "host", "job"),
        ),
        Metric(
            "rank_state",
            f"1 for the state that the task is in, one of {', '.join(STATES)}.",
            {state: int(state == rank.state) for state in STATES},
            ("state",),
        ),
        Metric(
            "attempt_start_timestamp_seconds",
            "When this attempt of the task started, in Unix seconds.",
            rank.started_at,
        ),
        Metric(
            "rank_documents",
            "Documents that all attempts of the task have finished.",
            {outcome: getattr(done, outcome) for outcome in ("written", "dropped", "dead")},
            ("outcome",),
        ),
        Metric(
            "rank_tokens",
            "Tokens of the documents that all attempts of the task have finished.",
            _tokens(done),
            ("type",),
        ),
        Metric(
            "rank_answers",
            "Answers of these documents: all, and the bad ones by what is wrong with them.",
            {"all": done.answers, **done.bad},
            ("kind",),
        ),
        Metric(
            "rank_finish_reasons",
            "Answers of these documents by finish_reason.",
            # A server may say anything.
            dict([*done.endings.items()][:20]),
            ("reason",),
        ),
        Metric(
            "input_done_ratio",
            "Part of the rank's input that is done, from 0 to 1; missing if not known.",
            progress.position.share,
        ),
        Metric(
            "tasks_with_input",
            "Tasks of the run that have an input; missing if not known.",
            progress.position.tasks,
        ),
        Metric(
            "rank_cost",
            "Cost of all attempts' answers, at the prices of the settings; missing without them.",
            progress.total.cost / 1e9 or None,
        ),
        Metric(
            "documents_total",
            "Documents that this attempt has finished.",
            progress.own.documents,
        ),
        Metric(
            "documents_in_progress",
            "Documents that rollouts work on now.",
            progress.in_work,
        ),
    )


def _of_requests(progress: ProgressRecord, spread: RequestHistograms) -> tuple[Metric, ...]:
    own = progress.own
    return (
        Metric(
            "requests_total",
            "Requests of this attempt that ended at a server.",
            {"answered": own.requests, "failed": own.failed},
            ("outcome",),
        ),
        Metric(
            "requests_in_flight",
            "Requests that servers work on now.",
            progress.in_flight,
        ),
        Metric(
            "server_places",
            "Requests that the servers have room for now.",
            progress.places,
        ),
        Metric(
            "requests_waiting",
            "Requests that wait for a server, a free slot or their next attempt now.",
            progress.waiting,
        ),
        Metric(
            "unanswered_seconds",
            "For so long servers have answered no request, although some failed.",
            progress.silence.seconds,
        ),
        Metric(
            "request_retries_total",
            "Requests sent again in this attempt: after an error, or because their server was "
            "lost.",
            {"error": own.retries, "server_lost": own.resent},
            ("cause",),
        ),
        Metric(
            "request_errors_total",
            "Requests of this attempt that failed once, by kind of error.",
            own.errors,
            ("kind",),
        ),
        Metric(
            "cache_hits_total",
            "Requests of this attempt that the request cache answered.",
            own.cached,
        ),
        Metric(
            "tokens_total",
            "Tokens of this attempt's answers, as servers count them.",
            _tokens(own),
            ("type",),
        ),
        Metric(
            "server_restarts_total",
            "Restarts of model servers in this attempt.",
            own.restarts,
        ),
        Metric(
            "request_duration_seconds",
            "Time from sending a request to its answer.",
            _histogram(spread.milliseconds, 22, 1000.0),  # 1 ms to 35 min
        ),
        Metric(
            "request_prompt_tokens",
            "Prompt tokens of each answer.",
            _histogram(spread.prompt_tokens, 18),
        ),
        Metric(
            "request_completion_tokens",
            "Completion tokens of each answer.",
            _histogram(spread.completion_tokens, 18),
        ),
    )


def families(ranks: list[RankSnapshot]) -> Iterator[Family]:
    """The metrics of some ranks, each metric once."""
    for same in zip(*map(metrics, ranks), strict=True):
        first = same[0]
        family = first.kind(PREFIX + first.name, first.help, labels=(*RANK_LABELS, *first.labels))
        for rank, metric in zip(ranks, same, strict=True):
            values = metric.values
            of_rank = (rank.run, str(rank.rank))
            if isinstance(values, tuple):
                family.add_metric(of_rank, *values)
            elif isinstance(values, Mapping):
                for own, value in values.items():
                    several = own if isinstance(own, tuple) else (own,)
                    family.add_metric((*of_rank, *several), value)
            elif values is not None:
                family.add_metric(of_rank, values)
        if family.samples:
            yield family


GetRank = Callable[[], RankSnapshot]


# the port ----------------------------------------------------------------------------------------


class ExportedRanks:
    """What the port of a process shows: a collector of prometheus-client's registry."""

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
        """The ranks that are shown now. One that has ended and started again is there once."""
        with self._lock:
            self._shown = {
                key: one for key, one in self._shown.items() if one[1] > time.monotonic()
            }
            shown = list(self._shown.values())
        return families([rank() for rank, _ in shown])


@cache
def metrics_port(process: int, host: str, first: int) -> ExportedRanks:
    """Returns the ranks that this process shows. A fork has another one.

    Raises:
        OSError: no port is free.
    """
    shown = ExportedRanks()
    registry = CollectorRegistry()
    registry.register(shown)
    for port in range(first, min(first + _PORTS, 1 << 16)):
        try:
            server, _ = start_http_server(port, host, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise
        # A fork of a rollout's may outlive this process.
        os.register_at_fork(after_in_child=server.socket.close)
        if port != first:
            logger.info(f"metrics_port: {first} is taken; this process has {host}:{port}.")
        return shown
    raise OSError(f"metrics_port: no port of {host} is free from {first} on")


@contextmanager
def shown_rank(
    step: RunnerSettings,
    rank: int,
    checkpoint: OpenCheckpoint,
    reporter: RankReporter,
    shutdown: Shutdown,
) -> Iterator[None]:
    """Shows a rank inside the block, as its ``monitoring`` says. Without a port the run goes on."""
    started_at = time.time()
    config = step.monitoring
    folder = step.output_writer.output_folder.resolve_paths("")
    if step.checkpoints_local_dir is not None:
        folder = str(step.checkpoints_root)
    name = config.run_name or name_of_folder(folder)
    if step.retry_dead_letters:
        name = f"{name} (retry)"

    def now() -> RankSnapshot:
        progress = reporter.progress()
        checkpoint.fill_in(progress)
        state = "starting"
        if reporter.end is not None:
            progress.in_flight = progress.waiting = progress.in_work = 0
            state = _ENDS[reporter.end.why]
        elif shutdown.is_requested:
            state = "stopping"
        elif reporter.clients:
            state = "running"
        return RankSnapshot(
            name,
            rank,
            socket.gethostname(),
            job_id() or "",
            started_at,
            state,
            progress,
            reporter.spread(),
        )

    with ExitStack() as stack:
        try:
            port = metrics_port(os.getpid(), config.metrics_host, config.metrics_port or 0)
            stack.enter_context(port.shows(now))
        except Exception as error:  # such as too many open files
            logger.warning(
                f"monitoring: could not be started: {error_text(error)}. The run goes on without "
                "it."
            )
        yield
