"""What a task asks of Slurm: when its job ends, and, once it is told to end, that the job goes on later.

Preemption with a grace time sends SIGTERM to the step alone, and requeues the job when that time is over. A step that
ends before, as it should, makes its job FAILED, and Slurm requeues no failed job: it has to be asked. Not for every
SIGTERM, though: after ``scancel``, asking would bring a cancelled job back to life. The two differ in the job's record:
only a job that is being preempted has a PreemptTime and is still running.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime

from loguru import logger

_TIMEOUT = 10.0  # seconds that Slurm's controller gets to answer
_SQUEUE_TIMEOUT = 15.0


def job_id() -> str | None:
    """This job, "17_3" in an array. None outside of Slurm.

    The last task of array 17 has SLURM_JOB_ID=17, and to Slurm's commands that means all of the array.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


@contextmanager
def meaning_this_task() -> Iterator[None]:
    """Meanwhile SLURM_JOB_ID is ``job_id()``: datatrove's handler would have the last task requeue its whole array."""
    job, before = job_id(), os.environ.get("SLURM_JOB_ID")
    if job is None or before is None:
        yield
        return
    os.environ["SLURM_JOB_ID"] = job
    try:
        yield
    finally:
        os.environ["SLURM_JOB_ID"] = before


def requeue_if_preempted() -> None:
    """Has the job started again later, if Slurm is about to take its node away."""
    job = job_id()
    if job is None or os.environ.get("SLURM_PROCID", "0") != "0":  # one task of the step asks for all
        return
    try:
        record = _scontrol("--oneliner", "show", "job", job)
        fields = dict(word.split("=", 1) for word in record.split() if "=" in word)
        if fields.get("JobState") in ("RUNNING", "SIGNALING") and fields.get("PreemptTime", "None") != "None":
            _scontrol("requeue", job)
            logger.info(f"Job {job} is being preempted: it was requeued.")
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(f"Slurm could not be asked to requeue job {job}; submit again what is not complete. {error}")


def _scontrol(*arguments: str) -> str:
    done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode:
        raise subprocess.SubprocessError(f"scontrol {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


async def slurm_deadline() -> float | None:
    """When Slurm ends this job, in seconds since the epoch. None outside of Slurm, or if nobody knows."""
    with suppress(ValueError):
        return float(os.environ.get("SLURM_JOB_END_TIME", ""))
    job = job_id()
    if job is None or shutil.which("squeue") is None:  # Slurm before 23.02 does not tell its jobs
        return None
    try:
        answer = await _output("squeue", "--noheader", "--jobs", job, "--format=%e")
        return datetime.fromisoformat(answer.strip()).timestamp()
    except (OSError, TimeoutError, ValueError):
        return None


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
    )
    try:
        async with asyncio.timeout(_SQUEUE_TIMEOUT):
            return (await process.communicate())[0].decode()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
