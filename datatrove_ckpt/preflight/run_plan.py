"""RunPlan: a job, read once per command from a datatrove executor, for checks and commands.

Only ``incomplete`` and ``pulls`` read the executor again, because completion markers change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True)
class Folders:
    """The checkpoints of a run, as they are read here.

    Attributes:
        checkpoint: the folder, or a copy of a mirror.
        shown_as: the folder, or the mirror's URL, for messages.
    """

    checkpoint: Path
    shown_as: str


@dataclass(frozen=True, eq=False)
class RunnerPlan:
    """One ``InferenceRunner`` of a job.

    Attributes:
        index: its place in the pipeline.
        before: the steps since the runner before it, which passes no documents on.
        copy: of the mirror of its checkpoints, where the ranks run as jobs.
    """

    plan: RunPlan
    index: int
    step: InferenceRunner
    before: Sequence[PipelineStep]
    copy: Folders | None

    @property
    def root(self) -> Path | None:
        """The checkpoints on this machine; None without checkpoints, or with variables that are set
        elsewhere.

        Raises:
            ConfigError: a variable in it is not set, and the tasks run here.
        """
        if self.copy is not None:
            return self.copy.checkpoint
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
        workers: as given; -1: one for each task.
        depends: the job that comes first.
        waits: another job has yet to create the input.
        runners: in the order of the pipeline.
    """

    def __init__(
        self, executor: PipelineExecutor, copies: Mapping[int, Folders] | None = None
    ) -> None:
        self.name = type(executor).__name__
        self.pipeline: Sequence[PipelineStep] = executor.pipeline
        self.tasks = int(executor.world_size)
        first = getattr(executor, "local_rank_offset", 0)
        self.local_ranks = range(first, first + getattr(executor, "local_tasks", self.tasks))
        self.is_local = isinstance(executor, LocalPipelineExecutor)
        self.as_jobs = isinstance(executor, JobsPipelineExecutor)
        self.at_once: int = self.tasks
        self.workers: int = getattr(executor, "workers", -1)
        if self.workers > 0:
            self.at_once = min(self.tasks, self.workers)
        self.logging_dir: DataFolder = executor.logging_dir
        depends = getattr(executor, "depends", None)
        self.depends = None if depends is None else RunPlan(depends)
        self.waits = bool(depends or getattr(executor, "depends_job_id", None))
        self._executor = executor
        self.runners = self._find_runners(copies or {})
        no_bars_in_logs()

    def _find_runners(self, copies: Mapping[int, Folders]) -> list[RunnerPlan]:
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
        """Whether the tasks process dead letters, so that the input may be gone."""
        return any(runner.step.retry_dead_letters for runner in self.runners)

    @property
    def pulls(self) -> bool:
        """Whether the executor submits workers, which take tasks by themselves."""
        return bool(getattr(self._executor, "pulls", False))

    @contextmanager
    def with_mirrors(self, dry_run: bool = False) -> Iterator[RunPlan]:
        """Yields the plan for checks on this machine: where ranks run as jobs, with copies of their
        mirrors, which errors name by their URLs.

        Args:
            dry_run: make no repository for the logs.
        """
        if not self.as_jobs:
            yield self
            return
        from datatrove_ckpt.mirror.restore import MirrorReader

        if not dry_run:
            self._executor._ensure_logging_dir_repo()
        copies: dict[int, Folders] = {}
        with ExitStack() as stack:
            for runner in self.runners:
                url = runner.step.checkpoints_remote_dir
                if url is not None:
                    folder = stack.enter_context(TemporaryDirectory(prefix="datatrove-ckpt-"))
                    copies[runner.index] = Folders(Path(folder), url)
                    MirrorReader(url, Path(folder), lambda name, _: not is_journal(name)).refresh()
            seen = RunPlan(self._executor, copies)
            try:
                yield seen
            except CkptError as error:
                error.args = tuple(map(seen.shown, error.args))
                raise

    def shown(self, part: object) -> object:
        """Returns a part of a message; a text has mirrors in place of their copies."""
        text = str(part)
        for runner in self.runners:
            if runner.copy is not None:
                text = text.replace(str(runner.copy.checkpoint), runner.copy.shown_as)
        return part if text == str(part) else text

    def incomplete(
        self, ranks: Iterable[int] | None = None, skip_completed: bool | None = None
    ) -> list[int]:
        """Returns the ranks that would run, now. ``skip_completed``: as the executor has it if
        None.
        """
        if ranks is None:
            ranks = range(self.tasks)
        with naming_hub():  # a run looks there first
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
