"""``check_job``: what is compared before any task of a job starts.

datatrove skips every task that has a completion marker in ``logging_dir``, so a finished task never looks at its own
checkpoint again. Whoever runs an executor calls ``check_job`` first, which looks at finished tasks as well.

    marker   checkpoint of the rank    what happens
    yes      none                      refused: nothing shows that the rank's documents are in the output
    yes      not finished              the marker is removed, so that the rank runs
    yes      finished                  the rank is skipped
    no       any                       the rank runs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from datatrove.executor import LocalPipelineExecutor
from loguru import logger

from datatrove_ckpt.checkpoint.identity import RunIdentity
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
    skipped = _skipped(executor)
    if _is_elsewhere(executor, root) and len(skipped) < executor.world_size:
        logger.warning(f"{root} is not on this machine, so earlier runs are compared only when the tasks start.")
        return
    _check_markers(executor, root, skipped)


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
            f"{markers} marks task {_some(missing)} as complete, but {root} holds no checkpoint of "
            f"{'it' if len(missing) == 1 else 'them'}, so nothing shows that the documents are in the output. If the "
            "checkpoints were moved or deleted, bring them back. If the markers are of another job, choose another "
            f"logging_dir. To process {'this task' if len(missing) == 1 else 'these tasks'} from the start, delete the "
            f"markers ({markers}/{missing[0]:05d} ...) and the output files."
        )
    for rank in _unfinished(root, skipped):
        logger.warning(
            f"Task {rank} is marked as complete in {executor.logging_dir.resolve_paths('completions')}, but "
            f"{rank_folder(root, rank)} is not finished. The marker is removed, and the task runs."
        )
        executor.logging_dir.rm(f"completions/{rank:05d}")


def _unfinished(root: Path, ranks: Iterable[int]) -> Iterator[int]:
    for rank in ranks:
        folder = rank_folder(root, rank)
        if not is_finished(folder) or journal_indices(folder):
            yield rank


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:5]))
    return shown if len(ranks) <= 5 else f"{shown}, ... ({len(ranks)} in all)"
