"""``datatrove-ckpt track``: sends the sums of a run to MLflow, until no task is at work.

All attempts of a job find their run there again, by the job's id. MLflow gives a run its own id, so
the job's is a tag.
"""

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import orjson
import xxhash

from datatrove_ckpt.cli.open_run import open_run
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.common.formatting import missing_package
from datatrove_ckpt.common.redaction import holds_credentials
from datatrove_ckpt.config.monitoring import name_of_folder
from datatrove_ckpt.errors import CkptError, ConfigError, StorageFailed
from datatrove_ckpt.run_folder.run_location import RunLocation
from datatrove_ckpt.run_folder.run_state import read_run_state, to_json, wanted_files

_SENDING_SECONDS = 60.0
_JOB_TAG = "datatrove_ckpt.job"
_NOT_IN_NAMES = re.compile(r"[^\w./ -]|/(?=/)")
_MAX_NAME = 250
_MAX_VALUE = 500  # characters: the shortest limit of MLflow's stores
IDLE_LOOKS = 3
_AT_ONCE = 100


def flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from flat(part, f"{name}.{key}")
    else:
        yield _NOT_IN_NAMES.sub("_", name.removeprefix("."))[:_MAX_NAME], value


@dataclass(frozen=True)
class TrackedJob:
    """A job, as services know it.

    Attributes:
        id: job's id, which is the same in all attempts, wherever the job is read.
        parameters: the run's identity, without secrets as run.json has it.
    """

    id: str
    name: str
    started: float
    parameters: dict[str, str]


class MlflowRun:
    """A job's run at MLflow. Each call may take long, or raise anything."""

    def __init__(self, job: TrackedJob, uri: str, experiment: str) -> None:
        # MLflow 3.10 and later refuse a folder unless this is set; who names a folder means it.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        existing = self._client.get_experiment_by_name(experiment)
        experiment_id = (
            self._client.create_experiment(experiment)
            if existing is None
            else existing.experiment_id
        )
        runs = self._client.search_runs([experiment_id], f"tags.`{_JOB_TAG}` = '{job.id}'")
        if runs:
            run = runs[0]
        else:
            start = int(1000 * job.started)
            run = self._client.create_run(
                experiment_id, start_time=start, tags={_JOB_TAG: job.id}, run_name=job.name
            )
        self._id = run.info.run_id
        self._started = job.started
        self._client.update_run(self._id, "RUNNING")
        # MLflow's parameters cannot change.
        new = [
            Param(name, value[:_MAX_VALUE])
            for name, value in job.parameters.items()
            if name not in run.data.params
        ]
        for start in range(0, len(new), _AT_ONCE):
            self._client.log_batch(self._id, params=new[start : start + _AT_ONCE])

    def send(self, at: float, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        step = max(0, int(at - self._started))
        self._client.log_batch(
            self._id, [Metric(name, value, int(1000 * at), step) for name, value in values.items()]
        )

    def end(self, status: str) -> None:
        """Ends the run as FINISHED, FAILED or KILLED. Another run object may continue it later."""
        self._client.set_terminated(self._id, status)


@dataclass
class RunTracker:
    """Sends the numbers of one run, until it is finished, or no rank was at work at several polls.

    The numbers are sums, so numbers that the service misses are no loss.

    Attributes:
        is_over: no more is to come, and all is sent.
    """

    service: Callable[[TrackedJob], MlflowRun]
    place: RunLocation
    name: str | None = None
    is_over: bool = False
    idle_looks: int = 0
    _run: MlflowRun | None = None

    def work(self) -> str:
        """Sends the new numbers. Returns the reason if the service lacks some, else ""."""
        try:
            job, at, values, status = self.look()
            run = self._run or self.service(job)
            self._run = run
            run.send(at, values)
            if status != "RUNNING":
                run.end(status)
                self.is_over = True
        except CkptError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def look(self) -> tuple[TrackedJob, float, dict[str, float], str]:
        """Reads the job, the time of its numbers (Unix seconds), the numbers, and its status."""
        with suppress(StorageFailed):
            self.place.refresh()
        state = read_run_state(self.place)
        folder = self.place.what if self.place.is_copy else str(self.place.folder.absolute())
        name = self.name or name_of_folder(folder)
        identity = state.identity
        hashed = [
            name,
            identity.get("output_folder"),
            identity.get("output_filename"),
            state.tasks,
        ]
        parameters = {}
        for key, value in flat(identity):
            parameters[key] = value if isinstance(value, str) else orjson.dumps(value).decode()
        started = state.totals.started or state.read_at
        number = xxhash.xxh3_128_hexdigest(orjson.dumps(hashed))
        job = TrackedJob(number, name, started, parameters)
        states = state.totals.states
        status = "KILLED"
        self.idle_looks += 1
        if state.is_finished:
            status = "FINISHED"
        elif state.is_at_work:
            status = "RUNNING"
            self.idle_looks = 0
        elif states["failed"] or states["damaged"]:
            status = "FAILED"
        # Between two tasks, or before the first.
        if status != "FINISHED" and self.idle_looks < IDLE_LOOKS:
            status = "RUNNING"
        at = state.read_at
        if status != "RUNNING" and state.newest is not None:
            at = state.newest
        totals = orjson.loads(to_json(state))["totals"]
        del totals["dead_letters"]  # their causes quote servers, and would be names
        values = {
            key: float(total) for key, total in flat(totals) if isinstance(total, int | float)
        }
        return job, at, values, status


def track(arguments: argparse.Namespace) -> int:
    missing = missing_package("mlflow")
    if missing is not None:
        raise ConfigError(f"--mlflow: {missing}")
    if holds_credentials(arguments.mlflow):
        raise ConfigError(
            "--mlflow: other users can see credentials in the URI. Export "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        )
    service = partial(MlflowRun, uri=arguments.mlflow, experiment=arguments.experiment)
    with open_run(arguments, wanted_files) as location:
        tracker = RunTracker(service, location, arguments.name_of_run)
        printed = ""
        while True:
            problem = tracker.work()
            if problem != printed:
                say(problem or "up to date again")
            printed = problem
            if tracker.is_over:
                break
            time.sleep(_SENDING_SECONDS)
    say("All is sent, and no task is at work.")
    return 0
