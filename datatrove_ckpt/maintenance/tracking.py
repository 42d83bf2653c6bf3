"""``datatrove-ckpt track``: reads the histories of a job's ranks, and sends them to MLflow and to Weights & Biases.

What they draw are points in time, each the sum over all ranks. A point belongs to a minute of the histories, not to the
moment at which it is made: what could not be sent during an outage is sent later, with its own time. A line that comes
too late for its minute, as of a node whose clock is wrong, counts in the next point. What was sent before is asked of
MLflow and of Weights & Biases, so whoever reads next goes on there.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import orjson

from datatrove_ckpt.checkpoint.history_records import End, Progress, Record, parse_history
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.layout import HISTORY, RUN, TRACKING, rank_folder, rank_numbers
from datatrove_ckpt.checkpoint.versions import settings_in
from datatrove_ckpt.config.monitoring import MonitoringConfig, TrackedJob
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.maintenance.inspect import no_checkpoint
from datatrove_ckpt.maintenance.where import Place, runner_arguments

POINT_SECONDS = 60.0
# A rank writes a line each minute. One that is silent for longer was killed, or its node is gone.
_SILENT_SECONDS = 200.0
# Of a shorter time, as right before an end, a rate would be chance.
_RATE_SECONDS = 30.0
_MAX_RANKS_SHOWN = 64
# Of a long file the end is read, so that the histories of thousands of ranks take seconds: of one rank all, of 10,000
# the last hour or more.
_TAILS_BYTES, _LEAST_TAIL_BYTES = 256 << 20, 32 << 10


class Point(NamedTuple):
    """``at``: Unix seconds. ``values``: by the metric's name."""

    at: float
    values: dict[str, float]


@dataclass(slots=True)
class _Rank:
    """What is known of a rank at a point.

    Attributes:
        seen_at: Unix seconds of its last line.
        end: how its last attempt ended; None: it has not.
    """

    progress: Progress | None = None
    seen_at: float = 0.0
    end: End | None = None

    def take(self, record: Record) -> None:
        self.seen_at = max(self.seen_at, record.at)
        self.end = record if isinstance(record, End) else None  # an attempt's last line
        if isinstance(record, Progress):
            self.progress = record

    def is_running(self, now: float) -> bool:
        return self.end is None and now - self.seen_at < _SILENT_SECONDS


@dataclass
class JobPoints:
    """Makes points of records.

    Args:
        ranks: of the job.

    Attributes:
        first_at, last_at: Unix seconds of the oldest and the newest record; 0 if there is none.
    """

    ranks: int
    first_at: float = 0.0
    last_at: float = 0.0
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _before: Point | None = None

    def add(self, records: Sequence[tuple[int, Record]], now: float) -> Iterator[Point]:
        """Yields the points of the minutes that are over.

        Args:
            records: of any ranks, each with its rank, since the last call.
            now: Unix seconds.
        """
        for rank, record in sorted(records, key=lambda pair: pair[1].at):
            if self.last_at and record.at >= (end := _minute_after(self.last_at)) and not self._is_sent(end):
                yield self._point(end)
            self._ranks.setdefault(rank, _Rank()).take(record)
            self.first_at = min(self.first_at or record.at, record.at)
            self.last_at = max(self.last_at, record.at)
        if self.last_at and now >= (end := _minute_after(self.last_at)) and not self._is_sent(end):
            yield self._point(end)

    def latest(self) -> Iterator[Point]:
        """Yields the point of a minute that is not over, if anything is new: the last one before an end."""
        if self.last_at and not self._is_sent(self.last_at):
            yield self._point(self.last_at)

    def status(self, now: float) -> str:
        """RUNNING, FINISHED, FAILED or KILLED: the words of MLflow."""
        ends = [rank.end for rank in self._ranks.values()]
        if len(ends) >= self.ranks and all(end is not None and end.why == "done" for end in ends):
            return "FINISHED"
        if not self._ranks or any(rank.is_running(now) for rank in self._ranks.values()):
            return "RUNNING"
        return "FAILED" if any(end is not None and end.why == "error" for end in ends) else "KILLED"

    def _is_sent(self, at: float) -> bool:
        return self._before is not None and self._before.at >= at

    def _point(self, at: float) -> Point:
        values = self._values(at)
        if (before := self._before) is not None and (seconds := at - before.at) >= _RATE_SECONDS:
            for name in ("documents", "requests", "completion_tokens"):
                values[f"{name}_per_second"] = max(0.0, values[name] - before.values[name]) / seconds
        self._before = Point(at, values)
        return self._before

    def _values(self, now: float) -> dict[str, float]:
        found = dict.fromkeys([*_SUMS, *_OF_RUNNING, "ranks_running", "ranks_done"], 0.0)
        for number, rank in self._ranks.items():
            running = rank.is_running(now)
            found["ranks_running"] += running
            found["ranks_done"] += rank.end is not None and rank.end.why == "done"
            if rank.progress is not None:
                for name, value in (_SUMS | _OF_RUNNING if running else _SUMS).items():
                    found[name] += value(rank.progress)
                if self.ranks <= _MAX_RANKS_SHOWN:
                    found[f"rank_{number:05d}/documents"] = rank.progress.documents.read
                    found[f"rank_{number:05d}/completion_tokens"] = rank.progress.total.completion_tokens
        shares = [rank.progress.position.share for rank in self._ranks.values() if rank.progress is not None]
        if shares and len(shares) >= self.ranks and None not in shares:
            found["input_done_ratio"] = sum(share for share in shares if share is not None) / len(shares)
        return found


_SUMS: dict[str, Callable[[Progress], float]] = {
    "documents": lambda rank: rank.documents.read,
    "documents_written": lambda rank: rank.documents.written,
    "documents_dropped": lambda rank: rank.documents.dropped,
    "documents_dead": lambda rank: rank.documents.dead,
    "chunks": lambda rank: rank.chunks,
    "requests": lambda rank: rank.total.requests,
    "failed_requests": lambda rank: rank.total.failed,
    "prompt_tokens": lambda rank: rank.total.prompt_tokens,
    "completion_tokens": lambda rank: rank.total.completion_tokens,
    "cache_hits": lambda rank: rank.total.cached,
    "request_attempts": lambda rank: rank.total.sent,
    "request_retries": lambda rank: rank.total.retries + rank.total.resent,
    "errors": lambda rank: sum(rank.total.errors.values()),
    "server_restarts": lambda rank: rank.total.restarts,
}
_OF_RUNNING: dict[str, Callable[[Progress], float]] = {
    "requests_in_flight": lambda rank: rank.in_flight,
    "requests_waiting": lambda rank: rank.waiting,
}


def _minute_after(at: float) -> float:
    return (at // POINT_SECONDS + 1) * POINT_SECONDS


class JobHistories:
    """Reads what is new in the histories of a job's ranks.

    A rank's file may be replaced by a shorter one, which has old lines again: those are left out by their time.

    Args:
        root: ``checkpoints_local_dir``.

    Attributes:
        whole_from: Unix seconds: of earlier moments, the lines of some rank were not read, because its file is long.
    """

    def __init__(self, root: Path) -> None:
        self.whole_from = 0.0
        self._root = root
        self._read: dict[int, tuple[int, int]] = {}
        self._newest: dict[int, float] = {}

    def new_records(self) -> list[tuple[int, Record]]:
        """Those that were not returned before, each with its rank."""
        found: list[tuple[int, Record]] = []
        ranks = rank_numbers(self._root)
        tail = max(_LEAST_TAIL_BYTES, _TAILS_BYTES // max(1, len(ranks)))
        for rank in ranks:
            try:
                records = self._new_of(rank, rank_folder(self._root, rank) / HISTORY, tail)
            except OSError:  # there is none yet, or the rank was deleted
                continue
            for record in records:
                found.append((rank, record))
                self._newest[rank] = max(self._newest.get(rank, 0.0), record.at)
        return found

    def _new_of(self, rank: int, path: Path, tail: int) -> list[Record]:
        inode, offset = self._read.get(rank, (0, 0))
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            same = status.st_ino == inode and status.st_size >= offset
            if same and status.st_size == offset:
                return []
            offset = offset if same else max(0, status.st_size - tail)
            file.seek(offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._read[rank] = status.st_ino, offset + end
        if same:
            return parse_history(data[:end])[0]
        start = data.find(b"\n") + 1 if offset else 0
        newest = self._newest.get(rank, 0.0)
        records = [record for record in parse_history(data[start:end])[0] if record.at > newest]
        if offset and records:
            self.whole_from = max(self.whole_from, records[0].at)
        return records


class TrackedRun(Protocol):
    """A job's run at MLflow, or at Weights & Biases, which is running. Each call may take long, or raise anything.

    Attributes:
        sent_until: Unix seconds of the last point that is there; 0 if none is.
    """

    sent_until: float

    def send(self, point: Point) -> None: ...
    def end(self, status: str, report: Path | None) -> None:
        """No rank is at work. ``status``: FINISHED, FAILED or KILLED. Another run object may go on later."""


class Tracker:
    """Sends one job's points.

    Args:
        root: the folder with the checkpoints.
        make_runs: each finds or makes a run, when there is something to send; it is given the Unix seconds of the
            first record, may take long, or raise anything.
        make_report: writes the job's report, if it can.

    Attributes:
        is_over: no rank is at work, and all is sent.
    """

    def __init__(
        self,
        root: Path,
        ranks: int,
        make_runs: list[Callable[[float], TrackedRun]],
        make_report: Callable[[Path], bool],
    ) -> None:
        self.is_over = False
        self._histories = JobHistories(root)
        self._points = JobPoints(ranks)
        self._waiting: list[Point] = []
        self._makers = make_runs
        self._runs: list[TrackedRun | None] = [None] * len(make_runs)
        self._make_report = make_report
        self._failed = False

    def work(self, everything: bool) -> str:
        """Sends what is new. What cannot be sent waits for the next call.

        Args:
            everything: also what belongs to the minute that is not over.

        Returns:
            Why something could not be sent; "" if everything was.
        """
        records = self._histories.new_records()
        if self.is_over and not records:  # of an end, only time could make a point: that of the minute that it is in
            return ""
        now = time.time()
        self._waiting += self._points.add(records, now)
        if everything or self._points.status(now) != "RUNNING":  # no rank asks for it any more
            self._waiting += self._points.latest()
        self._waiting = [point for point in self._waiting if point.at >= self._histories.whole_from]
        if not self._waiting and not records and not self._failed:
            return ""
        problems = [self._send_to(index, now) for index in range(len(self._makers))]
        self._failed = any(problems)
        if not self._failed:
            self._waiting.clear()
            self.is_over = self._points.status(now) != "RUNNING"
        return "; ".join(filter(None, problems))

    def _send_to(self, index: int, now: float) -> str:
        """What went wrong; "" if nothing did."""
        try:
            if (run := self._runs[index]) is None:
                run = self._runs[index] = self._makers[index](self._points.first_at)
            for point in self._waiting:
                if point.at > run.sent_until:
                    run.send(point)
                    run.sent_until = point.at
            if (status := self._points.status(now)) != "RUNNING":
                with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-report-") as folder:
                    report = Path(folder) / "report.html"
                    run.end(status, report if status == "FINISHED" and self._make_report(report) else None)
                self._runs[index] = None  # the next attempt of the job finds it again
        except Exception as error:  # of a library, of its server, of the network
            return f"{type(error).__name__}: {error}"
        return ""


def job_of(place: Place) -> TrackedJob:
    """What a tracker is told about the run.

    Raises:
        ConfigError: there is no rank; or the run is not tracked, and the YAML file says no more.
    """
    with suppress(FileNotFoundError):
        return TrackedJob(**orjson.loads((place.folder / TRACKING).read_bytes()))
    folder, found = place.folder, runner_arguments(place.config)
    ranks = rank_numbers(folder) if folder.is_dir() else []
    if not ranks:
        raise no_checkpoint(folder)
    config = MonitoringConfig(**(found.get("monitoring") or {}))
    if not config.wants_tracking:
        raise ConfigError(
            f"{place.what}: no run was started there with monitoring.mlflow_uri or monitoring.wandb_project. Of a "
            "mirror, give the YAML file of the run."
        )
    run = settings_in(read_run(rank_folder(folder, ranks[0]) / RUN))
    return config.tracked_job(Path(found["checkpoints_local_dir"]).absolute(), run, {})
