"""RunPlan: a job, read from a datatrove executor. Checks and commands see this, and no executor.

Only ``incomplete`` reads the executor again: which tasks are marked as complete changes while they
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from datatrove.executor import JobsPipelineExecutor, LocalPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.io import DataFolder
from datatrove.pipeline.base import PipelineStep

from datatrove_ckpt.checkpoint.identity import RunIdentity
from datatrove_ckpt.checkpoint.layout import is_journal
from datatrove_ckpt.common.formatting import no_bars_in_logs
from datatrove_ckpt.common.retrying import file_system_call, naming_hub
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.runner import InferenceRunner

_COPIES = "_checkpoint_copies"


@dataclass(frozen=True, eq=False)
class RunnerPlan:
    """One ``InferenceRunner`` of a job.

    Attributes:
        index: its place in the pipeline.
        before: the steps since the runner before it, which passes no documents on.
        copy: of the mirror of its checkpoints, on this machine.
    """

    plan: RunPlan
    index: int
    step: InferenceRunner
    before: Sequence[PipelineStep]
    copy: Path | None

    @property
    def root(self) -> Path | None:
        """Its checkpoints on this machine. None: there are none, or variables in their folder are
        set elsewhere only.

        Raises:
            ConfigError: a variable in it is not set, and the tasks run here.
        """
        if self.copy is not None:
            return self.copy
        if self.step.checkpoints_local_dir is None or self.plan.as_jobs:
            return None
        try:
            return self.step.checkpoints_root
        except ConfigError:
            if self.plan.is_local:
                raise
            return None

    @cached_property
    def identity(self) -> RunIdentity:
        return self.step.identity(self.plan.tasks)


class RunPlan:
    """A job, as any datatrove executor describes it.

    Attributes:
        name: of the executor's class.
        local_ranks: those that this executor runs; the others belong to executors on other
            machines.
        is_local: the tasks run on this machine.
        as_jobs: they run as Hugging Face Jobs, on disks that no other machine sees.
        at_once: how many tasks run at once, at most.
        depends: the job that comes first.
        waits: another job has yet to create the input.
        runners: in the order of the pipeline.
    """

    def __init__(self, executor: PipelineExecutor) -> None:
        self.name = type(executor).__name__
        self.pipeline: Sequence[PipelineStep] = executor.pipeline
        self.tasks = int(executor.world_size)
        first = getattr(executor, "local_rank_offset", 0)
        self.local_ranks = range(first, first + getattr(executor, "local_tasks", self.tasks))
        self.is_local = isinstance(executor, LocalPipelineExecutor)
        self.as_jobs = isinstance(executor, JobsPipelineExecutor)
        self.at_once: int = self.tasks
        workers = getattr(executor, "workers", -1)
        if workers > 0:
            self.at_once = min(self.tasks, workers)
        self.logging_dir: DataFolder = executor.logging_dir
        depends = getattr(executor, "depends", None)
        self.depends = None if depends is None else RunPlan(depends)
        self.waits = bool(depends or getattr(executor, "depends_job_id", None))
        self._executor = executor
        self.runners = self._find_runners(getattr(executor, _COPIES, {}))
        no_bars_in_logs()

    def _find_runners(self, copies: dict[int, Path]) -> list[RunnerPlan]:
        found: list[RunnerPlan] = []
        before: list[PipelineStep] = []
        for index, step in enumerate(self.pipeline):
            if isinstance(step, InferenceRunner):
                found.append(RunnerPlan(self, index, step, before, copies.get(index)))
                before = []
            else:
                before.append(step)
        return found

    @property
    def inputs(self) -> list[Path]:
        return [
            Path(step.data_folder.path).absolute()
            for step in self.pipeline
            if hasattr(step, "data_folder")
        ]

    @property
    def kept(self) -> list[tuple[RunnerPlan, Path]]:
        roots = [(runner, runner.root) for runner in self.runners]
        return [(runner, root) for runner, root in roots if root is not None]

    @property
    def retries(self) -> bool:
        """The tasks process dead letters, so the input may be gone."""
        return any(runner.step.retry_dead_letters for runner in self.runners)

    def incomplete(
        self, ranks: Iterable[int] | None = None, skip_completed: bool | None = None
    ) -> list[int]:
        """Returns the ranks that would run, now. ``skip_completed``: as the executor has it if
        None.
        """
        if ranks is None:
            ranks = range(self.tasks)
        with naming_hub("logging_dir"):  # a run looks there first
            found: list[int] = self._executor.get_incomplete_ranks(ranks, skip_completed)
        return found

    def marker(self, rank: int) -> str:
        return str(self.logging_dir.resolve_paths(f"completions/{rank:05d}"))

    def forget(self, rank: int) -> None:
        name = f"completions/{rank:05d}"
        if self.logging_dir.isfile(name):
            self.logging_dir.rm(name)

    def marked(self) -> dict[str, object]:
        """Returns when each rank was marked, by the marker's path, if its file system has times."""
        with file_system_call():
            found = self.logging_dir.find("completions", detail=True)
        times = {
            name: one.get("mtime") or one.get("LastModified") or one.get("updated")
            for name, one in found.items()
        }
        return {name: time for name, time in times.items() if time is not None}


@contextmanager
def checkpoints_seen(
    executor: PipelineExecutor, dry_run: bool = False
) -> Iterator[Callable[[str], str]]:
    """Gives plans copies of the mirrors of runners whose ranks run as jobs, for checks on this
    machine.

    Yields what puts the mirrors' names into a text.

    Args:
        dry_run: make no repository for the logs.
    """
    names: dict[str, str] = {}

    def said(text: str) -> str:
        for folder, url in names.items():
            text = text.replace(folder, url)
        return text

    if not isinstance(executor, JobsPipelineExecutor):
        yield said
        return
    if not dry_run:
        executor._ensure_logging_dir_repo()
    copies: dict[int, Path] = {}
    with ExitStack() as stack:
        for index, step in enumerate(executor.pipeline):
            url = getattr(step, "checkpoints_remote_dir", None)
            if url is not None:
                folder = stack.enter_context(TemporaryDirectory(prefix="datatrove-ckpt-"))
                _copy(url, Path(folder))
                copies[index] = Path(folder)
                names[folder] = url
        setattr(executor, _COPIES, copies)
        stack.callback(delattr, executor, _COPIES)
        try:
            yield said
        except CkptError as error:
            shown = [said(str(part)) for part in error.args]
            error.args = tuple(
                part if str(part) == text else text
                for part, text in zip(error.args, shown, strict=True)
            )
            raise


def _copy(url: str, folder: Path) -> None:
    from datatrove_ckpt.mirror.reading import MirrorReader

    MirrorReader(url, folder, lambda name, size: not is_journal(name)).refresh()
