"""Opens and closes what a rank's ``monitoring`` asks for: the metrics' port and file, and tracking.

What each needs is imported where it is asked for. Nothing here may end or hold up a run. What cannot be served, written
or sent is logged once, and tried again.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import xxhash
from loguru import logger

from datatrove_ckpt import __version__
from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import error_text, missing_package
from datatrove_ckpt.generation.null_checkpoint import Checkpoint
from datatrove_ckpt.generation.progress import Progress
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.process.slurm_job import job_id
from datatrove_ckpt.redaction import shown

if TYPE_CHECKING:
    from datatrove_ckpt.generation.export.metrics import RankLabels, Snapshot
    from datatrove_ckpt.generation.export.tracked_runs import JobSettings

# Seconds that the end of a rank waits until its last minute is sent.
_DONE_SECONDS = 30.0  # with time for the report
_STOPPED_SECONDS = 5.0
_DATABASE = re.compile(r"(sqlite|postgresql|mysql|mssql)[+\w]*:")
_NOT_IN_NAMES = re.compile(r"[^\w./ -]")  # what MLflow refuses


def check_monitoring(config: MonitoringConfig) -> None:
    """Checks that the packages are installed, and that the paths can be expanded here.

    Raises:
        ConfigError: what is missing, and what to do.
    """
    if config.wants_metrics:
        from datatrove_ckpt.generation.export import prometheus

        prometheus.check_installed()
    if config.metrics_file is not None:
        expand_path("monitoring.metrics_file", config.metrics_file.replace("${rank}", "0"))
    for setting, package in {"mlflow_uri": "mlflow", "wandb_project": "wandb"}.items():
        if getattr(config, setting) is not None and (missing := missing_package(package)) is not None:
            raise ConfigError(f"monitoring.{setting}: {missing}")
    if config.mlflow_uri is not None and _DATABASE.match(config.mlflow_uri) and find_spec("sqlalchemy") is None:
        raise ConfigError(
            "monitoring.mlflow_uri names a database, and the small MLflow of the extra mlflow has no part for them. "
            "Run: pip install mlflow. Or name a folder, or the URL of a tracking server."
        )


def open_exports(
    runner: Step, rank: int, world_size: int, checkpoint: Checkpoint, history: Progress, shutdown: Shutdown
) -> Exports:
    """Starts what the runner's ``monitoring`` asks for. Only after ``check_monitoring``."""
    exports = Exports(checkpoint, history, shutdown)
    if runner.monitoring.wants_metrics or runner.monitoring.wants_tracking:
        try:
            _open(exports, runner, rank, world_size)
        except Exception as error:  # such as too many open files
            logger.warning(f"monitoring: could not be started: {error_text(error)}. The run goes on without it.")
    return exports


def _open(exports: Exports, runner: Step, rank: int, world_size: int) -> None:
    from datatrove_ckpt.generation.export import prometheus
    from datatrove_ckpt.generation.export.metrics import RankLabels
    from datatrove_ckpt.generation.export.metrics_file import MetricsFile
    from datatrove_ckpt.generation.export.metrics_port import metrics_port
    from datatrove_ckpt.generation.export.tracking import tracking

    config = runner.monitoring
    output = runner.output_writer.output_folder.resolve_paths("")
    root = None if runner.checkpoints_local_dir is None else runner.checkpoints_root
    run = config.name_of_run(root, output)
    # What is last here ends first: tracking may take some seconds. The documents of a retry are in the run already.
    if config.wants_tracking and root is not None and not runner.retry_dead_letters:
        job = tracking(_job_settings(runner, world_size, root, run))
        job.join()
        exports.stack.callback(lambda: job.leave(lambda: exports.seconds))
    run = f"{run} (retry)" if runner.retry_dead_letters else run
    labels = RankLabels(run, rank, __version__, socket.gethostname(), job_id() or "", time.time(), world_size)
    snapshot = partial(exports.snapshot, labels)
    if config.wants_metrics:
        prometheus.load()
    if config.metrics_port is not None:
        exports.stack.enter_context(metrics_port(config.metrics_host, config.metrics_port).shows(snapshot))
    if config.metrics_file is not None:
        file = MetricsFile(config.metrics_file, config.metrics_file_seconds, rank, snapshot)
        file.start()
        exports.stack.callback(file.end)


class Exports:
    """What tells others of one attempt of a rank."""

    def __init__(self, checkpoint: Checkpoint, history: Progress, shutdown: Shutdown) -> None:
        self.stack = ExitStack()
        self._checkpoint = checkpoint
        self._history = history
        self._shutdown = shutdown
        self._end = ""

    def snapshot(self, labels: RankLabels) -> Snapshot:
        """The rank's metrics now. In any thread."""
        progress = self._history.progress()
        self._checkpoint.fill_in(progress)
        if self._end:
            progress.in_flight = progress.waiting = progress.in_work = 0
        return labels.snapshot(self._state, time.time(), progress, self._history.spread())

    @property
    def _state(self) -> str:
        if self._end or self._shutdown.is_requested:
            return self._end or "stopping"
        return "running" if self._history.is_serving else "starting"

    @property
    def seconds(self) -> float:
        """How long the end of the rank may wait for others. A signal shortens it."""
        if self._shutdown.is_fast:
            return 0.0
        return _DONE_SECONDS if self._end == "done" and not self._shutdown.is_requested else _STOPPED_SECONDS

    @contextmanager
    def ending(self, completed: bool) -> Iterator[None]:
        """Inside the block the attempt ends, and its history says so. Then others are told, which may take seconds."""
        end = "failed"  # if the block raises
        try:
            yield
            end = "done" if completed else "stopped" if self._shutdown.is_requested else "failed"
        finally:
            self._end = end
            self._tell_end()

    def _tell_end(self) -> None:
        try:
            self.stack.close()
        except Exception as error:
            logger.warning(f"monitoring: could not be ended: {error_text(error)}.")


def _job_settings(runner: Step, world_size: int, root: Path, run: str) -> JobSettings:
    from datatrove_ckpt.generation.export.tracked_runs import JobSettings

    config, writer = runner.monitoring, runner.output_writer
    uri = config.mlflow_uri
    if uri is not None and ":" not in uri and uri != "databricks":
        uri = expand_path("monitoring.mlflow_uri", uri).as_uri()
    output = writer.output_folder.resolve_paths("")
    job = orjson.dumps([run, output, writer.output_filename.template, world_size])
    settings = shown("", {"config": runner.config, "monitoring": config})
    settings["run"] = runner.identity(world_size).kept
    return JobSettings(
        root=str(root),
        job=xxhash.xxh3_128_hexdigest(job),
        run_name=run,
        ranks=world_size,
        seconds=config.tracking_seconds,
        prefix=f"{socket.gethostname()}/" if config.tracking_per_node else "",
        mlflow_uri=uri,
        mlflow_experiment=config.mlflow_experiment,
        wandb_project=config.wandb_project,
        parameters=dict(_flat("", settings)),
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Settings as texts by dotted names. Those that nobody has set are left out."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), part)
    elif value is not None:
        yield _NOT_IN_NAMES.sub("_", name)[:250], value if isinstance(value, str) else json.dumps(value)
