"""Opens and closes what a rank's ``monitoring`` asks for: the metrics' port and file, and tracking.

What each needs is imported where it is asked for. Nothing here may end or hold up a run. What cannot be served, written
or sent is logged once, and tried again.
"""

from __future__ import annotations

import os
import select
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
    if config.metrics_file is not None:
        expand_path("monitoring.metrics_file", config.metrics_file.replace("${rank}", "0"))
    needed = {
        "monitoring: metrics_port and metrics_file": ("prometheus_client", config.wants_metrics),
        "monitoring.mlflow_uri": ("mlflow", config.mlflow_uri is not None),
        "monitoring.wandb_project": ("wandb", config.wandb_project is not None),
    }
    for setting, (package, is_needed) in needed.items():
        missing = missing_package(package)
        if is_needed and missing is not None:
            raise ConfigError(f"{setting}: {missing}")


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
    config = runner.monitoring
    stack = exports.stack
    output = runner.output_writer.output_folder.resolve_paths("")
    if runner.checkpoints_local_dir is None:
        root = None
    else:
        root = runner.checkpoints_root
    # What is last here ends first: tracking may take some seconds. The documents of a retry are in the run already.
    if config.wants_tracking and root is not None and not runner.retry_dead_letters:
        models = runner.models if len(runner.models) > 1 else runner.config
        settings = shown("", {"config": models, "monitoring": config})
        job = tracking(root, config.tracked_job(root, runner.identity(world_size).kept, settings))
        job.join()
        stack.callback(lambda: job.leave(exports.seconds))
    if not config.wants_metrics:
        return
    from datatrove_ckpt.generation.export import prometheus

    run = config.name_of_run(root, output)
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

    def seconds(self) -> float:
        """How long the end of the rank may wait for others. A signal shortens it."""
        if self.shutdown.is_fast:
            return 0.0
        if self._end == "done" and not self.shutdown.is_requested:
            return _DONE_SECONDS
        return _STOPPED_SECONDS

    @contextmanager
    def ending(self, completed: bool) -> Iterator[None]:
        """Inside the block the attempt ends, and its history says so. Then others are told, which may take seconds."""
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


# A rank's side of tracking: keeps ``datatrove-ckpt track`` at work, and stops waiting for it when it does not answer.
#
# It is a process of its own, because libraries that talk to a network may hang, crash, print, start threads and change
# signal handlers. Nothing of that may reach a rank.
#
# It reads all ranks in a folder of checkpoints, so one process is enough: it holds ``tracking.lock`` in that folder.
# The other processes with ranks look every half a minute whether the lock is free. No tracking process outlives the
# process that has started it by more than some seconds.
#
#     its standard input     the job, as JSON in a line. Then a number in a line for each request to send all now
#     its standard output    the number, once that is done, and what could not be sent


_LOOK_SECONDS = 30.0  # between two looks at the lock
_FAILED_SECONDS = 2.0  # that the end of a rank waits where the last attempt to send has failed


class Tracking:
    """Tracks one job for all ranks that this process works through.

    Attributes:
        sender: the process that sends; None: another process has it, or it has ended.
    """

    def __init__(self, root: Path, job: TrackedJob) -> None:
        self.sender: subprocess.Popen[bytes] | None = None
        self._root = root
        self._job = job
        names = {"MLflow": job.mlflow_uri, "Weights & Biases": job.wandb_project}
        self._where = " and ".join(name for name, setting in names.items() if setting is not None)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ranks = 0
        self._requests = 0
        self._failed = False

    def join(self) -> None:
        """A rank starts."""
        with self._lock:
            self._ranks += 1
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._keep, name="datatrove-ckpt tracking", daemon=True)
                self._thread.start()

    def leave(self, seconds: Callable[[], float]) -> None:
        """A rank has ended, and its history says so. Waits at most so many seconds until that is sent.

        Args:
            seconds: may become less while this waits.
        """
        with self._lock:
            self._ranks -= 1
            if seconds() > 0:
                sender = self._running_sender()
                if sender is not None:
                    self._send_all(sender, seconds)

    def _keep(self) -> None:
        """Runs in the thread: starts a sender whenever no process has one, as long as there are ranks."""
        while self._ranks:
            with self._lock:
                self._running_sender()
            time.sleep(_LOOK_SECONDS)

    def _running_sender(self) -> subprocess.Popen[bytes] | None:
        """Starts the sender if no process has one. None: another process has it."""
        if self.sender is not None and self.sender.poll() is not None:
            self._has_ended(self.sender)
        if self.sender is None and files.lock_holder(self._root / TRACKING_LOCK) is None:
            command = [sys.executable, "-P", "-m", "datatrove_ckpt.cli.track", str(self._root)]
            pipe = subprocess.PIPE
            try:  # in a session of its own: Ctrl-C is not for it
                self.sender = subprocess.Popen(
                    command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
                )
                self._write(self.sender, orjson.dumps(asdict(self._job)))
            except OSError as error:
                self._could_not_send(str(error))
        return self.sender

    def _send_all(self, sender: subprocess.Popen[bytes], seconds: Callable[[], float]) -> None:
        assert sender.stdout is not None
        started = time.monotonic()
        most = _FAILED_SECONDS if self._failed else float("inf")
        self._requests += 1
        self._write(sender, b"%d" % self._requests)
        answered = 0
        while answered < self._requests:
            if select.select([sender.stdout], [], [], 0.1)[0]:  # a signal may shorten the time meanwhile
                line = sender.stdout.readline().decode("utf-8", "replace")
                if not line:
                    self._has_ended(sender)
                    return
                number, _, problem = line.rstrip().partition(" ")
                answered = int(number)
            elif time.monotonic() - started >= min(most, seconds()):
                self._warn(
                    f"monitoring: {self._where} has not confirmed the end of this attempt within "
                    f"{time.monotonic() - started:.0f} s. What is missing there is sent later, also by the next "
                    "attempt of the job."
                )
                return
        if problem:
            self._could_not_send(problem)
        elif self._failed:
            logger.info(f"monitoring: {self._where} is up to date again.")
            self._failed = False

    def _has_ended(self, sender: subprocess.Popen[bytes]) -> None:
        with sender:  # waits for it, and closes its pipes
            self.sender = None
        if sender.returncode:  # else another process has taken the lock at the same time
            self._could_not_send(f"its process has ended with code {sender.returncode}")

    def _write(self, sender: subprocess.Popen[bytes], line: bytes) -> None:
        assert sender.stdin is not None
        rest = memoryview(line + b"\n")
        with suppress(OSError):  # it has ended
            while rest:
                rest = rest[sender.stdin.write(rest) :]

    def _could_not_send(self, why: str) -> None:
        self._warn(
            f"monitoring: what this run does could not be sent to {self._where}: {why.rstrip('.')}. The run goes on. "
            "What is missing there is sent later, also by the next attempt of the job."
        )

    def _warn(self, problem: str) -> None:
        """Warns once for each outage: the run must not end for it."""
        if not self._failed:
            logger.warning(problem)
        self._failed = True


_jobs: dict[tuple[int, Path, str], Tracking] = {}


def tracking(root: Path, job: TrackedJob) -> Tracking:
    """The one of this process for this job and folder. A fork has another one."""
    return _jobs.setdefault((os.getpid(), root, job.job), Tracking(root, job))
