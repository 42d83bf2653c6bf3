"""Opens and closes what a rank's ``monitoring`` asks for: the metrics' port and file, and tracking.

What each needs is imported where it is asked for. Nothing here may end or hold up a run. What cannot be served, written
or sent is logged once, and tried again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from loguru import logger

from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import error_text, missing_package
from datatrove_ckpt.generation.null_checkpoint import Checkpoint
from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.process.slurm_job import job_id
from datatrove_ckpt.redaction import shown

if TYPE_CHECKING:
    from datatrove_ckpt.generation.export.prometheus import RankNow

# Seconds that the end of a rank waits until its last minute is sent.
_DONE_SECONDS = 30.0  # with time for the report
_STOPPED_SECONDS = 5.0


def check_monitoring(config: MonitoringConfig) -> None:
    """Checks that the packages are installed, and that the paths can be expanded here.

    Raises:
        ConfigError: what is missing, and what to do.
    """
    if config.wants_metrics and (missing := missing_package("prometheus_client")) is not None:
        raise ConfigError(f"monitoring: metrics_port and metrics_file: {missing}")
    for setting in ("metrics_targets", "metrics_file"):
        if (path := getattr(config, setting)) is not None:
            expand_path(f"monitoring.{setting}", path.replace("${rank}", "0"))
    for setting, package in {"mlflow_uri": "mlflow", "wandb_project": "wandb"}.items():
        if getattr(config, setting) is not None and (missing := missing_package(package)) is not None:
            raise ConfigError(f"monitoring.{setting}: {missing}")


def open_exports(
    runner: Step, rank: int, world_size: int, checkpoint: Checkpoint, history: RankReporter, shutdown: Shutdown
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
    config, stack = runner.monitoring, exports.stack
    output = runner.output_writer.output_folder.resolve_paths("")
    root = None if runner.checkpoints_local_dir is None else runner.checkpoints_root
    # What is last here ends first: tracking may take some seconds. The documents of a retry are in the run already.
    if config.wants_tracking and root is not None and not runner.retry_dead_letters:
        from datatrove_ckpt.generation.export.tracking import tracking

        settings = shown(
            "", {"config": runner.models if len(runner.models) > 1 else runner.config, "monitoring": config}
        )
        job = tracking(root, config.tracked_job(root, runner.identity(world_size).kept, settings))
        job.join()
        stack.callback(lambda: job.leave(exports.seconds))
    if not config.wants_metrics:
        return
    from datatrove_ckpt.generation.export import prometheus

    run = f"{config.name_of_run(root, output)}{' (retry)' if runner.retry_dead_letters else ''}"
    metrics = partial(exports.metrics, run, rank, time.time(), world_size)
    first, targets = config.metrics_port, config.metrics_targets
    if first is not None and (port := prometheus.metrics_port(config.metrics_host, first)) is not None:
        stack.enter_context(port.shows(metrics))
        if targets is not None:
            stack.enter_context(prometheus.target_file(targets, rank, port.address))
    if config.metrics_file is not None:
        stack.enter_context(prometheus.metrics_file(config.metrics_file, config.metrics_file_seconds, rank, metrics))


@dataclass(eq=False)
class Exports:
    """What tells others of one attempt of a rank."""

    checkpoint: Checkpoint
    history: RankReporter
    shutdown: Shutdown
    stack: ExitStack = field(default_factory=ExitStack)
    _end: str = ""

    def metrics(self, run: str, rank: int, started_at: float, ranks: int) -> RankNow:
        """The rank's metrics now. In any thread."""
        from datatrove_ckpt.generation.export.prometheus import RankNow

        progress, host, job = self.history.progress(), socket.gethostname(), job_id() or ""
        self.checkpoint.fill_in(progress)
        if self._end:
            progress.in_flight = progress.waiting = progress.in_work = 0
        now, spread = time.time(), self.history.spread()
        state = "running" if self.history.clients else "starting"
        if self._end or self.shutdown.is_requested:
            state = self._end or "stopping"
        return RankNow(run, rank, host, job, started_at, ranks, state, now, progress, spread)

    def seconds(self) -> float:
        """How long the end of the rank may wait for others. A signal shortens it."""
        if self.shutdown.is_fast:
            return 0.0
        return _DONE_SECONDS if self._end == "done" and not self.shutdown.is_requested else _STOPPED_SECONDS

    @contextmanager
    def ending(self, completed: bool) -> Iterator[None]:
        """Inside the block the attempt ends, and its history says so. Then others are told, which may take seconds."""
        end = "failed"  # if the block raises
        try:
            yield
            end = "done" if completed else "stopped" if self.shutdown.is_requested else "failed"
        finally:
            self._end = end
            try:
                self.stack.close()
            except Exception as error:
                logger.warning(f"monitoring: could not be ended: {error_text(error)}.")
