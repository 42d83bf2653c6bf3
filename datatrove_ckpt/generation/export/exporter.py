"""Opens and closes what a rank's ``monitoring`` asks for: the metrics' port and file.

What they need is imported where it is asked for. Nothing here may end or hold up a run.
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
from datatrove_ckpt.config.monitoring import name_of_folder
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import error_text, missing_package
from datatrove_ckpt.generation.null_checkpoint import Checkpoint
from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.process.slurm_job import job_id

if TYPE_CHECKING:
    from datatrove_ckpt.generation.export.prometheus import RankNow


def check_monitoring(config: MonitoringConfig) -> None:
    """Checks that the packages are installed, and that the paths can be expanded here.

    Raises:
        ConfigError: what is missing, and what to do.
    """
    if config.metrics_file is not None:
        expand_path("monitoring.metrics_file", config.metrics_file.replace("${rank}", "0"))
    missing = missing_package("prometheus_client")
    if config.wants_metrics and missing is not None:
        raise ConfigError(f"monitoring: metrics_port and metrics_file: {missing}")


def open_exports(
    runner: Step, rank: int, world_size: int, checkpoint: Checkpoint, history: RankReporter, shutdown: Shutdown
) -> Exports:
    """Starts what the runner's ``monitoring`` asks for. Only after ``check_monitoring``."""
    exports = Exports(checkpoint, history, shutdown)
    if runner.monitoring.wants_metrics:
        try:
            _open(exports, runner, rank, world_size)
        except Exception as error:  # such as too many open files
            logger.warning(f"monitoring: could not be started: {error_text(error)}. The run goes on without it.")
    return exports


def _open(exports: Exports, runner: Step, rank: int, world_size: int) -> None:
    config = runner.monitoring
    stack = exports.stack
    run = config.run_name
    if run is None and runner.checkpoints_local_dir is None:
        run = name_of_folder(runner.output_writer.output_folder.resolve_paths(""))
    elif run is None:
        run = name_of_folder(str(runner.checkpoints_root))
    from datatrove_ckpt.generation.export import prometheus

    if runner.retry_dead_letters:
        run = f"{run} (retry)"
    metrics = partial(exports.metrics, run, rank, time.time(), world_size)
    if config.metrics_port is not None:
        port = prometheus.metrics_port(config.metrics_host, config.metrics_port)
        if port is not None:
            stack.enter_context(port.shows(metrics))
    if config.metrics_file is not None:
        stack.enter_context(prometheus.metrics_file(config.metrics_file, rank, metrics))


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

        progress = self.history.progress()
        self.checkpoint.fill_in(progress)
        if self._end:
            progress.in_flight = progress.waiting = progress.in_work = 0
            state = self._end
        elif self.shutdown.is_requested:
            state = "stopping"
        elif self.history.clients:
            state = "running"
        else:
            state = "starting"
        spread = self.history.spread()
        host = socket.gethostname()
        return RankNow(run, rank, host, job_id() or "", started_at, ranks, state, time.time(), progress, spread)

    @contextmanager
    def ending(self, completed: bool) -> Iterator[None]:
        """Inside the block the attempt ends, and its history says so. Then others are told."""
        self._end = ""
        try:
            yield
            if completed:
                self._end = "done"
            elif self.shutdown.is_requested:
                self._end = "stopped"
        finally:
            self._end = self._end or "failed"
            try:
                self.stack.close()
            except Exception as error:
                logger.warning(f"monitoring: could not be ended: {error_text(error)}.")
