"""``check_job``: what is compared before any task of a job starts.

datatrove skips every task that has a completion marker in ``logging_dir``, so a finished task never looks at its own
checkpoint again. Whoever runs an executor calls ``check_job`` first, which looks at finished tasks as well.

    marker   checkpoint of the rank      what happens
    any      of another run              refused, see ``checkpoint/job.py``
    yes      none                        refused: nothing shows that the rank's documents are in the output
    yes      not finished                the marker is removed, so that the rank runs
    yes      of another run, but empty   the marker is removed, so that the rank runs with the new settings
    yes      finished                    the rank is skipped
    no       of this run, or none        the rank runs
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from datatrove.executor import LocalPipelineExecutor
from loguru import logger

from datatrove_ckpt.checkpoint.identity import Change, RunIdentity, refusal, way_back
from datatrove_ckpt.checkpoint.job import JobChanges, compare_job, some_ranks
from datatrove_ckpt.checkpoint.layout import RUN, is_finished, journal_indices, rank_folder
from datatrove_ckpt.errors import CheckpointMismatch


@runtime_checkable
class CheckpointedStep(Protocol):
    """An ``InferenceRunner``, which stands above this room."""

    checkpoints_local_dir: str | None
    accept_changes: bool
    retry_dead_letters: bool

    def identity(self, world_size: int) -> RunIdentity: ...


def check_job(executor: Any) -> None:
    """Compares a job with what its folders hold from earlier runs. Starts nothing.

    Args:
        executor: any datatrove executor. Those that it depends on are checked, too.

    Raises:
        CheckpointMismatch: markers or checkpoints belong to another job, or do not fit each other.
    """
    if (before := getattr(executor, "depends", None)) is not None:
        check_job(before)
    for step in executor.pipeline:
        if isinstance(step, CheckpointedStep) and step.checkpoints_local_dir is not None:
            _check_step(executor, step, Path(step.checkpoints_local_dir).absolute())


def _check_step(executor: Any, step: CheckpointedStep, root: Path) -> None:
    ranks, skipped = _local_ranks(executor), _skipped(executor)
    if _is_elsewhere(executor, root) and len(skipped) < len(ranks):
        logger.warning(f"{root} is not on this machine, so earlier runs are compared only when the tasks start.")
        return
    identity = step.identity(executor.world_size)
    # A retry takes dead letters with any settings, but each from its own rank.
    counts = (lambda change: change.field == "tasks") if step.retry_dead_letters else _any
    found = compare_job(root, identity, None if len(ranks) == executor.world_size else ranks, counts)
    empty = [rank for rank in skipped if rank in found.empty]
    skipped = [rank for rank in skipped if rank not in empty]
    if found.changes:
        _refuse_changes(root, step, identity, found, skipped, len(ranks))
    for rank in empty:
        _remove_marker(executor, rank, f"it did nothing yet, and its settings have changed ({rank_folder(root, rank)})")
    _check_markers(executor, root, skipped)


def _any(change: Change) -> bool:
    return True


def _refuse_changes(
    root: Path, step: CheckpointedStep, identity: RunIdentity, found: JobChanges, skipped: list[int], tasks: int
) -> None:
    """Raises, unless the changes are accepted and there is a task that they can be applied to."""
    finished = some_ranks([rank for rank in found.ranks if rank in skipped])
    may_mix = not found.is_layout and len(skipped) < tasks
    if step.accept_changes and may_mix:
        if finished:
            logger.warning(f"Task {finished} is finished with the old settings: its output stays as it is.")
        return
    way_out = way_back(found.changes, identity, may_mix)
    if len(skipped) == tasks:
        way_out = f"All tasks are finished, so the new settings would change no output any more. {way_out}"
    elif finished:
        way_out = f"Task {finished} is finished: its output stays as it is. {way_out}"
    raise refusal(f"The checkpoints in {root} (task {some_ranks(found.ranks)}) were", found.changes, way_out)


def _local_ranks(executor: Any) -> range:
    """The ranks that this executor runs; the others belong to executors on other machines."""
    first = getattr(executor, "local_rank_offset", 0)
    return range(first, first + getattr(executor, "local_tasks", executor.world_size))


def _skipped(executor: Any) -> list[int]:
    ranks = _local_ranks(executor)
    incomplete = set(executor.get_incomplete_ranks(ranks))
    return [rank for rank in ranks if rank not in incomplete]


def _is_elsewhere(executor: Any, root: Path) -> bool:
    """Tasks that run on other machines may keep their checkpoints on disks of those."""
    return not isinstance(executor, LocalPipelineExecutor) and not root.exists()


def _check_markers(executor: Any, root: Path, skipped: Iterable[int]) -> None:
    missing = [rank for rank in skipped if not (rank_folder(root, rank) / RUN).exists()]
    if missing:
        markers = executor.logging_dir.resolve_paths("completions")
        raise CheckpointMismatch(
            f"{markers} marks task {some_ranks(missing)} as complete, but {root} holds no checkpoint of "
            f"{'it' if len(missing) == 1 else 'them'}, so nothing shows that the documents are in the output. If the "
            "checkpoints were moved or deleted, bring them back. If the markers are of another job, choose another "
            f"logging_dir. To process {'this task' if len(missing) == 1 else 'these tasks'} from the start, delete the "
            f"markers ({markers}/{missing[0]:05d} ...) and the output files."
        )
    for rank in skipped:
        folder = rank_folder(root, rank)
        if not is_finished(folder) or journal_indices(folder):
            _remove_marker(executor, rank, f"{folder} is not finished")


def _remove_marker(executor: Any, rank: int, why: str) -> None:
    name = f"completions/{rank:05d}"
    logger.warning(
        f"Task {rank} runs again although {executor.logging_dir.resolve_paths(name)} marks it as complete: {why}."
    )
    executor.logging_dir.rm(name)
