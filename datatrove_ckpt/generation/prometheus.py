"""A rank's metrics for Prometheus, at a port of its process. Needs prometheus-client.

Counters start from zero in each attempt, which ``rate`` and ``increase`` understand. Sums over all
attempts are gauges, because they may fall a little after a kill.

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
from typing import Any

from loguru import logger
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.history import ProgressRecord, RequestHistograms
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.common.counts import METRICS, LogHistogram
from datatrove_ckpt.common.formatting import error_text
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
Value = Mapping[Any, float] | Histogram | float | None
"""The values by the labels of a metric, or the only one. None: not known."""


@dataclass(frozen=True)
class RankSnapshot:
    """A rank at one moment. ``job``: Slurm job id; "" outside of Slurm."""

    run: str
    rank: int
    host: str
    job: str
    started_at: float
    state: str
    progress: ProgressRecord
    spread: RequestHistograms


def _histogram(buckets: LogHistogram, ends: int, divisor: float = 1.0) -> Histogram:
    """Returns a histogram of Prometheus, whose sum is at most 9 % off."""
    cumulative: list[tuple[str, float]] = []
    for power in range(ends):
        # The last bucket below 2 ** power.
        upto = sum(count for bucket, count in buckets.items() if bucket <= 4 * power)
        cumulative.append((repr(2.0**power / divisor), upto))
    cumulative.append(("+Inf", sum(buckets.values())))
    middles = (
        count * (buckets.lower(bucket) + buckets.lower(bucket + 1)) / 2
        for bucket, count in buckets.items()
    )
    return cumulative, sum(middles) / divisor


def _values(rank: RankSnapshot) -> dict[str, Value]:
    progress = rank.progress
    done = progress.documents
    spread = rank.spread
    return {
        **done.samples(),
        **progress.own.samples(),
        "rank_info": {(__version__, rank.host, rank.job): 1.0},
        "rank_state": {state: int(state == rank.state) for state in STATES},
        "attempt_start_timestamp_seconds": rank.started_at,
        "rank_answers": {"all": done.answers, **done.bad},
        # A server may say anything.
        "rank_finish_reasons": dict([*done.endings.items()][:20]),
        "input_done_ratio": progress.position.share,
        "tasks_with_input": progress.position.tasks,
        "rank_cost": progress.total.cost / 1e9 or None,
        "documents_in_progress": progress.in_work,
        "requests_in_flight": progress.in_flight,
        "server_places": progress.places,
        "requests_waiting": progress.waiting,
        "unanswered_seconds": progress.silence.seconds,
        "request_duration_seconds": _histogram(spread.milliseconds, 22, 1000.0),  # to 35 min
        "request_prompt_tokens": _histogram(spread.prompt_tokens, 18),
        "request_completion_tokens": _histogram(spread.completion_tokens, 18),
    }


def families(ranks: list[RankSnapshot]) -> Iterator[Family]:
    values = [_values(rank) for rank in ranks]
    for heading, text in METRICS.items():
        name, *labels = heading.split()
        kind: Any = GaugeMetricFamily
        if name.endswith("_total"):
            kind = CounterMetricFamily
        elif any(isinstance(of_rank[name], tuple) for of_rank in values):
            kind = HistogramMetricFamily
        family = kind(PREFIX + name, text, labels=(*RANK_LABELS, *labels))
        for rank, of_rank in zip(ranks, values, strict=True):
            value = of_rank[name]
            key = rank.run, str(rank.rank)
            if isinstance(value, tuple):
                family.add_metric(key, *value)
            elif isinstance(value, Mapping):
                for label, number in value.items():
                    several = label if isinstance(label, tuple) else (label,)
                    family.add_metric((*key, *several), number)
            elif value is not None:
                family.add_metric(key, value)
        if family.samples:
            yield family


GetRank = Callable[[], RankSnapshot]


# the port ----------------------------------------------------------------------------------------


class ExportedRanks:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exported: dict[tuple[str, int], tuple[GetRank, float]] = {}

    @contextmanager
    def shows(self, rank: GetRank) -> Iterator[None]:
        first = rank()
        key = first.run, first.rank
        with self._lock:
            self._exported[key] = rank, inf
        try:
            yield
        finally:
            last = rank()
            with self._lock:
                self._exported[key] = lambda: last, time.monotonic() + _KEEP_ENDED_SECONDS

    def collect(self) -> Iterator[Family]:
        """A rank that has ended and started again counts once."""
        with self._lock:
            self._exported = {
                key: entry for key, entry in self._exported.items() if entry[1] > time.monotonic()
            }
            exported = list(self._exported.values())
        return families([rank() for rank, _ in exported])


@cache
def metrics_port(process: int, host: str, first: int) -> ExportedRanks:
    """Returns the ranks that this process shows. A fork has its own.

    Raises:
        OSError: no port is free.
    """
    exported = ExportedRanks()
    registry = CollectorRegistry()
    registry.register(exported)
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
        return exported
    raise OSError(f"metrics_port: no port of {host} is free from {first} on")


@contextmanager
def shown_rank(
    step: RunnerSettings,
    rank: int,
    checkpoint: OpenCheckpoint,
    reporter: RankReporter,
    shutdown: Shutdown,
) -> Iterator[None]:
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
            logger.warning(f"monitoring: could not be started: {error_text(error)}.")
        yield
