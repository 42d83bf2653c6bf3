"""What a job is, read from a datatrove executor. Checks and commands see this, and no executor.

Which tasks are marked as complete changes while they run, so that alone is asked for anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from datatrove.executor import JobsPipelineExecutor, LocalPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.io import DataFolder
from datatrove.pipeline.base import PipelineStep

from datatrove_ckpt.checkpoint.identity import RunIdentity
from datatrove_ckpt.checkpoint.layout import is_journal
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.formatting import no_bars_in_logs
from datatrove_ckpt.retrying import file_system_call, naming_hub
from datatrove_ckpt.runner import InferenceRunner

_SEEN = "_checkpoints_seen"


@dataclass(frozen=True)
class RunnerPlan:
    """One ``InferenceRunner`` of a job.

    Attributes:
        index: its place in the pipeline.
        before: the steps since the runner before it, which passes no documents on.
        tasks: of the job.
        is_local: the tasks run on this machine.
        is_seen: they do not run as jobs, or a copy of the mirror has taken the place of their checkpoints.
    """

    index: int
    step: InferenceRunner
    before: Sequence[PipelineStep]
    tasks: int
    is_local: bool
    is_seen: bool

    @property
    def root(self) -> Path | None:
        """Its checkpoints on this machine. None: there are none, or variables in their folder are set elsewhere only.

        Raises:
            ConfigError: a variable in it is not set, and the tasks run here.
        """
        if self.step.checkpoints_local_dir is None or not self.is_seen:
            return None
        try:
            return self.step.checkpoints_root
        except ConfigError:
            if self.is_local:
                raise
            return None

    @property
    def identity(self) -> RunIdentity:
        return self.step.identity(self.tasks)


def has_runner(executor: PipelineExecutor) -> bool:
    """Whether an executor has an ``InferenceRunner``, ours or datatrove's."""
    return any(InferenceRunner.__name__ in (one.__name__ for one in type(step).__mro__) for step in executor.pipeline)


class RunPlan:
    """A job, as any datatrove executor describes it.

    Attributes:
        name: of the executor's class.
        local_ranks: those that this executor runs; the others belong to executors on other machines.
        is_local: the tasks run on this machine.
        as_jobs: they run as Hugging Face Jobs, on disks that nobody else sees.
        workers: the limit for tasks that run at once; -1: none.
        depends: the job that comes first.
        waits: another job has yet to create the input.
    """

    def __init__(self, executor: PipelineExecutor) -> None:
        self.name = type(executor).__name__
        self.pipeline: Sequence[PipelineStep] = executor.pipeline
        self.tasks = int(executor.world_size)
        first = getattr(executor, "local_rank_offset", 0)
        self.local_ranks = range(first, first + getattr(executor, "local_tasks", self.tasks))
        self.is_local = isinstance(executor, LocalPipelineExecutor)
        self.as_jobs = isinstance(executor, JobsPipelineExecutor)
        self.workers: int = getattr(executor, "workers", -1)
        self.logging_dir: DataFolder = executor.logging_dir
        depends = getattr(executor, "depends", None)
        self.depends = None if depends is None else RunPlan(depends)
        self.waits = bool(depends or getattr(executor, "depends_job_id", None))
        self._executor = executor
        no_bars_in_logs()

    @property
    def runners(self) -> list[RunnerPlan]:
        found: list[RunnerPlan] = []
        before: list[PipelineStep] = []
        is_seen = not self.as_jobs or getattr(self._executor, _SEEN, False)
        for index, step in enumerate(self.pipeline):
            if isinstance(step, InferenceRunner):
                found.append(RunnerPlan(index, step, before, self.tasks, self.is_local, is_seen))
                before = []
            else:
                before.append(step)
        return found

    @property
    def kept(self) -> list[tuple[InferenceRunner, Path]]:
        """The runners whose checkpoints are on this machine, with their folders."""
        return [(runner.step, root) for runner in self.runners if (root := runner.root) is not None]

    @property
    def retries(self) -> bool:
        """The tasks process dead letters, so the input may be gone."""
        return any(runner.step.retry_dead_letters for runner in self.runners)

    @property
    def at_once(self) -> int:
        """How many tasks run at once, at most."""
        return min(self.tasks, self.workers) if self.workers > 0 else self.tasks

    def incomplete(self, ranks: Iterable[int] | None = None, skip_completed: bool | None = None) -> list[int]:
        """The ranks that would run, now. ``skip_completed``: as the executor has it if None."""
        ranks = range(self.tasks) if ranks is None else ranks
        with naming_hub("logging_dir"):  # a run looks there first
            found: list[int] = self._executor.get_incomplete_ranks(ranks, skip_completed)
        return found

    def marker(self, rank: int) -> str:
        """The path of the file that marks a rank as complete."""
        return str(self.logging_dir.resolve_paths(f"completions/{rank:05d}"))

    def forget(self, rank: int) -> None:
        """Removes a rank's marker, if it has one."""
        if self.logging_dir.isfile(name := f"completions/{rank:05d}"):
            self.logging_dir.rm(name)

    def marked(self) -> dict[str, object]:
        """When each rank was marked, by the marker's path; without those of file systems that do not tell."""
        with file_system_call():
            found = self.logging_dir.find("completions", detail=True)
        times = {name: one.get("mtime") or one.get("LastModified") or one.get("updated") for name, one in found.items()}
        return {name: time for name, time in times.items() if time is not None}


@contextmanager
def checkpoints_seen(executor: PipelineExecutor, dry_run: bool = False) -> Iterator[Callable[[str], str]]:
    """While checks of this machine look at runners whose ranks run as jobs: copies of the mirrors take their places.

    Yields what puts the mirrors' names into a text.

    Args:
        dry_run: make no repository for the logs.
    """
    names: dict[str, str] = {}

    def said(text: str) -> str:
        for folder, url in names.items():
            text = text.replace(folder, url)
        return text

    is_jobs = isinstance(executor, JobsPipelineExecutor)
    with ExitStack() as stack:
        if is_jobs:
            setattr(executor, _SEEN, True)
            stack.callback(delattr, executor, _SEEN)
            if not dry_run:
                executor._ensure_logging_dir_repo()
        for step in executor.pipeline if is_jobs else ():
            if isinstance(step, InferenceRunner) and (url := step.checkpoints_remote_dir) is not None:
                folder = stack.enter_context(TemporaryDirectory(prefix="datatrove-ckpt-"))
                _copy(url, Path(folder))
                stack.callback(setattr, step, "checkpoints_local_dir", step.checkpoints_local_dir)
                step.checkpoints_local_dir = folder
                names[folder] = url
        try:
            yield said
        except CkptError as error:
            error.args = tuple(said(one) if isinstance(one, str) else one for one in error.args)
            raise


def _copy(url: str, folder: Path) -> None:
    from datatrove_ckpt.mirror.reading import MirrorReader

    MirrorReader(url, folder, lambda name, size: not is_journal(name)).refresh()
