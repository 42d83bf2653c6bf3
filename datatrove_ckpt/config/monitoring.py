"""MonitoringConfig: what a run tells other systems while it works."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import xxhash

from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.redaction import holds_credentials

_TELL_NOTHING = {"checkpoint", "checkpoints", "ckpt", "ckpts", "ck", "output", "outputs", "out"}  # of which job it is
_NOT_IN_NAMES = re.compile(r"[^\w./ -]")  # what MLflow refuses


@dataclass
class MonitoringConfig:
    """What a run tells other systems while it works. All of it is off by default, and none of it can stop the run.

    Attributes:
        run_name: the job's name. None: that of the checkpoints' folder (of the folder above, if it is called
            checkpoints, ck or the like), or else of the output folder.
        metrics_port: port of ``/metrics``, for each process the first free one from here on. Needs the extra
            ``metrics``.
        metrics_host: address of that port. "0.0.0.0" opens it to other machines, without a password.
        metrics_file: a file for node_exporter's textfile collector, ending in ``.prom``; one per rank, whose number
            takes the place of ``${rank}``, or stands before ``.prom``. Needs the extra ``metrics``.
        mlflow_uri: URL of MLflow's server, "databricks", a folder or a database. Needs checkpoints, and the extra
            ``mlflow``.
        mlflow_experiment: name of the experiment, which is made if there is none.
        wandb_project: "project" or "team/project" at Weights & Biases. Needs checkpoints, and the extra ``wandb``.

    Raises:
        ConfigError: a setting that cannot work.
    """

    run_name: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    metrics_file: str | None = None
    mlflow_uri: str | None = None
    mlflow_experiment: str = "datatrove-ckpt"
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        if self.run_name is not None and not self.run_name.strip():
            raise ConfigError("monitoring.run_name: is empty; give a name, or leave it out.")
        if self.metrics_port is not None and not 1 <= self.metrics_port <= 65535:
            raise ConfigError(f"monitoring.metrics_port: must be from 1 to 65535; it is {self.metrics_port}.")
        if self.metrics_file is not None and not self.metrics_file.endswith(".prom"):
            raise ConfigError(
                f"monitoring.metrics_file: must end in .prom, because node_exporter reads no other file; it is "
                f"{self.metrics_file!r}."
            )
        if self.mlflow_uri is not None and holds_credentials(self.mlflow_uri):
            raise ConfigError(
                "monitoring.mlflow_uri: holds a user or a password, which would be written to files. Leave them out, "
                "and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment."
            )

    @property
    def wants_metrics(self) -> bool:
        return self.metrics_port is not None or self.metrics_file is not None

    @property
    def wants_tracking(self) -> bool:
        return self.mlflow_uri is not None or self.wandb_project is not None

    def name_of_run(self, checkpoints: Path | None, output: str) -> str:
        """``run_name``, or the default that its description tells.

        Args:
            checkpoints: the folder with the checkpoints; None: there are none.
            output: path or URL of the output folder.
        """
        if self.run_name is not None:
            return self.run_name
        path = output
        if checkpoints is not None:
            path = str(checkpoints)
        parts = [part for part in path.split("/") if part]
        telling = [part for part in parts if part.lower() not in _TELL_NOTHING]
        return (telling or parts or ["run"])[-1]

    def tracked_job(self, checkpoints: Path, run: Mapping[str, object], settings: Mapping[str, object]) -> TrackedJob:
        """What a tracker is told.

        Args:
            run: the identity that run.json keeps.
            settings: what else is shown as parameters, without secrets.

        Raises:
            ConfigError: a variable in the path of MLflow's folder is not set here.
        """
        name = self.name_of_run(checkpoints, str(run["output_folder"]))
        uri = self.mlflow_uri
        if uri is not None and ":" not in uri and uri != "databricks":
            uri = expand_path("monitoring.mlflow_uri", uri).as_uri()
        return TrackedJob(
            job=xxhash.xxh3_128_hexdigest(
                orjson.dumps([name, run["output_folder"], run["output_filename"], run["tasks"]])
            ),
            run_name=name,
            mlflow_uri=uri,
            mlflow_experiment=self.mlflow_experiment,
            wandb_project=self.wandb_project,
            parameters=dict(_flat("", {**settings, "run": run})),
        )


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Settings as texts by dotted names. Those that are not set are left out."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), part)
    elif value is not None:
        yield _NOT_IN_NAMES.sub("_", name)[:250], value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class TrackedJob:
    """What a tracker is told about a job. Plain JSON, without secrets.

    Attributes:
        job: id of the job: the same in all attempts, on all nodes.
        run_name: for people.
        mlflow_uri, mlflow_experiment, wandb_project: see ``MonitoringConfig``.
        parameters: the settings of the run.
    """

    job: str
    run_name: str
    mlflow_uri: str | None = None
    mlflow_experiment: str = "datatrove-ckpt"
    wandb_project: str | None = None
    parameters: dict[str, str] = field(default_factory=dict)
