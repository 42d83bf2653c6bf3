"""A job as one run of MLflow, and one of Weights & Biases. Only ``datatrove-ckpt track`` uses this.

All attempts of a job find their run again by the job's id. MLflow gives a run its id, so there the job's id is a tag.
What was sent before is asked of MLflow and of Weights & Biases, so no file says it that could be lost with a node.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from datatrove_ckpt.config.monitoring import TrackedJob
from datatrove_ckpt.maintenance.tracking import Point

_JOB_TAG = "datatrove_ckpt.job"
_MAX_VALUE = 500  # characters, of a parameter: the shortest limit of MLflow's stores
_AT = "at"  # a metric of W&B: Unix seconds of the point


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
        self._experiment = self._find_experiment()
        run = self._find(first_at) or self._make(first_at)
        self._id = run.info.run_id
        self._started = run.info.start_time / 1000
        self._client.update_run(self._id, "RUNNING")
        newest = (one.timestamp for one in run.data._metric_objs if one.key.startswith(f"{job.prefix}documents"))
        self.sent_until = max(newest, default=0) / 1000
        self._set_parameters(run.data.params)

    def _find_experiment(self) -> str:
        name = self._job.mlflow_experiment
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _find(self, first_at: float) -> Any | None:
        wanted = f"tags.`{_JOB_TAG}` = '{self._job.job}'"
        found = self._client.search_runs([self._experiment], wanted, order_by=["attributes.start_time ASC"])
        over = [one for one in found if one.info.status == "FINISHED" and (one.info.end_time or 0) < first_at * 1000]
        left = [one for one in found if one not in over]
        # Two nodes may make one at the same moment. Then all take the first.
        return min(left, key=lambda run: (run.info.start_time, run.info.run_id)) if left else None

    def _make(self, first_at: float) -> Any:
        tags = {_JOB_TAG: self._job.job}
        made = self._client.create_run(
            self._experiment, start_time=int(first_at * 1000) or None, tags=tags, run_name=self._job.run_name
        )
        first = self._find(first_at) or made
        if first.info.run_id != made.info.run_id:
            self._client.delete_run(made.info.run_id)
        return first

    def _set_parameters(self, before: dict[str, str]) -> None:
        """MLflow's parameters cannot change. A setting that has changed since is a tag."""
        from mlflow.entities import Param, RunTag

        values = {name: value[:_MAX_VALUE] for name, value in self._job.parameters.items()}
        new = [Param(name, value) for name, value in values.items() if name not in before]
        changed = [
            RunTag(f"changed.{name}", value) for name, value in values.items() if before.get(name, value) != value
        ]
        for start in range(0, max(len(new), len(changed)), 100):  # MLflow takes no more at once
            self._client.log_batch(self._id, params=new[start : start + 100], tags=changed[start : start + 100])

    def send(self, point: Point) -> None:
        from mlflow.entities import Metric

        moment = round(point.at * 1000), max(0, int(point.at - self._started))  # a step is a second of the job
        found = [Metric(self._job.prefix + name, value, *moment) for name, value in point.values.items()]
        for start in range(0, len(found), 1000):
            self._client.log_batch(self._id, metrics=found[start : start + 1000])

    def end(self, status: str, report: Path | None) -> None:
        if report is not None:
            self._client.log_artifact(self._id, str(report))
        self._client.set_terminated(self._id, status, int(self.sent_until * 1000) or None)


class WandbRun:
    """A run of Weights & Biases, which keeps its id. Its files are in ``folder``, if WANDB_DIR names no other."""

    def __init__(self, job: TrackedJob, folder: Path) -> None:
        import wandb

        entity, _, project = (job.wandb_project or "").rpartition("/")
        quiet = {"console": "off", "silent": True, "x_disable_stats": True, "x_disable_meta": True}
        private = {"disable_git": True, "disable_code": True}
        shared = {"mode": "shared", "x_label": job.prefix.rstrip("/")} if job.prefix else {}  # several write at once
        settings = wandb.Settings(init_timeout=60, **quiet, **private, **shared)
        before = os.umask(0o077)  # its files hold the settings, and with them the prompt
        try:
            self._run = wandb.init(
                project=project,
                entity=entity or None,
                id=job.job,
                name=job.run_name,
                resume="allow",
                config=dict(job.parameters),
                settings=settings,
                dir=os.environ.get("WANDB_DIR") or str(folder),
                allow_val_change=True,
            )
        finally:
            os.umask(before)
        self._prefix = job.prefix
        self._wandb = wandb
        self._run.summary["status"] = "RUNNING"
        self.sent_until = float(self._run.summary.get(job.prefix + _AT) or 0.0)
        self._run.define_metric(job.prefix + _AT, hidden=True)
        self._run.define_metric("*", step_metric=job.prefix + _AT)

    def send(self, point: Point) -> None:
        found = {self._prefix + name: value for name, value in point.values.items()}
        self._run.log(found | {self._prefix + _AT: point.at})

    def end(self, status: str, report: Path | None) -> None:
        """W&B's own state is that of the process."""
        if report is not None:
            artifact = self._wandb.Artifact(f"report-{self._run.id}", type="report")
            artifact.add_file(str(report))
            self._run.log_artifact(artifact)
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status != "FINISHED"))
