"""Opens and closes what a rank's ``monitoring`` asks for: the metrics' port.

Nothing here may end or hold up a run.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loguru import logger

from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.common.formatting import error_text, missing_package
from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.config.monitoring import name_of_folder
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.process.slurm_job import job_id

if TYPE_CHECKING:
    from datatrove_ckpt.generation.export.prometheus import RankNow


def check_monitoring(config: MonitoringConfig) -> None:
    """Raises:
    ConfigError: the package is not installed.
    """
    missing = missing_package("prometheus_client")
    if config.metrics_port is not None and missing is not None:
        raise ConfigError(f"monitoring.metrics_port: {missing}")


_ENDS = {"done": "done", "stopped": "stopped", "error": "failed"}


@dataclass(eq=False)
class Exports:
    """What the step's ``monitoring`` asks for. Only after ``check_monitoring``."""

    step: Step
    rank: int
    checkpoint: OpenCheckpoint
    history: RankReporter
    shutdown: Shutdown

    def __post_init__(self) -> None:
        self._stack = ExitStack()
        self._started_at = time.time()
        config = self.step.monitoring
        if config.metrics_port is None:
            return
        from datatrove_ckpt.generation.export.prometheus import metrics_port

        try:
            port = metrics_port(config.metrics_host, config.metrics_port)
            self._stack.enter_context(port.shows(self._metrics))
        except Exception as error:  # such as too many open files
            logger.warning(
                f"monitoring: could not be started: {error_text(error)}. The run goes on without "
                "it."
            )

    def _metrics(self) -> RankNow:
        from datatrove_ckpt.generation.export.prometheus import RankNow

        progress = self.history.progress()
        self.checkpoint.fill_in(progress)
        if self.history.end is not None:
            progress.in_flight = progress.waiting = progress.in_work = 0
            state = _ENDS[self.history.end.why]
        elif self.shutdown.is_requested:
            state = "stopping"
        elif self.history.clients:
            state = "running"
        else:
            state = "starting"
        step = self.step
        folder = step.output_writer.output_folder.resolve_paths("")
        if step.checkpoints_local_dir is not None:
            folder = str(step.checkpoints_root)
        name = step.monitoring.run_name or name_of_folder(folder)
        if step.retry_dead_letters:
            name = f"{name} (retry)"
        return RankNow(
            name,
            self.rank,
            socket.gethostname(),
            job_id() or "",
            self._started_at,
            state,
            progress,
            self.history.spread(),
        )

    def close(self) -> None:
        """Ends the exports, after the history's last line."""
        try:
            self._stack.close()
        except Exception as error:
            logger.warning(f"monitoring: could not be ended: {error_text(error)}.")
