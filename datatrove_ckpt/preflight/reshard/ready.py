"""What must be there, and what must be over, before what is left is dealt out."""

from __future__ import annotations

from pathlib import Path

from datatrove_ckpt.checkpoint.job import name_tasks
from datatrove_ckpt.checkpoint.layout import RUN, is_finished, last_chunk_file, rank_folder, rank_numbers, retry_folders
from datatrove_ckpt.checkpoint.resharding import unstarted_ranks
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError


def check_all_here(root: Path, tasks: int) -> None:
    """Checks that no task's folder is missing: its documents would be dealt out again.

    Raises:
        CheckpointMismatch: the last chunk of a task is named, or there is a retry of it, and it has no checkpoint.
    """
    retried = {rank for folder in retry_folders(root) for rank in rank_numbers(folder)}
    without = [rank for rank in range(tasks) if not (rank_folder(root, rank) / RUN).exists()]
    if missing := [rank for rank in without if rank in retried or last_chunk_file(root, rank).exists()]:
        raise CheckpointMismatch(
            f"{root} holds no checkpoint of {name_tasks(missing)}, and {last_chunk_file(root, missing[0]).parent} or a "
            "retry shows that there was one. Bring it back: reshard needs the folders of all tasks in one place. Where "
            "each node keeps its own, finish the run with the number of tasks that it has."
        )


def refuse_retried(root: Path, rank: int, tasks: int) -> None:
    """Refuses a task whose unfinished documents would move, if dead letters of it were retried: ``repair`` came after.

    A retry knows documents by task and number, so under another task it would not be known that they are delivered.

    Raises:
        CheckpointMismatch: it has; the message says what to do first.
    """
    retries = [folder.name for folder in retry_folders(root) if rank_folder(folder, rank).exists()]
    if retries:
        first = "run" if rank < tasks else f"reshard to {rank + 1} tasks or more, run"
        raise CheckpointMismatch(
            f"{rank_folder(root, rank)} has chunks that are to be made again, and {retries[0]} has delivered dead "
            f"letters of it, which another task would deliver again. First {first} to the end, then reshard."
        )


def check_fork(root: Path) -> None:
    if unstarted := unstarted_ranks(root):
        raise ConfigError(
            f"reshard: {root} is a fork, and {name_tasks(unstarted)} of it never started: what is kept for them holds "
            "for the number of tasks of the other run only. Start every task of it once, or make a new run."
        )


def check_retries(root: Path) -> None:
    for folder in retry_folders(root):
        for rank in rank_numbers(folder):
            if not is_finished(folder / f"{rank:05d}"):
                raise ConfigError(
                    f"reshard: the retry of dead letters in {folder / f'{rank:05d}'} is not finished. Finish it first, "
                    "with --retry-dead-letters."
                )
