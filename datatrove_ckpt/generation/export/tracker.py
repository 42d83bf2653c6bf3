"""A program: reads the histories of a job's ranks, and sends them to MLflow and to Weights & Biases.

A process of its own, because libraries that talk to a network may hang, crash, print, start threads and change signal
handlers. Nothing of that may reach a rank. Who has started it can always give it up: see ``tracking.py``.

    standard input     first line: ``JobSettings`` as JSON. Then a number in a line for each wish that everything is
                       sent now. Its end: this process ends at once, whatever it does but make a run.
    standard output    after each such line, and each minute, the last number, and "ok" or "failed: " and why
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import orjson

from datatrove_ckpt.generation.export.job_points import JobHistories, JobPoints, Point
from datatrove_ckpt.generation.export.tracked_runs import MAKING, JobSettings, MlflowRun, TrackedRun, WandbRun
from datatrove_ckpt.process.timed_queue import get_within
from datatrove_ckpt.redaction import Redactor

_MAX_WAITING_POINTS = 20_000  # two weeks of minutes
_REPORT_SECONDS = 60.0
_MAKING_SECONDS = 60.0


class Tracker:
    """One job's.

    Args:
        make_runs: each makes a run, when there is something to send; it may take long, or raise anything.
        make_report: writes the job's report, if it can.
    """

    def __init__(
        self,
        job: JobSettings,
        make_runs: list[Callable[[float], TrackedRun]],
        make_report: Callable[[Path], bool],
    ) -> None:
        self._root = Path(job.root)
        self._histories = JobHistories(self._root)
        self._points = JobPoints(job.ranks)
        self._waiting: list[Point] = []
        self._makers = make_runs
        self._runs: list[TrackedRun | None] = [None] * len(make_runs)
        self._make_report = make_report
        self._failed = False
        self._is_over = False

    def work(self, everything: bool) -> str:
        """Sends what is new. What cannot be sent waits for the next call.

        Args:
            everything: also what belongs to the minute that is not over.

        Returns:
            "ok", or why something could not be sent.
        """
        records = self._histories.new_records()
        if self._is_over and not records:  # of an end, only time could make a point: that of the minute that it is in
            return "ok"
        now = time.time()
        self._waiting += self._points.add(records, now)
        if everything or self._points.status(now) != "RUNNING":  # nobody will wish for it
            self._waiting += self._points.latest()
        self._waiting = [point for point in self._waiting if point.at >= self._histories.whole_from]
        if not self._waiting and not records and not self._failed:
            return "ok"
        del self._waiting[:-_MAX_WAITING_POINTS]
        problems = [self._send_to(index, now) for index in range(len(self._makers))]
        self._failed = any(problems)
        if self._failed:
            return f"failed: {'; '.join(filter(None, problems))}"
        self._waiting.clear()
        self._is_over = self._points.status(now) != "RUNNING"
        return "ok"

    def _send_to(self, index: int, now: float) -> str:
        """What went wrong; "" if nothing did."""
        try:
            run = self._runs[index]
            if run is None:
                first_at = self._points.first_at
                run = self._runs[index] = self._makers[index](first_at)
            run.send(self._waiting)
            status = self._points.status(now)
            if status == "FINISHED":
                self._report(run)
            run.set_status(status)
            if status != "RUNNING":
                self._runs[index] = None  # the next attempt of the job finds it again
                run.close()
        except Exception as error:  # of a library, of its server, of the network
            return f"{type(error).__name__}: {error}"
        return ""

    def _report(self, run: TrackedRun) -> None:
        with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-report-") as folder:
            file = Path(folder) / "report.html"
            if self._make_report(file):
                run.attach(file)


def make_report(root: Path, file: Path) -> bool:
    """Whether ``datatrove-ckpt report`` has made one."""
    command = [sys.executable, "-m", "datatrove_ckpt", "report", str(root), "-o", str(file)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_REPORT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and file.exists()


def main() -> None:
    """Works until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what libraries print is no answer
    os.nice(10)
    job = JobSettings(**orjson.loads(sys.stdin.buffer.readline()))
    wishes: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_read_wishes, args=(wishes, sys.stdin.buffer), daemon=True).start()
    makers: list[Callable[[float], TrackedRun]] = []
    if job.mlflow_uri is not None:
        makers.append(lambda first_at: MlflowRun(job, first_at))
    if job.wandb_project is not None:
        makers.append(lambda first_at: WandbRun(job))
    tracker = Tracker(job, makers, lambda file: make_report(Path(job.root), file))
    redact, number = Redactor(), 0
    wished = None
    while True:  # at once, so that imports and the making of the run hold up nobody at the end
        answer = " ".join(redact(tracker.work(wished is not None)).split())[:500]
        number = wished or number
        answers.write(f"{number} {answer}\n".encode("utf-8", "backslashreplace"))
        wished = _next_wish(wishes, job.seconds)


def _next_wish(wishes: queue.SimpleQueue[int], seconds: float) -> int | None:
    """The newest one; None if there is none within this time."""
    try:
        found = get_within(wishes, seconds)
        while True:
            try:
                found = wishes.get_nowait()
            except queue.Empty:
                return found
    except queue.Empty:
        return None


def _read_wishes(wishes: queue.SimpleQueue[int], source: BinaryIO) -> None:
    """Ends this process when nobody is there any more: a library may hang, and would never see it."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    while line := source.readline():
        wishes.put(int(line))
    _end()


def _end_with(parent: int) -> None:
    """A fork of the parent may hold the pipe open."""
    while os.getppid() == parent:
        time.sleep(1)
    _end()


def _end() -> None:
    """Not with a run half made; else whatever this process does."""
    MAKING.acquire(timeout=_MAKING_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
