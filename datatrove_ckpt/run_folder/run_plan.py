"""``RunPlan`` is a job, read once per command from a datatrove executor, for checks and commands.

Only ``incomplete`` and ``pulls`` read the executor again, because completion markers change.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from datatrove.executor.base import PipelineExecutor
from datatrove.io import DataFolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.base import BaseReader
from loguru import logger

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.compare import compare
from datatrove_ckpt.checkpoint.identity import RunIdentity
from datatrove_ckpt.claims.claims import refuse_for_claims
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.attempts import AttemptProgress
from datatrove_ckpt.common.formatting import no_bars_in_logs
from datatrove_ckpt.common.launchers import launcher
from datatrove_ckpt.common.retrying import naming_hub
from datatrove_ckpt.errors import (
    CheckpointMismatch,
    ConfigError,
    LimitReached,
    name_copy,
    setting_name,
    setting_of,
    step_name,
    step_place,
)
from datatrove_ckpt.generation.limit_watch import limit_reached
from datatrove_ckpt.output import writer_checks
from datatrove_ckpt.runner import InferenceRunner


@dataclass(frozen=True, eq=False)
class RunnerPlan:
    """One ``InferenceRunner`` of a job.

    Attributes:
        before: the steps since the previous runner, which passes no documents on.
        copy: the folder with a copy of the mirror, if the ranks run as jobs.
    """

    plan: "RunPlan"
    index: int
    step: InferenceRunner
    before: Sequence[PipelineStep]
    copy: Path | None

    @property
    def root(self) -> Path | None:
        """The checkpoints on this machine.

        None without checkpoints, or if only other machines set a variable in the path.

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
        self.step.adopt_recorded_settings()
        return self.step.identity(self.plan.tasks)


class WrongMarker(NamedTuple):
    """A completion marker that must be removed. ``text``: what is wrong with it."""

    plan: "RunPlan"
    rank: int
    text: str


class RunPlan:
    """A job, as any datatrove executor describes it.

    Attributes:
        local_ranks: the ranks of this executor. Executors on other machines run the other ranks.
        as_jobs: the tasks run on disks that no other machine can read.
        submits: ``run`` only submits the tasks, unless it runs in an element of an array.
        workers: the executor's number of workers; -1: one for each task.
        setting_paths: where settings of a step stand in the short form.
        waits: another job has yet to create the input.
        listed: the names of the input files before the run, by their reader.
        for_doctor: the checks change nothing, and also read and try what a run would find out.
    """

    def __init__(
        self,
        executor: PipelineExecutor,
        copies: Mapping[int, Path] | None = None,
        for_doctor: bool = False,
    ) -> None:
        self.for_doctor = for_doctor
        self.name = type(executor).__name__
        self.pipeline: Sequence[PipelineStep] = executor.pipeline
        self.listed: dict[PipelineStep, Sequence[str]] = {}
        self.tasks = int(executor.world_size)
        first = getattr(executor, "local_rank_offset", 0)
        self.local_ranks = range(first, first + getattr(executor, "local_tasks", self.tasks))
        kind = launcher(executor)
        self.is_local = kind.is_here
        self.as_jobs = kind.has_own_disks
        self.submits = kind.submits and kind.in_task not in os.environ
        self.workers: int = getattr(executor, "workers", -1)
        self.setting_paths: Mapping[str, str] = getattr(executor, "setting_paths", {})
        self.logging_dir: DataFolder = executor.logging_dir
        depends = getattr(executor, "depends", None)
        self.depends = None if depends is None else RunPlan(depends)
        self.waits = bool(depends or getattr(executor, "depends_job_id", None))
        self._executor = executor
        self.runners: list[RunnerPlan] = []
        before: list[PipelineStep] = []
        for index, step in enumerate(self.pipeline):
            if isinstance(step, InferenceRunner):
                copy = (copies or {}).get(index)
                self.runners.append(RunnerPlan(self, index, step, before, copy))
                before = []
            else:
                before.append(step)
        no_bars_in_logs()

    def place(self, index: int) -> str:
        if len(self.runners) > 1:
            return f"pipeline[{index}] "
        return ""

    @property
    def identities(self) -> list[RunIdentity]:
        return [
            runner.identity
            for runner in self.runners
            if runner.step.checkpoints_local_dir is not None
        ]

    def check_code(self, parents: Sequence[JsonObject]) -> None:
        """Compares a worker's code with its parent's, before anything is paid for."""
        for parent, identity in zip(parents, self.identities, strict=True):
            changes = compare(parent, identity)
            lines = "".join(f"  {line}\n" for change in changes for line in change.lines)
            if lines:
                raise CheckpointMismatch(
                    "Worker processes have other code or values than their starter:\n"
                    f"{lines}They import the script anew, without what `if __name__ == "
                    "'__main__':` sets. Pass it in a functools.partial or shared_context, or set "
                    "start_method='fork'."
                )

    def check_executor(self) -> None:
        if hasattr(self._executor, "check"):  # datatrove's executors have none
            self._executor.check(self)

    @property
    def with_checkpoints(self) -> list[tuple[RunnerPlan, Path]]:
        roots = [(runner, runner.root) for runner in self.runners]
        return [(runner, root) for runner, root in roots if root is not None]

    @property
    def retries(self) -> bool:
        """Whether the tasks process dead letters, so that the input may be gone."""
        return any(runner.step.retry_dead_letters for runner in self.runners)

    @property
    def pulls(self) -> bool:
        return bool(getattr(self._executor, "pulls", False))

    @contextmanager
    def with_mirrors(self) -> "Iterator[RunPlan]":
        """Yields a plan for checks on this machine.

        If ranks run as jobs, it has copies of their mirrors. Errors name these by their URLs.
        """
        if not self.as_jobs:
            yield self
            return
        from datatrove_ckpt.mirror.restore import MirrorReader

        if not self.for_doctor:
            self._executor._ensure_logging_dir_repo()
        copies: dict[int, Path] = {}
        with ExitStack() as stack:
            for runner in self.runners:
                url = runner.step.checkpoints_remote_dir
                if url is not None:
                    temporary = TemporaryDirectory(prefix="datatrove-ckpt-")
                    copy = copies[runner.index] = Path(stack.enter_context(temporary))
                    name_copy(copy, url)
                    MirrorReader(url, copy, lambda name, _: not layout.is_journal(name)).refresh()
            yield RunPlan(self._executor, copies, self.for_doctor)

    def incomplete(
        self, ranks: Iterable[int] | None = None, skip_completed: bool | None = None
    ) -> list[int]:
        """Returns the ranks that would run now.

        Args:
            skip_completed: None: the setting of the executor.
        """
        if ranks is None:
            ranks = range(self.tasks)
        with naming_hub():
            result: list[int] = self._executor.get_incomplete_ranks(ranks, skip_completed)
        return result

    def limit_reached(self) -> LimitReached | None:
        if self.incomplete(skip_completed=True):
            return limit_reached(self._executor.pipeline)
        return None

    def completed(self) -> list[int]:
        return sorted({*self.local_ranks}.difference(self.incomplete(self.local_ranks)))

    def forget(self, rank: int) -> None:
        name = f"completions/{rank:05d}"
        if self.logging_dir.isfile(name):
            self.logging_dir.rm(name)

    def forget_completed(self) -> None:
        """Removes the markers of complete ranks that run again. They would hide a failure."""
        again = self.incomplete()
        for rank in set(again) - set(self.incomplete(again, skip_completed=True)):
            self.forget(rank)


# checks of settings -------------------------------------------------------------------------------


def check_steps(plan: "RunPlan") -> None:
    """Checks a job, and the jobs that it depends on.

    Raises:
        ConfigError: steps or tasks would write the same files, a step would read its own output,
            or get no documents, or there is no task.
    """
    if plan.depends is not None:
        check_steps(plan.depends)
    if plan.tasks < 1:
        raise ConfigError(f"{plan.name}: tasks: must be at least 1; it is {plan.tasks}.")
    for runner in plan.runners:
        writer_checks.check_rank_in_template(runner.step.output_writer, plan.tasks)
    _check_order(plan.pipeline)
    for place, writer in writer_checks.writers_of(plan.pipeline):
        for index, step in enumerate(plan.pipeline):
            writer_checks.refuse_own_output(step_name(index, step), step, place, writer)
    writer_checks.refuse_equal_folders(plan.pipeline)


def _check_order(pipeline: Sequence[object]) -> None:
    """Refuses a reader whose limit is 0 or negative, an ``InferenceRunner`` without a step before
    it, a step right after one that needs documents, and steps after one with ``until``.
    """
    for index, step in enumerate(pipeline):
        if isinstance(step, BaseReader) and (step.limit < -1 or not step.limit):
            raise ConfigError(
                f"{step_place(index, step)}: limit: must be >= 1, or -1 for all "
                f"documents; it is {step.limit}."
            )
    if pipeline and isinstance(pipeline[0], InferenceRunner) and not pipeline[0].retry_dead_letters:
        raise ConfigError(
            f"pipeline[0] {type(pipeline[0]).__name__} would get no documents. Put a reader "
            "before it."
        )
    for index, (before, step) in enumerate(pairwise(pipeline)):
        if not isinstance(before, InferenceRunner) or not isinstance(step, PipelineStep):
            continue
        if before.until is not None:
            raise ConfigError(
                f"{step_place(index, before)}: until: no step after it would run. Put those into "
                "a second executor that `depends` on the first."
            )
        first = next(iter(signature(step.run).parameters.values()), None)
        if (
            first is not None
            and first.default is Parameter.empty
            and first.kind is not Parameter.VAR_POSITIONAL
        ):
            raise ConfigError(
                f"pipeline[{index + 1}] {type(step).__name__} would get no documents: "
                f"pipeline[{index}] {type(before).__name__} passes none on. Put this step into a "
                "second executor that `depends` on the first and reads its output. (Or, if it "
                "needs no documents, give `data` in run() a default.)"
            )


def lost_with_disk(plan: "RunPlan", is_kept: Callable[[str], bool]) -> list[str]:
    folders: list[tuple[str, object]] = [(setting_name("logging_dir"), plan.logging_dir)]
    for index, step in enumerate(plan.pipeline):
        name = setting_of("data_folder", f"pipeline[{index}]")
        folders.append((name, getattr(step, "data_folder", None)))
    folders += [
        (setting_of("output_folder", place), writer.output_folder)
        for place, writer in writer_checks.writers_of(plan.pipeline)
    ]
    lost = [
        name
        for name, folder in folders
        if isinstance(folder, DataFolder)
        and folder.is_local()
        and not is_kept(folder.resolve_paths(""))
    ]
    for runner in plan.runners:
        step = runner.step
        mirror = step.checkpoints_remote_dir
        if step.checkpoints_local_dir is None:
            lost.append("checkpoints_local_dir (with checkpoints_remote_dir)")
        elif not is_kept(str(step.checkpoints_local_dir)) and not (
            mirror and is_kept(str(mirror).removeprefix("file://"))
        ):
            lost.append("checkpoints_remote_dir (the mirror of the checkpoints)")
    return list(dict.fromkeys(lost))


def note_workers(workers: int, tasks: int) -> None:
    if workers > tasks:
        logger.info(
            f"workers is {workers}, but there is work for {tasks}. For more, start a new run "
            "with more tasks and input files."
        )


def refuse_without_claims(plan: "RunPlan") -> None:
    refuse_for_claims(plan.logging_dir.resolve_paths(""))
    for runner in plan.runners:
        if runner.step.checkpoints_local_dir is None:
            raise ConfigError(
                f"pipeline[{runner.index}] InferenceRunner: checkpoints_local_dir: a worker "
                "needs one."
            )


def rank_progress(mirrors: Sequence[str], roots: Iterable[Path], rank: int) -> AttemptProgress:
    """Returns how far a rank is on its mirrors; without any, in the folders of its checkpoints. By
    this, claims see whether an attempt was in vain.
    """
    from datatrove_ckpt.mirror.restore import newest_manifest

    sizes: list[tuple[str, int]] = []
    for url in mirrors:
        manifest = newest_manifest(f"{url}/{rank:05d}")
        if manifest is not None:
            sizes += manifest.sizes.items()
            sizes += [(layout.CACHE, part.size) for part in manifest.answers]
    if not mirrors:
        for path in [path for root in roots for path in layout.rank_folder(root, rank).glob("*")]:
            with suppress(FileNotFoundError):  # a journal whose chunk was committed
                sizes.append((path.name, path.stat().st_size))
    return (
        sum(size for name, size in sizes if name == layout.COMMITS),
        sum(size for name, size in sizes if layout.is_journal(name)),
        sum(size for name, size in sizes if name.startswith(layout.CACHE)),
    )
