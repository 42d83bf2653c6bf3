"""The Slurm job of this task: when it ends, and how to requeue it when Slurm preempts it.

Preemption with a grace time sends SIGTERM to the step alone, and requeues the job after that time.
A step that ends earlier, as it should, makes its job FAILED, which Slurm does not requeue: the task
must request it. Only a preempted job, not a cancelled one, has a PreemptTime and still runs.
"""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime

from loguru import logger

from datatrove_ckpt.process.job_launch import END

_TIMEOUT = 10.0  # seconds

_first_asked: dict[float, float] = {}
"""The time at which a rank of this process first read an end of the job, by that end.

Both are seconds since the epoch. The newest end is the last key.
"""


def job_id() -> str | None:
    """Returns the name of this job for Slurm's commands, "17_3" in an array. None outside of Slurm.

    The last task of array 17 has SLURM_JOB_ID=17, which means the whole array to Slurm's commands.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return os.environ.get("SLURM_JOB_ID")


@contextmanager
def job_id_in_environment() -> Iterator[None]:
    """Sets SLURM_JOB_ID to ``job_id()``, so that datatrove's handler does not requeue the whole
    array.
    """
    job = job_id()
    before = os.environ.get("SLURM_JOB_ID")
    if job is None or before is None:
        yield
        return
    os.environ["SLURM_JOB_ID"] = job
    try:
        yield
    finally:
        os.environ["SLURM_JOB_ID"] = before


def requeue_if_preempted() -> None:
    job = job_id()
    if job is None or os.environ.get("SLURM_PROCID", "0") != "0":  # one task is enough
        return
    try:
        record = _ask("scontrol", "--oneliner", "show", "job", job)
        fields = dict(word.split("=", 1) for word in record.split() if "=" in word)
        if (
            fields.get("JobState") in ("RUNNING", "SIGNALING")
            and fields.get("PreemptTime", "None") != "None"
        ):
            _ask("scontrol", "requeue", job)
            logger.info(f"Slurm is preempting job {job}. The job was requeued.")
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        logger.warning(
            f"Job {job} could not be requeued: {reason}. Submit the incomplete tasks again."
        )


def _ask(*command: str) -> str:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=True,
        env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
    ).stdout


# The time limit ----------------------------------------------------------------------------------


def stop_time(end: float, reserve: float) -> float:
    """Returns when ranks must stop in a job that ends at ``end``, both in seconds since the epoch.

    At least half of the time since this process's first rank is for work. Otherwise a short job
    would be requeued again and again without progress. The first call for an end records its time.
    """
    start = _first_asked.setdefault(end, time.time())
    return end - min(reserve, (end - start) / 2)


def is_time_up(reserve: float) -> bool:
    """Whether a rank that starts now must stop at once.

    False for the first rank of a process. Runs no command: an earlier rank has recorded the end.
    """
    end = _known_end()
    if end is None and _first_asked and job_id() is not None:
        end = next(reversed(_first_asked))
    return end is not None and time.time() >= stop_time(end, reserve)


def _known_end() -> float | None:
    with suppress(ValueError):
        return float(os.environ.get("SLURM_JOB_END_TIME") or os.environ.get(END, ""))
    return None


async def slurm_deadline() -> float | None:
    """Returns when Slurm ends this job, in seconds since the epoch.

    None outside of Slurm, or if that is unknown.
    """
    if (end := _known_end()) is not None:
        return end
    job = job_id()
    if job is None or shutil.which("squeue") is None:  # SLURM_JOB_END_TIME needs Slurm 23.02
        return None
    try:
        answer = await asyncio.to_thread(_ask, "squeue", "--noheader", "--jobs", job, "--format=%e")
        return datetime.fromisoformat(answer.strip()).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
