"""Submission to Slurm for ``datatrove-ckpt run``."""

from __future__ import annotations

import copy
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from datatrove.executor import SlurmPipelineExecutor as DatatroveExecutor
from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.common.formatting import plural, plural_is
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.executors.slurm import SlurmPipelineExecutor


def submits(executor: PipelineExecutor) -> bool:
    return isinstance(executor, DatatroveExecutor) and "SLURM_ARRAY_TASK_ID" not in os.environ


def script(executor: SlurmPipelineExecutor) -> str:
    """Returns the sbatch script. Creates no folder, unlike the executor."""
    ranks = executor.get_incomplete_ranks()
    if not ranks:
        return f"# nothing to submit: {plural_is(executor.tasks, 'task')} complete"
    preview = copy.copy(executor)
    with tempfile.TemporaryDirectory() as folder:
        preview.slurm_logs_folder = folder
        arguments = preview.get_sbatch_args(len(ranks))
        srun = " ".join(
            ["srun", *(f"--{key}={value}" for key, value in (preview.srun_args or {}).items())]
        )
        step = ""
        if preview.with_srun:
            step = f"{srun} -l -n {preview.nodes_per_task} "
        pickle = preview.logging_dir.resolve_paths("executor.pik")
        text: str = preview.get_launch_file_contents(
            arguments, f"{step}launch_pickled_pipeline {pickle}"
        )
    return text.replace(folder, str(executor.slurm_logs_folder))


def check(executor: PipelineExecutor) -> None:
    """Raises:
    ConfigError: there is no sbatch; or it is datatrove's own executor.
    """
    if not isinstance(executor, SlurmPipelineExecutor):
        raise ConfigError(
            "executor: class_path: write SlurmPipelineExecutor; datatrove's own is for scripts."
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "SlurmPipelineExecutor submits with sbatch, which is not on this "
            "machine's PATH. Run this on a login node of the cluster, or leave Slurm out "
            "(class_path: LocalPipelineExecutor). "
            "--dry-run shows the script anywhere.",
            setting="executor",
        )


def submit(executor: SlurmPipelineExecutor, what: list[list[str]], command: str) -> str:
    """Submits the jobs, and returns the closing line for the user.

    Args:
        what: of ``status``, as it is typed: the YAML file with its overrides, or each folder.

    Raises:
        CkptError: sbatch failed.
    """
    # Jobs inherit PYTHONPATH, so that a node finds the rollout's module.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])
    )
    waiting = len(executor.get_incomplete_ranks())
    try:
        executor.launch_job()
    except subprocess.CalledProcessError as error:
        there = " Nothing was submitted."
        if executor.array_id is not None:
            there = (
                f" Already submitted: job {executor.array_id}, without the job that checks the "
                "run after it."
            )
        raise CkptError(
            f"sbatch ended with exit code {error.returncode}; its message is above.{there} The "
            f"script is in {executor.logging_dir.resolve_paths('launch_script.slurm')}."
        ) from error
    job = executor.array_id
    if job is None:
        return f"Nothing was submitted: {plural_is(executor.tasks, 'task')} complete."
    look = [f"squeue -j {job}", *(shlex.join(["datatrove-ckpt", "status", *one]) for one in what)]
    more = ""
    if executor.pulls:
        more = f" To add workers, now or later: {command}"
    return (
        f"Submitted job {job}: {plural(executor.count_elements(waiting), 'worker')} for {waiting} "
        f"of {plural(executor.tasks, 'task')}. Logs: {Path(executor.slurm_logs_folder).absolute()} "
        f"and {executor.logging_dir.resolve_paths('logs')}. To watch it: {'; '.join(look)}. Job "
        f"{executor.job_id} checks the run after it: COMPLETED means that every document is "
        f"there.{more}"
    )
