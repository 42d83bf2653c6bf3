"""Opens and closes what a rank's ``monitoring`` asks for: the metrics' port and file, and tracking.

What each needs is imported where it is asked for. Nothing here may end or hold up a run. What cannot be served, written
or sent is logged once, and tried again.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.layout import TRACKING_LOCK
from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.config.monitoring import TrackedJob
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
_DONE_SECONDS = 30.0
_STOPPED_SECONDS = 5.0


def check_monitoring(config: MonitoringConfig) -> None:
    """Checks that the packages are installed, and that the paths can be expanded here.

    Raises:
        ConfigError: what is missing, and what to do.
    """
    if config.wants_metrics and (missing := missing_package("prometheus_client")) is not None:
        raise ConfigError(f"monitoring: metrics_port and metrics_file: {missing}")
    if config.metrics_file is not None:
        expand_path("monitoring.metrics_file", config.metrics_file.replace("${rank}", "0"))
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
    first = config.metrics_port
    if first is not None and (port := prometheus.metrics_port(config.metrics_host, first)) is not None:
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


# A rank's side of tracking: keeps ``datatrove-ckpt track`` at work, and gives it up when it does not answer.
#
# It is a process of its own, because libraries that talk to a network may hang, crash, print, start threads and change
# signal handlers. Nothing of that may reach a rank.
#
# It reads all ranks in a folder of checkpoints, so one is enough: it holds ``tracking.lock`` in that
# folder. The other processes with ranks look again and again whether the lock is free. So no reader works before the
# last one has ended, and none outlives the process that has started it by more than some seconds.
#
#     its standard input     the job, as JSON in a line. Then a number in a line for each flush that all is sent now
#     its standard output    after each look at the run, the last number, and what could not be sent


_LOOK_SECONDS = 30.0  # between two looks at the lock
_FAILED_SECONDS = 2.0  # that the end of a rank waits where the last attempt to send has failed


class Tracking:
    """One job's, in one process: all ranks that the process works through share it."""

    def __init__(self, root: Path, job: TrackedJob) -> None:
        self._root, self._job = root, job
        names = {"MLflow": job.mlflow_uri, "Weights & Biases": job.wandb_project}
        self._where = " and ".join(name for name, setting in names.items() if setting is not None)
        self._changed = threading.Condition()
        self._reader: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._ranks = self._flushes = self._answered = 0
        self._failed = False

    def join(self) -> None:
        """A rank starts."""
        with self._changed:
            self._ranks += 1
            self._ensure_reader()
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep, name="datatrove-ckpt tracking", daemon=True)
                self._thread.start()

    def leave(self, seconds: Callable[[], float]) -> None:
        """A rank has ended, and its history says so. Waits at most so many seconds until that is sent.

        Args:
            seconds: may become less while this waits.
        """
        with self._changed:
            if seconds() > 0 and (reader := self._ensure_reader()) is not None:
                self._send_all(reader, seconds)
            self._ranks -= 1

    def _send_all(self, reader: subprocess.Popen[bytes], seconds: Callable[[], float]) -> None:
        started = time.monotonic()
        most = _FAILED_SECONDS if self._failed else float("inf")
        self._flushes += 1
        flush = self._flushes
        self._write(reader, b"%d" % flush)
        while self._answered < flush and self._reader is reader:
            if (waited := time.monotonic() - started) >= min(most, seconds()):
                self._tell(
                    f"monitoring: {self._where} has not confirmed the end of this attempt within {waited:.0f} s. "
                    "Nobody waits longer. What is missing there is sent later, also by the next attempt of the job."
                )
                return
            self._changed.wait(0.1)  # a signal handler, which may shorten the time, can notify nobody

    def _ensure_reader(self) -> subprocess.Popen[bytes] | None:
        """Starts it, if no process has one. None: another process has. With ``_changed`` held."""
        if self._reader is None and files.lock_holder(self._root / TRACKING_LOCK) is None:
            command = [sys.executable, "-P", "-m", "datatrove_ckpt.cli.track", str(self._root)]
            pipe = subprocess.PIPE
            try:  # in a session of its own: Ctrl-C is not for it
                self._reader = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
                )
                self._write(self._reader, orjson.dumps(asdict(self._job)))
            except OSError as error:
                self._could_not_send(str(error))
            self._changed.notify_all()
        return self._reader

    def _write(self, reader: subprocess.Popen[bytes], line: bytes) -> None:
        assert reader.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            reader.stdin.write(line + b"\n")
            reader.stdin.flush()

    def _keep(self) -> None:
        """In the thread: hears the reader until it ends, and then starts another one, as long as there are ranks."""
        while True:
            with self._changed:
                if not self._ranks:
                    self._thread = None
                    return
                if (reader := self._ensure_reader()) is None:
                    self._changed.wait(_LOOK_SECONDS)
                    continue
            self._read_replies(reader)

    def _read_replies(self, reader: subprocess.Popen[bytes]) -> None:
        assert reader.stdout is not None
        with suppress(OSError, ValueError), reader:  # it may die while it is written to, or print something else
            for line in reader.stdout:
                number, _, problem = line.decode("utf-8", "replace").rstrip().partition(" ")
                with self._changed:
                    self._answered = int(number)
                    if problem:
                        self._could_not_send(problem)
                    elif self._failed:
                        logger.info(f"monitoring: {self._where} is up to date again.")
                        self._failed = False
                    self._changed.notify_all()
        with self._changed:
            self._reader = None
            self._changed.notify_all()
            if self._ranks:
                if reader.returncode:
                    self._could_not_send(f"its process has ended with code {reader.returncode}")
                self._changed.wait(_LOOK_SECONDS)

    def _could_not_send(self, why: str) -> None:
        self._tell(
            f"monitoring: what this run does could not be sent to {self._where}: {why.rstrip('.')}. The run goes on. "
            "What is missing there is sent later, also by the next attempt of the job."
        )

    def _tell(self, problem: str) -> None:
        """Once for each outage: the run must not end for it."""
        if not self._failed:
            logger.warning(problem)
        self._failed = True


_jobs: dict[tuple[int, Path, str], Tracking] = {}


def tracking(root: Path, job: TrackedJob) -> Tracking:
    """The one of this process for this job and folder. A fork has another one."""
    return _jobs.setdefault((os.getpid(), root, job.job), Tracking(root, job))
