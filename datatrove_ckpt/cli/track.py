"""``datatrove-ckpt track``: sends what a job does to MLflow and to Weights & Biases, until it has ended.

A run that is tracked starts this module as a program (``generation/export/exporter.py``), and ends it at any moment.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from io import FileIO
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.layout import TRACKING, TRACKING_LOCK
from datatrove_ckpt.cli.printing import write_out
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.config.monitoring import TrackedJob
from datatrove_ckpt.errors import CheckpointLocked, CkptError, StorageFailed
from datatrove_ckpt.maintenance.read_state import wanted_files
from datatrove_ckpt.maintenance.tracking import MlflowRun, TrackedRun, Tracker, WandbRun, job_of
from datatrove_ckpt.maintenance.where import Place
from datatrove_ckpt.redaction import Redactor

_SENDING_SECONDS = 60.0  # between two sendings
_LAST_SECONDS = 5.0  # that it may need after the end of who started it


def track(arguments: argparse.Namespace) -> int:
    """Sends all, as long as there is something to come. Returns the exit code."""
    with place_of(arguments, wanted_files) as place:
        job = job_of(place)
        said = ""
        tracker = _tracker(place, job)
        try:
            lock = files.Lock(place.folder / TRACKING_LOCK)
        except CheckpointLocked:
            holder = files.lock_holder(place.folder / TRACKING_LOCK) or {}
            raise CkptError(
                f"{place.what}: process {holder.get('pid')} on {holder.get('host')} sends this job already. It does "
                "all that this command would."
            ) from None
        try:
            while True:
                problem = tracker.work()
                if problem != said:
                    write_out(f"{place.said(Redactor()(problem)) or 'up to date again'}\n")
                said = problem
                if tracker.is_over:
                    break
                time.sleep(_SENDING_SECONDS)
                with suppress(StorageFailed):  # a network that comes back
                    place.refresh()
        finally:
            lock.release()
    write_out(f"{job.run_name}: all is sent, and no task is at work.\n")
    return 0


def _tracker(place: Place, job: TrackedJob) -> Tracker:
    runs: list[Callable[[float], TrackedRun]] = []
    if job.mlflow_uri is not None:
        runs.append(partial(MlflowRun, job))
    if job.wandb_project is not None:
        runs.append(lambda first_at: WandbRun(job, place.folder))
    return Tracker(place, runs)


# for a run ------------------------------------------------------------------------------------------------------------


def _track_of_run(root: Path) -> None:
    """Sends for the process that has started this one. Ends with it, or if another process sends already."""
    requests = FileIO(0)
    answers = FileIO(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    os.nice(10)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    job = TrackedJob(**orjson.loads(requests.readline()))
    with suppress(CheckpointLocked):
        files.Lock(root / TRACKING_LOCK)  # until this process ends
        with suppress(StorageFailed):  # only the same command by hand needs it
            files.disk.replace(root / TRACKING, orjson.dumps(asdict(job)))
        tracker = _tracker(Place(str(root), root, [str(root)]), job)
        tracker.work()  # before the first request: imports must not hold up the end of a rank
        while True:
            request = b""
            if select.select([requests], [], [], _SENDING_SECONDS)[0]:
                request = requests.readline()
                if not request:  # the end of a rank of another process may not be sent yet
                    tracker.work()
                    break
            problem = " ".join(Redactor()(tracker.work()).split())[:500]
            if request:
                answers.write(f"{int(request)} {problem}\n".encode("utf-8", "backslashreplace"))
    os._exit(0)  # whatever threads libraries have


def _end_with(parent: int) -> None:
    """A library may hang. The pipe does not tell that the parent has ended: a fork of it may hold it open."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(_LAST_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    _track_of_run(Path(sys.argv[1]))
