"""``datatrove-ckpt track``: reads the histories of a job's ranks, and sends them to MLflow and to Weights & Biases.

What they draw are points in time, each the sum over all ranks. A point belongs to a minute of the histories, not to the
moment at which it is made: what could not be sent during an outage is sent later, with its own time. A line that comes
too late for its minute, as of a node whose clock is wrong, counts in the next point. What was sent before is asked of
MLflow and of Weights & Biases, so whoever reads next goes on there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson

from datatrove_ckpt.checkpoint.history_records import End, Progress, Record, parse_history
from datatrove_ckpt.checkpoint.identity import read_run, settings_in
from datatrove_ckpt.checkpoint.layout import HISTORY, RUN, TRACKING, rank_folder, rank_numbers
from datatrove_ckpt.checkpoint.ledger import find_ranks
from datatrove_ckpt.config.monitoring import MonitoringConfig, TrackedJob
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.maintenance.where import Place, runner_arguments

POINT_SECONDS = 60.0
# A rank writes a line each minute. One that is silent for longer was killed, or its node is gone.
_SILENT_SECONDS = 200.0
# Of a shorter time, as right before an end, a rate would be chance.
_RATE_SECONDS = 30.0
# Of a long file the end is read, so that the histories of thousands of ranks take seconds: of one rank all, of 10,000
# the last hour or more.
_TAILS_BYTES, _LEAST_TAIL_BYTES = 256 << 20, 32 << 10

_JOB_TAG = "datatrove_ckpt.job"
_MAX_VALUE = 500  # characters, of a parameter: the shortest limit of MLflow's stores
_AT = "at"  # a metric of W&B: Unix seconds of the point


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
        for rank in self._ranks.values():
            running = rank.is_running(now)
            found["ranks_running"] += running
            found["ranks_done"] += rank.end is not None and rank.end.why == "done"
            if rank.progress is not None:
                for name, value in (_SUMS | _OF_RUNNING if running else _SUMS).items():
                    found[name] += value(rank.progress)
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
    def end(self, status: str) -> None:
        """No rank is at work. ``status``: FINISHED, FAILED or KILLED. Another run object may go on later."""


# All attempts of a job find their run again by the job's id. MLflow gives a run its id, so there the job's id is a tag.


class MlflowRun:
    """A run of MLflow, found or made.

    Args:
        first_at: Unix seconds of the job's first record here. A run that was finished before belongs to an earlier job
            of the same name, in folders that were deleted since.
    """

    def __init__(self, job: TrackedJob, first_at: float) -> None:
        uri = job.mlflow_uri or ""
        # A request must not take longer than the patience of who waits for it; MLflow's own default is 20 minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        # MLflow 3.10 and later refuse a folder unless this is set; who names a folder means it.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._job = job
        self._client = MlflowClient(tracking_uri=uri)
        name = job.mlflow_experiment
        known = self._client.get_experiment_by_name(name)
        self._experiment = str(self._client.create_experiment(name) if known is None else known.experiment_id)
        run = self._find(first_at) or self._make(first_at)
        self._id = run.info.run_id
        self._started = run.info.start_time / 1000
        self._client.update_run(self._id, "RUNNING")
        newest = (one.timestamp for one in run.data._metric_objs if one.key.startswith("documents"))
        self.sent_until = max(newest, default=0) / 1000
        self._set_parameters(run.data.params)

    def _find(self, first_at: float) -> Any | None:
        wanted = f"tags.`{_JOB_TAG}` = '{self._job.job}'"
        found = self._client.search_runs([self._experiment], wanted, order_by=["attributes.start_time ASC"])
        over = [one for one in found if one.info.status == "FINISHED" and (one.info.end_time or 0) < first_at * 1000]
        return next((one for one in found if one not in over), None)

    def _make(self, first_at: float) -> Any:
        tags, start = {_JOB_TAG: self._job.job}, int(first_at * 1000) or None
        return self._client.create_run(self._experiment, start_time=start, tags=tags, run_name=self._job.run_name)

    def _set_parameters(self, before: dict[str, str]) -> None:
        """MLflow's parameters cannot change: they stay as they were at first."""
        from mlflow.entities import Param

        parameters = self._job.parameters
        new = [Param(name, value[:_MAX_VALUE]) for name, value in parameters.items() if name not in before]
        for start in range(0, len(new), 100):  # MLflow takes no more at once
            self._client.log_batch(self._id, params=new[start : start + 100])

    def send(self, point: Point) -> None:
        from mlflow.entities import Metric

        moment = round(point.at * 1000), max(0, int(point.at - self._started))  # a step is a second of the job
        found = [Metric(name, value, *moment) for name, value in point.values.items()]
        for start in range(0, len(found), 1000):
            self._client.log_batch(self._id, metrics=found[start : start + 1000])

    def end(self, status: str) -> None:
        self._client.set_terminated(self._id, status, int(self.sent_until * 1000) or None)


class WandbRun:
    """A run of Weights & Biases, which keeps its id. Its files are in ``folder``, if WANDB_DIR names no other."""

    def __init__(self, job: TrackedJob, folder: Path) -> None:
        import wandb

        entity, _, project = (job.wandb_project or "").rpartition("/")
        quiet = {"console": "off", "silent": True, "x_disable_stats": True, "x_disable_meta": True}
        private = {"disable_git": True, "disable_code": True}
        settings = wandb.Settings(init_timeout=60, **quiet, **private)
        names = {"project": project, "entity": entity or None, "id": job.job, "name": job.run_name, "resume": "allow"}
        place = os.environ.get("WANDB_DIR") or str(folder)
        before = os.umask(0o077)  # its files hold the settings, and with them the prompt
        try:
            self._run = wandb.init(
                **names, config=dict(job.parameters), settings=settings, dir=place, allow_val_change=True
            )
        finally:
            os.umask(before)
        self._run.summary["status"] = "RUNNING"
        self.sent_until = float(self._run.summary.get(_AT) or 0.0)
        self._run.define_metric(_AT, hidden=True)
        self._run.define_metric("*", step_metric=_AT)

    def send(self, point: Point) -> None:
        self._run.log(point.values | {_AT: point.at})

    def end(self, status: str) -> None:
        """W&B's own state is that of the process."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status != "FINISHED"))


@dataclass
class Tracker:
    """Sends one job's points.

    Attributes:
        root: the folder with the checkpoints.
        make_runs: each finds or makes a run, when there is something to send; it is given the Unix seconds of the
            first record, may take long, or raise anything.
        is_over: no rank is at work, and all is sent.
    """

    root: Path
    ranks: int
    make_runs: list[Callable[[float], TrackedRun]]
    is_over: bool = False
    _waiting: list[Point] = field(default_factory=list)
    _failed: bool = False

    def __post_init__(self) -> None:
        self._histories, self._points = JobHistories(self.root), JobPoints(self.ranks)
        self._runs: list[TrackedRun | None] = [None] * len(self.make_runs)

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
        problems = [self._send_to(index, now) for index in range(len(self.make_runs))]
        self._failed = any(problems)
        if not self._failed:
            self._waiting.clear()
            self.is_over = self._points.status(now) != "RUNNING"
        return "; ".join(filter(None, problems))

    def _send_to(self, index: int, now: float) -> str:
        """What went wrong; "" if nothing did."""
        try:
            if (run := self._runs[index]) is None:
                run = self._runs[index] = self.make_runs[index](self._points.first_at)
            for point in self._waiting:
                if point.at > run.sent_until:
                    run.send(point)
                    run.sent_until = point.at
            if (status := self._points.status(now)) != "RUNNING":
                run.end(status)
                self._runs[index] = None  # the next attempt of the job finds it again
        except Exception as error:  # of a library, of its server, of the network
            return f"{type(error).__name__}: {error}"
        return ""


def job_of(place: Place) -> TrackedJob:
    """What a tracker is told about the run.

    Raises:
        ConfigError: there is no rank; or the run is not tracked, and the YAML file says no more.
    """
    with suppress(FileNotFoundError, TypeError, ValueError):  # or damaged, or of a later version
        return TrackedJob(**orjson.loads((place.folder / TRACKING).read_bytes()))
    found = runner_arguments(place.config)
    _, _, first = find_ranks(place.folder)[0]
    config = MonitoringConfig(**(found.get("monitoring") or {}))
    if not config.wants_tracking:
        raise ConfigError(
            f"{place.what}: no run was started there with monitoring.mlflow_uri or monitoring.wandb_project. Of a "
            "mirror, give the YAML file of the run."
        )
    run = settings_in(read_run(first / RUN))
    return config.tracked_job(Path(found["checkpoints_local_dir"]).absolute(), run, {})
