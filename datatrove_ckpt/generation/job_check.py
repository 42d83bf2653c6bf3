"""``check_job``: what is compared before any task of a job starts.

datatrove skips every task that has a completion marker in ``logging_dir``, so a finished task never looks at its own
checkpoint again. Whoever runs an executor calls ``check_job`` first, which looks at finished tasks as well.

    marker   checkpoint of the rank      what happens
    any      of another run              refused, see ``checkpoint/job.py``
    yes      none, but in the mirror     it is restored, and then compared
    yes      none                        refused: nothing shows that the rank's documents are in the output
    yes      not finished                the marker is removed, so that the rank runs
    yes      of another run, but empty   the marker is removed, so that the rank runs with the new settings
    yes      finished                    the rank is skipped
    no       of this run, or none        the rank runs
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from datatrove_ckpt.checkpoint.dealt_out import (
    lost_ranks,
    older_ranks,
    refuse_lost_ranks,
    refuse_lost_shares,
    refuse_other_number,
    refuse_unfitting,
    retired_ranks,
)
from datatrove_ckpt.checkpoint.fields import RunIdentity
from datatrove_ckpt.checkpoint.foreign import check_not_headless
from datatrove_ckpt.checkpoint.identity import Change, refusal, way_back
from datatrove_ckpt.checkpoint.job import JobChanges, compare_job, name_tasks
from datatrove_ckpt.checkpoint.layout import DEAD_LETTERS, RUN, is_finished, rank_folder, rank_numbers
from datatrove_ckpt.checkpoint.resharding import refuse_half_resharded
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.mirror.job import compare_mirrored_job, restore_shares
from datatrove_ckpt.mirror.restore import restore_rank

# A restore waits for a remote nearly all the time.
_MIRROR_THREADS = 16


def check_job(executor: Any, dry_run: bool = False, deals_out: bool = False) -> list[str]:
    """Compares a job with what its folders hold from earlier runs. Starts nothing.

    Args:
        executor: any datatrove executor. Those that it depends on are checked, too.
        dry_run: remove no marker and restore nothing from a mirror.
        deals_out: for ``reshard``, which gives other tasks what those of an earlier number have left.

    Returns:
        For each marker that is removed, or would be, what is wrong with it.

    Raises:
        CheckpointMismatch: markers or checkpoints belong to another job, or do not fit each other.
        ConfigError: there is no task, or a step would get no documents.
    """
    check_step_order(executor.pipeline)
    if executor.world_size < 1:
        raise ConfigError(f"{type(executor).__name__}: tasks: must be at least 1; it is {executor.world_size}.")
    wrong: list[str] = []
    if (before := getattr(executor, "depends", None)) is not None:
        wrong += check_job(before, dry_run)
    for step in executor.pipeline:
        if not _is_runner(step):
            continue
        if step.checkpoints_local_dir is None:
            _check_tasks(executor)
        else:
            root = checkpoints_here(executor, step) or Path(step.checkpoints_local_dir)
            wrong += _check_step(executor, step, root, dry_run, deals_out)
            if not deals_out:
                _refuse_left_behind(root, executor.world_size)
    return wrong


def check_step_order(pipeline: Sequence[Any]) -> None:
    """Refuses an ``InferenceRunner`` without a step before it, and a step right after one that needs documents.

    The runner passes no documents on. As in datatrove, a step needs documents if ``data``, the first argument of its
    ``run``, has no default.

    Raises:
        ConfigError: naming the steps.
    """
    if pipeline and _is_runner(pipeline[0]) and not pipeline[0].retry_dead_letters:
        raise ConfigError(
            f"pipeline[0] {type(pipeline[0]).__name__} would get no documents: no step before it reads any. Put a "
            "reader before it."
        )
    for index, (before, step) in enumerate(pairwise(pipeline)):
        if _is_runner(before) and isinstance(step, PipelineStep) and _needs_documents(step):
            raise ConfigError(
                f"pipeline[{index + 1}] {type(step).__name__} would get no documents: pipeline[{index}] "
                f"{type(before).__name__} passes none on, it writes them with its output_writer. Put this step into a "
                "second executor, whose first step reads that output, and which has the first executor as its "
                "`depends`. (If it is a step of yours that needs no documents, give `data` in its run() a default.)"
            )


def _is_runner(step: object) -> bool:
    # Not isinstance of Step: in Python 3.11 that asks for checkpoints_root, which may exist on other nodes only.
    return hasattr(step, "retry_dead_letters")


def _needs_documents(step: PipelineStep) -> bool:
    first = next(iter(signature(step.run).parameters.values()), None)
    return first is not None and first.default is Parameter.empty and first.kind is not Parameter.VAR_POSITIONAL


def checkpoints_here(executor: Any, step: Step) -> Path | None:
    """``checkpoints_local_dir`` on this machine; None if its variables are set on the nodes of the tasks only.

    Raises:
        ConfigError: a variable in it is not set, and the tasks run here.
    """
    try:
        return step.checkpoints_root
    except ConfigError:
        if isinstance(executor, LocalPipelineExecutor):
            raise
        return None


def _local_ranks(executor: Any) -> range:
    """The ranks that this executor runs; the others belong to executors on other machines."""
    first = getattr(executor, "local_rank_offset", 0)
    return range(first, first + getattr(executor, "local_tasks", executor.world_size))


def _skipped(executor: Any) -> list[int]:
    """The ranks that datatrove will skip, because they have a completion marker."""
    ranks = _local_ranks(executor)
    incomplete = set(executor.get_incomplete_ranks(ranks))
    return [rank for rank in ranks if rank not in incomplete]


def _check_tasks(executor: Any) -> None:
    """Without a checkpoint, the file that datatrove writes at each start has the number of tasks."""
    if not _skipped(executor) or not executor.logging_dir.isfile("executor.json"):
        return
    with executor.logging_dir.open("executor.json") as file:
        tasks = json.load(file).get("world_size")
    if tasks != executor.world_size:
        raise CheckpointMismatch(
            f"{executor.logging_dir.resolve_paths('completions')} marks tasks of another run as complete:\n"
            f"  tasks: {tasks} -> {executor.world_size}\n"
            "Go on with the old number of tasks, or choose another logging_dir (and output) for the new one."
        )


def _check_step(executor: Any, step: Step, root: Path, dry_run: bool, deals_out: bool) -> list[str]:
    refuse_half_resharded(root)
    skipped = _skipped(executor)
    if not step.checkpoints_remote_dir:  # from there a rank may get what it lacks
        refuse_unfitting(root)
        for rank in _local_ranks(executor):
            check_not_headless(rank_folder(root, rank))
    with ExitStack() as stack:
        folder = root
        # Nodes of a cluster may keep their checkpoints on their own disks, with a mirror.
        if not isinstance(executor, LocalPipelineExecutor) and step.checkpoints_remote_dir and not root.exists():
            folder = Path(stack.enter_context(TemporaryDirectory()))
        missing = [rank for rank in skipped if not (rank_folder(folder, rank) / RUN).exists()]
        if step.checkpoints_remote_dir and missing and dry_run:
            skipped = [rank for rank in skipped if rank not in missing]
        elif step.checkpoints_remote_dir and not dry_run:
            _restore(step.checkpoints_remote_dir, folder, missing, executor.world_size)
        check = _Check(executor, step, root, folder, skipped)
        wrong = check.run()
    refuse_other_number(root, executor.world_size)
    if not deals_out and not (step.checkpoints_remote_dir and dry_run):
        refuse_lost_ranks(root)
    for rank, text in wrong.items():
        if not dry_run:
            logger.warning(f"{text} The marker is removed, so the task runs again.")
            executor.logging_dir.rm(f"completions/{rank:05d}")
    return list(wrong.values())


def _refuse_left_behind(root: Path, tasks: int) -> None:
    """Refuses a run if tasks of an earlier, larger number have something to do again, which no task would do."""
    folders = {rank: rank_folder(root, rank) for rank in sorted(retired_ranks(root))}
    left = [rank for rank, folder in folders.items() if (folder / RUN).exists() and not is_finished(folder)]
    if left:
        raise CheckpointMismatch(
            f"{root}: chunks of {name_tasks(left)} are to be made again, and since reshard there are only {tasks} "
            f"tasks. Deal them out: datatrove-ckpt reshard WHAT --tasks {tasks}, then run."
        )


def _restore(url: str, folder: Path, missing: list[int], tasks: int) -> None:
    """Restores these ranks, and what the mirror may have newer since ``reshard``: no task restores ranks of before.

    Raises:
        CheckpointMismatch: the mirror is that of an earlier number of tasks, or ranks do not fit ``shares.json``,
            or it is for another number of tasks.
    """
    with suppress(OSError):  # a rank that starts says it
        restore_shares(url, folder)
    refuse_lost_shares(folder)
    refuse_other_number(folder, tasks)
    here = folder.is_dir() and rank_numbers(folder)
    lost = [rank for rank, _ in lost_ranks(folder)] if here else sorted(retired_ranks(folder))
    older = [rank for rank, _ in older_ranks(folder)]
    with ThreadPoolExecutor(_MIRROR_THREADS) as pool:
        list(pool.map(partial(restore_rank, url, folder, retries=False), sorted({*missing, *lost, *older})))
    refuse_unfitting(folder)


@dataclass
class _Check:
    """The comparison for one step.

    Attributes:
        root: ``checkpoints_local_dir``, for messages.
        folder: where the checkpoints are read: ``root``, or what was restored from the mirror.
        skipped: the ranks that have a marker.
    """

    executor: Any
    step: Step
    root: Path
    folder: Path
    skipped: list[int]

    def run(self) -> dict[int, str]:
        """Returns what is wrong with markers that are to be removed, by rank."""
        tasks, ranks = self.executor.world_size, _local_ranks(self.executor)
        identity = self.step.identity(tasks)
        found = compare_job(self.folder, identity, None if len(ranks) == tasks else ranks, self._counts)
        if self.step.checkpoints_remote_dir:
            found.join(compare_mirrored_job(self.step.checkpoints_remote_dir, self.folder, identity, self._counts))
        empty = [rank for rank in self.skipped if rank in found.empty]
        self.skipped = [rank for rank in self.skipped if rank not in empty]
        if found.changes:
            self._refuse(found, identity, len(ranks))
        self._refuse_missing()
        wrong = {rank: self._explain(rank, "did nothing yet, and its settings have changed") for rank in empty}
        for rank in self.skipped:
            if not is_finished(rank_folder(self.folder, rank)):
                wrong[rank] = self._explain(rank, "is not finished")
        return wrong

    def _counts(self, change: Change) -> bool:
        """A retry takes dead letters with any settings, but each rank takes its own."""
        return not self.step.retry_dead_letters or change.field == "tasks"

    def _refuse(self, found: JobChanges, identity: RunIdentity, tasks: int) -> None:
        """Raises, unless the changes are accepted and there is a task that they can be applied to."""
        kept = [rank for rank in found.ranks if rank in self.skipped]
        finished = (
            f"Finished with the old settings: {name_tasks(kept)}. What is finished stays as it is." if kept else ""
        )
        may_mix = not found.is_layout and len(self.skipped) < tasks
        if self.step.accept_changes and may_mix:
            if finished:
                logger.warning(finished)
            return
        way_out = way_back(found.changes, identity, may_mix)
        if len(self.skipped) == tasks:
            way_out = f"All tasks are finished, so the new settings would change no output any more. {way_out}"
            letters = [rank_folder(self.folder, rank) / DEAD_LETTERS for rank in self.skipped]
            if any(path.exists() and path.stat().st_size for path in letters):
                way_out += " For the dead letters alone, --retry-dead-letters takes the new settings."
        elif finished:
            way_out = f"{finished} {way_out}"
        raise refusal(f"The checkpoints in {self.root} ({name_tasks(found.ranks)}) were", found.changes, way_out)

    def _refuse_missing(self) -> None:
        missing = [rank for rank in self.skipped if not (rank_folder(self.folder, rank) / RUN).exists()]
        if missing:
            markers = self.executor.logging_dir.resolve_paths("completions")
            them = "it" if len(missing) == 1 else "them"
            mirror = self.step.checkpoints_remote_dir
            holds = f"neither {self.root} nor {mirror} holds a" if mirror else f"{self.root} holds no"
            raise CheckpointMismatch(
                f"{markers} marks {name_tasks(missing)} as complete, but {holds} checkpoint of {them}, so nothing "
                "shows that the documents are in the output. If the checkpoints were moved or deleted, bring them "
                "back; if they are on another machine, run this command there. If the markers are of another job, "
                "choose another logging_dir. To process these tasks from the start, delete their markers "
                f"({markers}/{missing[0]:05d} ...) and output files."
            )

    def _explain(self, rank: int, why: str) -> str:
        marker = self.executor.logging_dir.resolve_paths(f"completions/{rank:05d}")
        return f"Task {rank} is marked as complete ({marker}), but its checkpoint {rank_folder(self.root, rank)} {why}."
