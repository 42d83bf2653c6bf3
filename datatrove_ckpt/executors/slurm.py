"""``SlurmPipelineExecutor`` is datatrove's, with an array of workers in place of an array of tasks.

    an element of the array    is a worker: it takes tasks until none is free
    another submission         adds workers, also while the first workers are in the queue
    the time limit             an element takes no task that would hardly end before it, and is
                               requeued instead
    the last job               starts when the array has ended, makes the checks, and writes
                               ``stats.json``

datatrove deals tasks out to elements if tasks have several nodes, or retry dead letters.
"""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from datatrove.executor import SlurmPipelineExecutor as DatatroveExecutor
from datatrove.executor.slurm import launch_slurm_job, requeue_handler
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from datatrove_ckpt.claims import claims
from datatrove_ckpt.claims.claims import open_store
from datatrove_ckpt.common import LAUNCH
from datatrove_ckpt.common.formatting import plural, plural_is, ranges
from datatrove_ckpt.common.retrying import code_of_rank
from datatrove_ckpt.common.setting_types import Count, CountOrAll, check
from datatrove_ckpt.errors import CkptError, ConfigError, GoalReached
from datatrove_ckpt.executors.local import LocalPipelineExecutor, OwnExecutor, raise_limit_reached
from datatrove_ckpt.generation.limit_watch import limit_reached
from datatrove_ckpt.process import task_errors
from datatrove_ckpt.process.slurm_job import job_id_in_environment

if TYPE_CHECKING:
    from datatrove_ckpt.run_folder.run_plan import RunPlan

_LAST_JOB = "DATATROVE_CKPT_LAST_JOB"


class SlurmPipelineExecutor(OwnExecutor, DatatroveExecutor):  # type: ignore[misc]
    """Runs the tasks of a pipeline in a job array of workers.

    All arguments but the last two are those of datatrove's ``SlurmPipelineExecutor``, with these
    differences.

    Args:
        workers: how many elements the array has. -1: one for each task that is left. They need not
            run at once: the running elements share all tasks.
        gpus_per_task, cpus_per_task, nodes_per_task: resources of a worker.
        depends: the job that comes first, with all of its checks.
        max_rank_attempts, ranks_at_once: as ``LocalPipelineExecutor`` has them.

    Attributes:
        array_id: the array that was submitted last.
        job_id: the job that checks the run after it; -1: nothing was left to be submitted.
    """

    omitted = (
        "max_array_size",
        "max_array_launch_parallel",
        "stagger_max_array_jobs",
        "tasks_per_job",
    )
    workers: int
    array_id: str | int | None = None
    job_id: str | int | None
    _next_command = ""

    def __init__(
        self,
        pipeline: list[PipelineStep | Callable[..., object]],
        tasks: Count,
        time: str,
        partition: str,
        *,
        workers: CountOrAll = -1,
        max_rank_attempts: Count = 2,
        ranks_at_once: Count | None = None,
        **options: Any,
    ) -> None:
        check(SlurmPipelineExecutor, {**locals(), **options})
        for name in options.keys() & self.omitted:
            raise ConfigError(f"{name}: workers take tasks until none is left. Give workers.")
        if options.get("nodes_per_task", 1) > 1:  # a node that fails must not leave the others
            options["srun_args"] = {"kill-on-bad-exit": 1, **(options.get("srun_args") or {})}
        super().__init__(
            pipeline,
            tasks=tasks,
            time=time,
            partition=partition,
            workers=workers,
            **options,
            max_array_size=-1,
        )
        folder = self.logging_dir.resolve_paths("")
        if "$" in folder:  # the script's shell would fill it in, and find no executor.pik there
            raise ConfigError(
                f"logging_dir: {folder}: variables are not filled in. Write the path out."
            )
        if options.keys().isdisjoint({"job_id_position", "job_id_retriever"}):
            self.job_id_retriever = submitted_job
        self._prepare(DatatroveExecutor)
        self.max_rank_attempts = max_rank_attempts
        self.ranks_at_once = ranks_at_once
        self._element()  # checks them

    def run(self) -> None:
        """Submits workers, and the job that checks the run after them. In a job, does the job's
        work.

        Raises:
            CkptError: see ``check_before_run``.
            SystemExit: a worker has an error of ``LocalPipelineExecutor.run_worker``; or, in the
                last job, tasks are not complete, or ``check_after_run`` has an error.
        """
        from datatrove_ckpt.run_folder import preflight, run_plan

        if _LAST_JOB in os.environ:
            with _saying_errors():
                self._check()
        elif "SLURM_ARRAY_TASK_ID" in os.environ:
            with _saying_errors():
                self._work()
        else:
            preflight.check_before_run(run_plan.RunPlan(self))
            self.launch_job()

    def continue_with(self, command: str) -> None:
        """Lets the last job run a command in this folder, if the run is complete then."""
        self._next_command = f" && cd {shlex.quote(str(Path.cwd()))} && {command}"

    def check(self, plan: "RunPlan") -> None:
        if plan.submits and shutil.which("sbatch") is None:
            raise ConfigError(
                "sbatch is not on the PATH. Run this on a login node, or without Slurm "
                "(class_path: LocalPipelineExecutor); --dry-run shows the script.",
                setting="executor",
            )

    def script(self) -> str:
        """Returns the sbatch script. Creates no folder, unlike ``launch_job``."""
        ranks = self.get_incomplete_ranks()
        if not ranks:
            return f"# nothing to submit: {plural_is(self.tasks, 'task')} complete"
        preview = copy(self)
        with TemporaryDirectory() as folder:
            preview.slurm_logs_folder = folder
            arguments = preview.get_sbatch_args(len(ranks))
            command = f"launch_pickled_pipeline {self.logging_dir.resolve_paths('executor.pik')}"
            if self.with_srun:
                options = (f"--{key}={value}" for key, value in (self.srun_args or {}).items())
                command = f"srun {' '.join(options)} -l -n {self.nodes_per_task} {command}"
            text: str = preview.get_launch_file_contents(arguments, command)
        return text.replace(folder, str(self.slurm_logs_folder))

    def submit(self, status_commands: list[str], command: str) -> str:
        # Jobs inherit PYTHONPATH, so that a node finds the rollout's module.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])
        )
        waiting = len(self.get_incomplete_ranks())
        try:
            self.launch_job()
        except subprocess.CalledProcessError as error:
            there = " Nothing was submitted."
            if self.array_id is not None:
                there = f" Already submitted: job {self.array_id}, without its check."
            raise CkptError(
                f"sbatch ended with exit code {error.returncode}; its message is above.{there} The "
                f"script is in {self.logging_dir.resolve_paths('launch_script.slurm')}."
            ) from error
        if self.array_id is None:
            return f"Nothing was submitted: {plural_is(self.tasks, 'task')} complete."
        more = ""
        if self.pulls:
            more = f" To add workers, now or later: {command}"
        return (
            f"Submitted job {self.array_id}: {plural(self.count_elements(waiting), 'worker')} "
            f"for {waiting} of {plural(self.tasks, 'task')}. Logs: "
            f"{Path(self.slurm_logs_folder).absolute()} and "
            f"{self.logging_dir.resolve_paths('logs')}. To watch it: "
            f"{'; '.join([f'squeue -j {self.array_id}', *status_commands])}. Job {self.job_id} "
            f"checks the run: COMPLETED means that every document is there.{more}"
        )

    @property
    def pulls(self) -> bool:
        return self.nodes_per_task == 1 and self.skip_completed

    def _work(self) -> None:
        if not self.pulls:
            super().run()
            return
        for name in self.requeue_signals or ():
            signal.signal(signal.Signals[name], _requeue)
        completed = self._element().run_worker()
        logger.info(
            f"This worker has completed {plural(completed, 'task')}, and no task is free now."
        )

    def _element(self) -> LocalPipelineExecutor:
        return self._worker(
            randomize_start_duration=self.randomize_start_duration,
            max_rank_attempts=self.max_rank_attempts,
            ranks_at_once=self.ranks_at_once,
        )

    def _check(self) -> None:
        from datatrove_ckpt.run_folder import earlier_runs, preflight, run_plan

        worker = self._element()
        plan = run_plan.RunPlan(worker)
        # It restores what only the mirror and other nodes have.
        preflight.remove_markers(earlier_runs.check_job(plan))
        incomplete = worker.get_incomplete_ranks(skip_completed=True)
        if incomplete and limit_reached(self.pipeline) is None:
            raise self._not_complete(incomplete)
        preflight.check_after_run(plan)
        worker.run_ranks()
        raise_limit_reached(self.pipeline, incomplete)
        logger.success(
            f"The output of {plural(self.tasks, 'task')} is complete, and matches the checkpoint."
        )

    def _not_complete(self, incomplete: list[int]) -> CkptError:
        reader = open_store(f"{self._folder}/claims")
        causes = claims.given_up(reader)
        at_work = [worker for worker in claims.claimants(reader) if worker.is_alive]
        if causes and not at_work:
            return self.given_up_error(causes)
        text = f"{plural_is(len(incomplete), 'task')} not complete: {ranges(incomplete)}."
        if at_work:
            names = ", ".join(worker.process for worker in at_work)
            return CkptError(
                f"{text} Workers of another submission continue: {names}. Their last job checks "
                "all."
            )
        return CkptError(f"{text} Run again to submit workers.")

    def launch_job(self) -> None:
        os.environ[LAUNCH] = uuid.uuid4().hex  # sbatch passes it on
        tasks = len(self.get_incomplete_ranks())
        if tasks and not self.pulls:
            self.tasks_per_job = math.ceil(tasks / self.count_elements(tasks))
        super().launch_job()

    def count_elements(self, tasks: int) -> int:
        max_elements = 1000  # Slurm's own limit on an array is 1001, unless a cluster has another
        if self.workers > 0:
            max_elements = self.workers
        elements = min(tasks, max_elements)
        if self.pulls:
            return elements
        # datatrove gives the same number to each element but the last.
        return math.ceil(tasks / math.ceil(tasks / elements))

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, object]:
        arguments: dict[str, object] = super().get_sbatch_args(max_array)
        arguments["array"] = f"0-{self.count_elements(max_array) - 1}"
        return arguments

    def launch_merge_stats(self) -> None:
        """Submits the last job. datatrove's own last job merges statistics, after an array without
        a failure.
        """
        self.array_id = self.job_id
        arguments = self.get_sbatch_args()
        for name in ("array", "gpus"):
            arguments.pop(name, None)
        logs = f"{self.slurm_logs_folder}/%j.out"
        arguments |= {"cpus-per-task": 1, "nodes": 1, "output": logs, "error": logs}
        # A retry is marked as complete before it runs, so only the elements' ends show that its
        # tasks ran.
        kind = "afterany" if self.pulls else "afterok"
        arguments["dependency"] = f"{kind}:{self.array_id}"
        command = (
            f"{_LAST_JOB}=1 launch_pickled_pipeline "
            f"{self.logging_dir.resolve_paths('executor.pik')}{self._next_command}"
        )
        self.job_id = launch_slurm_job(
            self.get_launch_file_contents(arguments, command), self.job_id_retriever
        )


def submitted_job(printed: str) -> str:
    """Returns the job id in what sbatch printed. A site's text may stand around sbatch's line.

    Raises CkptError if no line is sbatch's, with or without ``--parsable``.
    """
    line = re.search(r"Submitted batch job (\d+)|^(\d+)(?:;\S+)?$", printed, re.MULTILINE)
    if line is None:
        raise CkptError(
            f"sbatch printed no job id, but {printed.strip()!r}. Cancel this run's jobs "
            "(squeue), set job_id_position (the id's place among the words, from 0), and run "
            "again."
        )
    return line[1] or line[2]


@contextmanager
def _saying_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        package_error = task_errors.own_error(error)
        if package_error is None:
            raise
        task_errors.safe_log()
        level = "SUCCESS" if isinstance(package_error, GoalReached) else "ERROR"
        logger.log(level, str(package_error))
        sys.exit(code_of_rank(package_error))


def _requeue(number: int, frame: object) -> None:
    """Requeues this element alone: SLURM_JOB_ID may mean the whole array."""
    with job_id_in_environment():
        requeue_handler(number, frame)
