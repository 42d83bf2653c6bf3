"""``datatrove-ckpt track``: sends the state of a run, as ``status`` reads it, to MLflow and to Weights & Biases.

What they draw are points in time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson

from datatrove_ckpt.checkpoint.identity import read_run, settings_in
from datatrove_ckpt.checkpoint.layout import RUN, TRACKING
from datatrove_ckpt.checkpoint.ledger import find_ranks
from datatrove_ckpt.config.monitoring import MonitoringConfig, TrackedJob
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.maintenance.read_state import read_run_state
from datatrove_ckpt.maintenance.run_state import RunState, Totals
from datatrove_ckpt.maintenance.where import Place, runner_arguments

_JOB_TAG = "datatrove_ckpt.job"
_AT_TAG = "datatrove_ckpt.at"  # of the newest point that is there
_MAX_VALUE = 500  # characters, of a parameter: the shortest limit of MLflow's stores
_AT = "at"  # a metric of W&B: Unix seconds of the point


class Point(NamedTuple):
    """``at``: Unix milliseconds, as MLflow has them. ``values``: by the metric's name."""

    at: int
    values: dict[str, float]


def values_of(totals: Totals) -> dict[str, float]:
    """The numbers of a run, by the names of metrics."""
    done = totals.done
    work = totals.work
    rates = totals.rates
    found: dict[str, float] = {
        "documents": done.read,
        "documents_written": done.written,
        "documents_dropped": done.dropped,
        "documents_dead": done.dead,
        "chunks": totals.chunks,
        "requests": work.requests,
        "failed_requests": work.failed,
        "prompt_tokens": work.prompt_tokens,
        "completion_tokens": work.completion_tokens,
        "cache_hits": work.cached,
        "request_attempts": work.sent,
        "request_retries": work.retries + work.resent,
        "errors": sum(work.errors.values()),
        "server_restarts": work.restarts,
        "requests_in_flight": totals.in_flight,
        "requests_waiting": totals.waiting,
        "ranks_running": totals.states["running"],
        "ranks_done": totals.states["finished"],
        "documents_per_second": rates.documents,
        "requests_per_second": rates.requests,
        "completion_tokens_per_second": rates.completion_tokens,
    }
    if totals.position.share is not None:
        found["input_done_ratio"] = totals.position.share
    return found


def status_of(run: RunState) -> str:
    """RUNNING, FINISHED, FAILED or KILLED: the words of MLflow."""
    states = run.totals.states
    if run.is_finished:
        return "FINISHED"
    if states["running"]:
        return "RUNNING"
    if states["failed"] or states["damaged"]:
        return "FAILED"
    return "KILLED"


class TrackedRun(Protocol):
    """A job's run at MLflow, or at Weights & Biases, which is running. Each call may take long, or raise anything.

    Attributes:
        sent_until: ``at`` of the last point that is there; 0 if none is.
    """

    sent_until: int

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
        self.sent_until = int(run.data.tags.get(_AT_TAG, 0))
        self._set_parameters(run.data.params)

    def _find(self, first_at: float) -> Any | None:
        wanted = f"tags.`{_JOB_TAG}` = '{self._job.job}'"
        found = self._client.search_runs([self._experiment], wanted, order_by=["attributes.start_time ASC"])
        over = [one for one in found if one.info.status == "FINISHED" and (one.info.end_time or 0) < first_at * 1000]
        return next((one for one in found if one not in over), None)

    def _make(self, first_at: float) -> Any:
        tags = {_JOB_TAG: self._job.job}
        start = int(first_at * 1000)
        return self._client.create_run(self._experiment, start_time=start, tags=tags, run_name=self._job.run_name)

    def _set_parameters(self, before: dict[str, str]) -> None:
        """MLflow's parameters cannot change: they stay as they were at first."""
        from mlflow.entities import Param

        parameters = self._job.parameters
        new = [Param(name, value[:_MAX_VALUE]) for name, value in parameters.items() if name not in before]
        for start in range(0, len(new), 100):  # MLflow takes no more at once
            self._client.log_batch(self._id, params=new[start : start + 100])

    def send(self, point: Point) -> None:
        from mlflow.entities import Metric, RunTag

        step = max(0, int(point.at / 1000 - self._started))  # a second of the job
        metrics = [Metric(name, value, point.at, step) for name, value in point.values.items()]
        self._client.log_batch(self._id, metrics=metrics, tags=[RunTag(_AT_TAG, str(point.at))])

    def end(self, status: str) -> None:
        self._client.set_terminated(self._id, status, self.sent_until or None)


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
        self.sent_until = round(1000 * (self._run.summary.get(_AT) or 0))
        self._run.define_metric(_AT, hidden=True)
        self._run.define_metric("*", step_metric=_AT)

    def send(self, point: Point) -> None:
        self._run.log(point.values | {_AT: point.at / 1000})

    def end(self, status: str) -> None:
        """W&B's own state is that of the process."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status != "FINISHED"))


class Tracker:
    """Sends the numbers of one run. They are sums, so a point that a service misses is no loss to the next one.

    Args:
        place: where the run is read.
        make_runs: each finds or makes a run, when there is something to send; it gets the Unix seconds of the first
            attempt, may take long, or raise anything.

    Attributes:
        is_over: no rank is at work, and all is sent.
    """

    def __init__(self, place: Place, make_runs: Sequence[Callable[[float], TrackedRun]]) -> None:
        self.is_over = False
        self._newest: float | None = None
        self._point = Point(0, {})
        self._place = place
        self._make_runs = make_runs
        self._runs: dict[int, TrackedRun] = {}

    def work(self) -> str:
        """Reads the run, and sends a point.

        Returns:
            Why something could not be sent; "" if everything was.
        """
        try:
            state = read_run_state(self._place)
        except ConfigError:  # no rank has begun
            return ""
        except CkptError as error:
            return str(error)
        status = status_of(state)
        if status == "RUNNING" or state.newest != self._newest:
            at = state.read_at
            if status != "RUNNING" and state.newest is not None:  # whoever reads it later makes the same point
                at = state.newest
            self._point = Point(max(round(1000 * at), self._point.at + 1), values_of(state.totals))
            self._newest = state.newest
        elif self.is_over:
            return ""
        first_at = state.totals.started or state.read_at
        problems = []
        for index, make in enumerate(self._make_runs):
            try:
                self._send(index, partial(make, first_at), status)
            except Exception as error:  # of a library, of its server, of the network
                problems.append(f"{type(error).__name__}: {error}")
        self.is_over = status != "RUNNING" and not problems
        return "; ".join(problems)

    def _send(self, index: int, make: Callable[[], TrackedRun], status: str) -> None:
        if index not in self._runs:
            self._runs[index] = make()
        run = self._runs[index]
        if self._point.at > run.sent_until:
            run.send(self._point)
            run.sent_until = self._point.at
        if status != "RUNNING":
            run.end(status)
            del self._runs[index]  # the next attempt of the job finds it again


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
