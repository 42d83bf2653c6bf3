"""Submission to Slurm for ``datatrove-ckpt run``. datatrove's executor writes the sbatch script and submits it.

Checked before: sbatch is on the PATH, and no job of the same run is in the queue. A second job would assign ranks to
its tasks anew (it rewrites ``ranks_to_run.json``), and two tasks could work on one rank.

    LOGGING_DIR/slurm_jobs.json      ids of the job arrays that were submitted last

datatrove submits one more job after the arrays, which merges their statistics. That job is ignored here: if an array
failed, it may stay in the queue without end.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from datatrove.executor import SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.errors.doors import written
from datatrove_ckpt.formatting import all_are, plural

_JOBS = "slurm_jobs.json"
# Seconds. Generous: a controller under load is slow.
_SQUEUE_TIMEOUT = 120.0
_FORGOTTEN = "Invalid job id"


class JobIds:
    """Wraps the executor's ``job_id_retriever`` and records the ids that it finds."""

    def __init__(self, retriever: Callable[[str], str]) -> None:
        self._retriever = retriever
        self.found: list[str] = []

    def __call__(self, output: str) -> str:
        self.found.append(str(self._retriever(output)))
        return self.found[-1]


def submits(executor: PipelineExecutor) -> bool:
    """Whether running this executor means submitting jobs. Inside a job it runs the task."""
    return isinstance(executor, SlurmPipelineExecutor) and "SLURM_ARRAY_TASK_ID" not in os.environ


def script(executor: SlurmPipelineExecutor) -> str:
    """The sbatch script that would be submitted now. Creates no folder, unlike the executor."""
    ranks = executor.get_incomplete_ranks()
    if not ranks:
        return f"# nothing to submit: {all_are(executor.tasks, 'task')} complete"
    preview = copy.copy(executor)
    jobs = math.ceil(len(ranks) / executor.tasks_per_job)
    with tempfile.TemporaryDirectory() as folder:
        preview.slurm_logs_folder = folder
        arguments = preview.get_sbatch_args(jobs if preview.max_array_size == -1 else min(jobs, preview.max_array_size))
        srun = " ".join(["srun", *(f"--{key}={value}" for key, value in (preview.srun_args or {}).items())])
        if preview.with_srun:
            step = f"{srun} -l -n {preview.nodes_per_task} "
        else:
            step = ""
        pickle = preview.logging_dir.resolve_paths("executor.pik")
        text: str = preview.get_launch_file_contents(arguments, f"{step}launch_pickled_pipeline {pickle}")
    return text.replace(folder, str(executor.slurm_logs_folder))


def check(executor: SlurmPipelineExecutor) -> None:
    """Checks that jobs can be submitted.

    Raises:
        ConfigError: there is no sbatch; or see ``refuse_queued``.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            f"{written.executor}: SlurmPipelineExecutor submits with sbatch, which is not on this machine's PATH. Run "
            f"this on a login node of the cluster, or {written.run_here}. --dry-run shows the script anywhere."
        )
    refuse_queued(executor)


def refuse_queued(executor: SlurmPipelineExecutor) -> None:
    """
    Raises:
        ConfigError: an earlier job of this run is still queued, or its state is unknown.
    """
    if executor.logging_dir.isfile(_JOBS):
        jobs = json.loads(executor.logging_dir.cat_file(_JOBS))
    else:
        jobs = []
    queued = [job for job in map(str, jobs) if _is_queued(job, executor)]
    if queued:
        raise ConfigError(
            f"{written.executor}: job {', '.join(queued)} of this run is still in the queue. Wait until it ends "
            f"(squeue -j {','.join(queued)}), or cancel it (scancel {' '.join(queued)}), and run the same "
            "command again."
        )


def _is_queued(job: str, executor: SlurmPipelineExecutor) -> bool:
    """Whether the job is in the queue. A job that squeue no longer knows has ended.

    Raises:
        ConfigError: squeue does not tell.
    """
    command = ["squeue", "--noheader", "--jobs", job]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SQUEUE_TIMEOUT)
        if asked.returncode == 0:
            return asked.stdout.strip() != ""
        if _FORGOTTEN in asked.stderr:
            return False
        cause = " ".join(asked.stderr.split()) or f"exit code {asked.returncode}"
    except subprocess.TimeoutExpired:
        cause = f"no answer within {_SQUEUE_TIMEOUT:g} s"
    except OSError as error:
        cause = str(error)
    raise ConfigError(
        f"{written.executor}: squeue does not tell whether job {job} of this run is still in the queue: {cause}. "
        f"Nothing was submitted. Run the same command again when squeue -j {job} answers, or remove "
        f"{executor.logging_dir.resolve_paths(_JOBS)} if you know that the job has ended."
    )


def submit(executor: SlurmPipelineExecutor, what: list[list[str]], command: str) -> str:
    """Submits the jobs, and returns the closing line for the user.

    Args:
        what: of ``status``, as it is typed: the YAML file with its overrides, or each folder.

    Raises:
        CkptError: sbatch failed.
    """
    # Jobs inherit PYTHONPATH: a node must find the rollout's module, which may be in this folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    executor.job_id_retriever = ids = JobIds(executor.job_id_retriever)
    waiting = len(executor.get_incomplete_ranks())
    refused = None
    try:
        executor.run()
        arrays = ids.found[:-1]
    except subprocess.CalledProcessError as error:
        refused = error
        arrays = ids.found
    if arrays:
        with executor.logging_dir.open(_JOBS, "w") as file:
            json.dump(arrays, file)
    if refused is not None:
        if arrays:
            there = f" Already submitted: job {', '.join(arrays)}."
        else:
            there = " Nothing was submitted."
        raise CkptError(
            f"sbatch ended with exit code {refused.returncode}; its message is above.{there} The script is in "
            f"{executor.logging_dir.resolve_paths('launch_script.slurm')}."
        ) from refused
    if not arrays:
        return f"Nothing was submitted: {all_are(executor.tasks, 'task')} complete."
    job = ",".join(arrays)
    last = ids.found[-1]
    per_job = executor.tasks_per_job
    elements = plural(math.ceil(waiting / per_job), "array element")
    if per_job > 1:
        grouped = f", in {elements} of up to {per_job} tasks"
    else:
        grouped = ""
    look = [f"squeue -j {job}", *(shlex.join(["datatrove-ckpt", "status", *one]) for one in what)]
    return (
        f"Submitted job {job} for {waiting} of {plural(executor.tasks, 'task')}{grouped}. Logs: "
        f"{Path(executor.slurm_logs_folder).absolute()} and {executor.logging_dir.resolve_paths('logs')}. To watch it: "
        f"{'; '.join(look)}. Job {last} merges statistics after it; if a task fails, end it: scancel {last}. When "
        f"job {job} has ended, the same command submits the tasks that are not complete: {command}"
    )
