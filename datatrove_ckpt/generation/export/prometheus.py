"""A rank's metrics for Prometheus: as text, at a port, and in node_exporter's files. Needs prometheus-client.

Names and units are as Prometheus wants them: seconds, bytes, and ``_total`` for what only grows. Those counters start
from zero in each attempt, which Prometheus' ``rate`` and ``increase`` understand. What is summed over all attempts is a
gauge: after a kill it may be a little lower than before, which would make a counter look as if it had started again.

Each process has a port of its own, the first free one from ``metrics_port`` on.

A rank that has ended is shown for two more minutes, if its process still runs: Prometheus may look every minute only.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from math import inf
from socketserver import TCPServer, ThreadingMixIn
from typing import Literal, NamedTuple, TypeAlias

from loguru import logger
from prometheus_client import Metric as Family
from prometheus_client import generate_latest
from prometheus_client.exposition import MetricsHandler

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_records import Buckets, Progress, Spread, WorkCounts
from datatrove_ckpt.config.paths import expand_path

_KEEP_ENDED_SECONDS = 120.0
_KEEP_FILES_SECONDS = 600.0
FILE_SECONDS = 15.0  # between two versions of a rank's file
_PORTS = 1000  # that are tried
_HEAD = b"# datatrove-ckpt"  # of our files

PREFIX = "datatrove_ckpt_"
RANK_LABELS = ("run", "rank")
STATES = ("starting", "running", "stopping", "done", "stopped", "failed")
"""``stopping`` drains; the last three are ends."""


class Metric(NamedTuple):
    """``labels``: its own, besides ``RANK_LABELS``."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


_METRICS = {
    "rank_info": Metric("gauge", "Always 1; its labels tell where the rank works.", ("version", "host", "job")),
    "rank_state": Metric("gauge", f"1 for the state that the rank is in, one of {', '.join(STATES)}.", ("state",)),
    "job_ranks": Metric("gauge", "How many ranks the job has, those that work nowhere included."),
    "updated_timestamp_seconds": Metric("gauge", "When these values were read, in Unix seconds."),
    "attempt_start_timestamp_seconds": Metric("gauge", "When this attempt of the rank started, in Unix seconds."),
    "rank_seconds": Metric("gauge", "Time that all attempts of the rank took.", ("phase",)),
    "rank_documents": Metric("gauge", "Documents that all attempts of the rank have finished.", ("outcome",)),
    "rank_requests": Metric("gauge", "Requests of the documents that all attempts of the rank have finished."),
    "rank_tokens": Metric("gauge", "Tokens of the documents that all attempts of the rank have finished.", ("type",)),
    "rank_chunks": Metric("gauge", "Chunks that all attempts of the rank have committed."),
    "input_done_ratio": Metric("gauge", "Part of the rank's input that is done, from 0 to 1; missing if not known."),
    "documents_total": Metric("counter", "Documents that this attempt has finished."),
    "documents_in_progress": Metric("gauge", "Documents that rollouts work on now."),
    "requests_total": Metric("counter", "Requests of this attempt that ended at a server.", ("outcome",)),
    "requests_in_flight": Metric("gauge", "Requests that servers work on now."),
    "requests_waiting": Metric("gauge", "Requests that wait for a server, a free slot or their next attempt now."),
    "unanswered_seconds": Metric("gauge", "For so long servers have answered no request, although some failed."),
    "request_attempts_total": Metric("counter", "Times that a request was sent to a server in this attempt."),
    "request_retries_total": Metric(
        "counter", "Requests sent again in this attempt: after an error, or because their server was lost.", ("cause",)
    ),
    "request_errors_total": Metric(
        "counter", "Requests of this attempt that failed once, by kind of error.", ("kind",)
    ),
    "cache_hits_total": Metric("counter", "Requests of this attempt that the request cache answered."),
    "tokens_total": Metric("counter", "Tokens of this attempt's answers, as servers count them.", ("type",)),
    "server_restarts_total": Metric("counter", "Restarts of model servers in this attempt."),
    "request_duration_seconds": Metric("histogram", "Time from sending a request to its answer."),
    "request_prompt_tokens": Metric("histogram", "Prompt tokens of each answer."),
    "request_completion_tokens": Metric("histogram", "Completion tokens of each answer."),
}
METRICS = {PREFIX + name: metric for name, metric in _METRICS.items()}


class Histogram(NamedTuple):
    """As Prometheus has it: each upper end with the number of values up to it, and the sum of all values."""

    buckets: list[tuple[str, int]]
    sum: float


Values: TypeAlias = dict[tuple[str, ...], float] | Histogram | float | None
"""Of a metric: by the values of its own labels, or the only one. None: not known."""


@dataclass(frozen=True)
class RankNow:
    """Which rank it is, where it works, and how far it is.

    Attributes:
        run: the job's name.
        job: of Slurm; "" outside of it.
        started_at, now: Unix seconds.
        ranks: how many the job has.
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

    def values(self) -> dict[str, Values]:
        """By the names in ``METRICS``."""
        total = self.progress
        own = total.own
        found: dict[str, Values] = {
            "rank_info": {(__version__, self.host, self.job): 1},
            "rank_state": {(state,): int(state == self.state) for state in STATES},
            "job_ranks": self.ranks,
            "updated_timestamp_seconds": round(self.now, 3),
            "attempt_start_timestamp_seconds": round(self.started_at, 3),
            "rank_seconds": {("inference",): total.seconds.inference, ("total",): total.seconds.total},
            "rank_documents": {(name,): getattr(total.documents, name) for name in ("written", "dropped", "dead")},
            "rank_requests": total.documents.requests,
            "rank_tokens": _tokens(total.documents),
            "rank_chunks": total.chunks,
            "input_done_ratio": total.position.share,
            "documents_total": own.documents,
            "documents_in_progress": total.in_work,
            "requests_total": {("answered",): own.requests, ("failed",): own.failed},
            "requests_in_flight": total.in_flight,
            "requests_waiting": total.waiting,
            "unanswered_seconds": total.silence.seconds,
            "request_attempts_total": own.sent,
            "request_retries_total": _retries(own),
            "request_errors_total": {(kind,): count for kind, count in own.errors.items()},
            "cache_hits_total": own.cached,
            "tokens_total": _tokens(own),
            "server_restarts_total": own.restarts,
            "request_duration_seconds": _histogram(self.spread.milliseconds, 22, 1000.0),  # 1 ms to 35 min
            "request_prompt_tokens": _histogram(self.spread.prompt_tokens, 18),
            "request_completion_tokens": _histogram(self.spread.completion_tokens, 18),
        }
        return {PREFIX + name: values for name, values in found.items()}


def _retries(counts: WorkCounts) -> dict[tuple[str, ...], float]:
    return {("error",): counts.retries, ("server_lost",): counts.resent}


def _tokens(counts: DocumentCounts | WorkCounts) -> dict[tuple[str, ...], float]:
    return {("prompt",): counts.prompt_tokens, ("completion",): counts.completion_tokens}


def _histogram(buckets: Buckets, ends: int, divisor: float = 1.0) -> Histogram:
    """``ends``: upper ends of the buckets, as powers of two from 1 on. The sum is of their middles, at most 9 % off."""
    found: list[tuple[str, int]] = []
    for power in range(ends):
        upto = sum(count for bucket, count in buckets.items() if bucket <= 4 * power)  # the last one below 2 ** power
        found.append((repr(2.0**power / divisor), upto))
    found.append(("+Inf", sum(buckets.values())))
    middles = (count * (buckets.lower(bucket) + buckets.lower(bucket + 1)) / 2 for bucket, count in buckets.items())
    return Histogram(found, sum(middles) / divisor)


class RankMetrics(NamedTuple):
    """The metrics of some ranks, as prometheus-client's encoders want a registry."""

    ranks: Iterable[RankNow]

    def collect(self) -> Iterator[Family]:
        ranks = [
            (dict(zip(RANK_LABELS, (rank.run, str(rank.rank)), strict=True)), rank.values()) for rank in self.ranks
        ]
        for name, metric in METRICS.items():
            family = Family(name.removesuffix("_total"), metric.help, metric.kind)
            for rank, known in ranks:
                values = known.get(name)
                if isinstance(values, Histogram):
                    for end, count in values.buckets:
                        family.add_sample(f"{name}_bucket", {**rank, "le": end}, count)
                    family.add_sample(f"{name}_count", rank, values.buckets[-1][1])
                    family.add_sample(f"{name}_sum", rank, values.sum)
                elif isinstance(values, dict):
                    for labels, value in values.items():
                        family.add_sample(name, {**rank, **dict(zip(metric.labels, labels, strict=True))}, value)
                elif values is not None:
                    family.add_sample(name, rank, values)
            if family.samples:
                yield family


def exposition(ranks: Iterable[RankNow]) -> bytes:
    """The text of all ranks' metrics, in Prometheus' classic format."""
    return bytes(generate_latest(RankMetrics(ranks)))


GetRank = Callable[[], RankNow]


# the port -------------------------------------------------------------------------------------------------------------


class _Scrape(MetricsHandler):
    timeout = 10.0  # seconds that a silent connection has a thread


class MetricsPort(ThreadingMixIn, TCPServer):
    """The port of a process, until it ends.

    Raises:
        OSError: the port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        else:
            self.address_family = socket.AF_INET
        self._lock = threading.Lock()
        self._shown: dict[tuple[str, int], tuple[GetRank, float]] = {}
        super().__init__((host, port), _Scrape.factory(self))
        os.register_at_fork(after_in_child=self.socket.close)  # a fork of a rollout's may outlive this process
        threading.Thread(target=self.serve_forever, name="datatrove-ckpt metrics", daemon=True).start()

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
            self._shown = {key: one for key, one in self._shown.items() if one[1] > time.monotonic()}
            shown = list(self._shown.values())
        return RankMetrics([rank() for rank, _ in shown]).collect()

    def restricted_registry(self, names: Iterable[str]) -> MetricsPort:
        """For a scrape with ``name[]``, which gets all of them."""
        return self

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hangs up is no problem."""


@cache
def _port(process: int, host: str, first: int) -> MetricsPort | None:
    why = "no port is free"
    for port in range(first, min(first + _PORTS, 1 << 16)):
        try:
            server = MetricsPort(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            why = error.strerror or str(error)
            break
        if port != first:
            logger.info(f"metrics_port: {first} is taken; this process has {host}:{port}.")
        return server
    logger.warning(f"metrics_port: {host}:{first} cannot be used: {why}. The run goes on without metrics there.")
    return None


def metrics_port(host: str, first: int) -> MetricsPort | None:
    """The one of this process; None, with a warning, if none can be used. A fork has another one."""
    return _port(os.getpid(), host, first)


# files ----------------------------------------------------------------------------------------------------------------


class RankFile:
    """A rank's file on this node, for a reader that may read it at any moment.

    Args:
        path: ``MonitoringConfig.metrics_file``.
        rank: its number; "*": a pattern of all of them.

    Raises:
        ConfigError: a variable in the path is not set here.
    """

    def __init__(self, path: str, rank: int | str) -> None:
        if "${rank}" not in path:
            name, dot, suffix = path.rpartition(".")
            path = f"{name}_${{rank}}{dot}{suffix}"
        number = f"{rank:05d}" if isinstance(rank, int) else rank
        self.path = expand_path("monitoring.metrics_file", path.replace("${rank}", number))
        self._failed = False

    def write(self, content: Callable[[], bytes]) -> None:
        """Replaces the file in one step. A failure is logged once: the run must not end for it."""
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")  # a name that is not read
        try:
            new.write_bytes(content())
            new.chmod(0o644)  # the reader is another user; there is nothing secret in it
            new.replace(self.path)
            self._failed = False
        except Exception as error:  # whatever it is, the next version may work, and the last one is the most wanted
            with suppress(OSError):
                new.unlink()
            if not self._failed:
                why = getattr(error, "strerror", None) or repr(error)
                logger.warning(f"metrics_file: {self.path} cannot be written: {why}. The run goes on.")
            self._failed = True


@contextmanager
def metrics_file(path: str, number: int, rank: GetRank) -> Iterator[None]:
    """Writes a rank's file for node_exporter's textfile collector every few seconds inside the block.

    It stays, with the last values, because otherwise what happened since the last look would be lost. The next rank
    that starts with the same setting removes files to which nothing was written for ten minutes.

    Args:
        path: ``MonitoringConfig.metrics_file``.
        number: of the rank.
    """
    pattern = RankFile(path, "*").path
    for other in pattern.parent.glob(pattern.name):
        with suppress(OSError):
            is_old = time.time() - other.stat().st_mtime > _KEEP_FILES_SECONDS
            if is_old and other.read_bytes().startswith(_HEAD):
                other.unlink()
    ended = threading.Event()
    arguments = RankFile(path, number), rank, ended
    thread = threading.Thread(target=_keep, args=arguments, name="datatrove-ckpt metrics file", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _keep(file: RankFile, rank: GetRank, ended: threading.Event) -> None:
    is_last = False
    while True:
        file.write(lambda: _HEAD + b"\n" + exposition([rank()]))
        if is_last:
            return
        is_last = ended.wait(FILE_SECONDS)
