"""A rank's side of tracking: starts the process that sends (``tracker.py``), and gives it up when it does not answer.

The ranks of a job that share a folder of checkpoints have one such process: who has ``tracking.lock`` in that folder
starts it, and when that process ends in any way, another one gets the lock. It reads the histories of all ranks in the
folder, so it does not matter which rank has started it, nor what was sent before.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import orjson
from loguru import logger

from datatrove_ckpt.checkpoint.files import Lock
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.generation.export.tracked_runs import JobSettings

LOCK = "tracking.lock"
_LOOK_SECONDS = 30.0  # between two attempts to get the lock, or to start a process that has ended
_KEEP_SECONDS = 60.0  # that a process waits for the next rank
_FAILED_SECONDS = 2.0  # that the end of a rank waits for a process whose last attempt has failed
_SLOW_SECONDS = 60.0  # without any answer since its start, after which a process counts as failed
_END_SECONDS = 5.0

COMMAND = [sys.executable, "-P", "-m", "datatrove_ckpt.generation.export.tracker"]


class Tracking:
    """One job's, in one process: all ranks that the process works through share it."""

    def __init__(self, job: JobSettings) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._lock: Lock | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ranks = 0
        self._idle_since = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._heard = False
        self._wishes = 0
        self._answered = 0
        self._failed = False

    def join(self) -> None:
        """A rank starts."""
        with self._changed:
            self._ranks += 1
            self._ensure_process()
            if self._thread is None:
                self._closed.clear()
                self._thread = threading.Thread(target=self._keep, name="datatrove-ckpt tracking", daemon=True)
                self._thread.start()

    def leave(self, seconds: Callable[[], float]) -> None:
        """A rank has ended, and its history says so. Waits at most so many seconds until that is sent.

        Args:
            seconds: may become less while this waits.
        """
        with self._changed:
            self._ranks -= 1
            self._idle_since = time.monotonic()
            self._ensure_process()
            if seconds() > 0 and self._process is not None:
                self._send_all(seconds)

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._closed.set()
        with self._changed:
            self._end_process()
            self._release()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _send_all(self, seconds: Callable[[], float]) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        started = time.monotonic()
        slow = not self._heard and started - self._started >= _SLOW_SECONDS
        most = _FAILED_SECONDS if self._failed or slow else math.inf
        self._wishes += 1
        wish = self._wishes
        try:
            process.stdin.write(b"%d\n" % wish)
            process.stdin.flush()
        except OSError:
            return
        while self._answered < wish and process.poll() is None:
            if (waited := time.monotonic() - started) >= min(most, seconds()):
                self._say_unconfirmed(waited)
                return
            self._changed.wait(0.1)  # a signal handler, which may shorten the time, can notify nobody

    # the thread -------------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closed.wait(min(_LOOK_SECONDS, _KEEP_SECONDS)):
            with self._changed:
                if self._closed.is_set():  # meanwhile: a process that starts now would outlive it
                    return
                if self._ranks:
                    self._ensure_process()
                elif time.monotonic() - self._idle_since >= _KEEP_SECONDS:
                    self._end_process()
                    self._release()
                    self._thread = None
                    return

    # with self._changed held ------------------------------------------------------------------------------------------

    def _ensure_process(self) -> None:
        """Starts the process if this one has the lock."""
        if self._process is not None and self._process.poll() is not None:
            self._say(f"its process has ended with code {self._process.returncode}")
            self._end_process()
        if self._process is not None or not self._has_lock():
            return
        try:
            self._started, self._heard = time.monotonic(), False
            self._process = process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )
            assert process.stdin is not None
            process.stdin.write(orjson.dumps(asdict(self._job)) + b"\n")
            process.stdin.flush()
        except OSError as error:
            self._say(str(error))
            return
        name = "datatrove-ckpt tracking answers"
        threading.Thread(target=self._hear, args=(process,), name=name, daemon=True).start()

    def _has_lock(self) -> bool:
        if self._lock is None:
            with suppress(CkptError, OSError):  # another process has it
                self._lock = Lock(Path(self._job.root) / LOCK)
        return self._lock is not None

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _end_process(self) -> None:
        process, self._process = self._process, None
        self._changed.notify_all()
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()  # it ends at once
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        """Reads the answers of a process until its end."""
        assert process.stdout is not None
        with process.stdout as answers:
            for line in answers:
                number, _, text = line.decode("utf-8", "replace").rstrip().partition(" ")
                with self._changed:
                    if self._process is not process:
                        return
                    self._answered, self._heard = int(number), True
                    if text == "ok":
                        self._say_ok()
                    else:
                        self._say(text.removeprefix("failed: "))
                    self._changed.notify_all()
        with self._changed:
            if self._process is process:
                self._changed.notify_all()

    def _say(self, why: str) -> None:
        """Once for each outage: the run must not end for it."""
        if not self._failed:
            why = why.rstrip(".")
            logger.warning(
                f"monitoring: what this run does could not be sent to {self._where()}: {why}. The run goes on. What is "
                "missing there is sent later, also by the next attempt of the job."
            )
        self._failed = True

    def _say_unconfirmed(self, seconds: float) -> None:
        if not self._failed:
            logger.warning(
                f"monitoring: {self._where()} has not confirmed the end of this attempt within {seconds:.0f} s. Nobody "
                "waits longer. What is missing there is sent later, also by the next attempt of the job."
            )
        self._failed = True

    def _say_ok(self) -> None:
        if self._failed:
            logger.info(f"monitoring: {self._where()} is up to date again.")
        self._failed = False

    def _where(self) -> str:
        names = {"MLflow": self._job.mlflow_uri, "Weights & Biases": self._job.wandb_project}
        return " and ".join(name for name, setting in names.items() if setting is not None)


_jobs: dict[tuple[str, str], Tracking] = {}
_guard = threading.Lock()


def tracking(job: JobSettings) -> Tracking:
    """The one of this process for this job and folder."""
    with _guard:
        return _jobs.setdefault((job.root, job.job), Tracking(job))
