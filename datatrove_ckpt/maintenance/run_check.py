"""Compares the output folder with the checkpoints of all ranks, before a job starts and after it has ended.

datatrove skips ranks that are complete, so they do not look at their own files again. A rank that runs does.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.commits import CommitsDamaged, repair_command
from datatrove_ckpt.checkpoint.layout import RUN, is_finished, rank_folder, rank_numbers
from datatrove_ckpt.errors import OutputFailed, OutputMismatch
from datatrove_ckpt.maintenance.inspect import name_place
from datatrove_ckpt.maintenance.retried import delivered_twice
from datatrove_ckpt.output.committed import OutputCheck, RankCommits
from datatrove_ckpt.remote_errors import failure_text


def check_output_of_run(
    writer: DiskWriter, checkpoints: Path, logging_dir: str, tasks: int, first_starts: Iterable[int] = ()
) -> None:
    """Lists the output folder once.

    Args:
        logging_dir: the executor's.
        tasks: number of tasks of the job.
        first_starts: ranks that will start for the first time, if they have no checkpoint.

    Raises:
        OutputMismatch: committed files are missing or changed, or files are there that no checkpoint knows.
        OutputFailed: the folder cannot be listed.
        CommitsDamaged: commits of a rank are lost or damaged, see ``checkpoint/completeness.py``.
    """
    check = OutputCheck(writer, checkpoints, logging_dir)
    numbers = rank_numbers(checkpoints) if checkpoints.is_dir() else []
    try:
        commits = {rank: RankCommits(checkpoints, rank) for rank in numbers}  # all, before any file is called unknown
    except CommitsDamaged as error:
        raise CommitsDamaged(error.path, error.what, logging_dir) from None
    try:
        found = check.look(commits.values())
    except OSError as error:
        raise OutputFailed(
            f"{check.where} cannot be listed: {failure_text(error)}. Correct that and run the same command again."
        ) from error
    check.refuse_shared(commits.values())
    check.refuse_lost(commits.values(), found)
    for rank in numbers:
        _refuse_twice(check, checkpoints, rank, logging_dir)
    for rank in first_starts:
        if not (rank_folder(checkpoints, rank) / RUN).exists():
            check.refuse_existing(commits.get(rank) or RankCommits(checkpoints, rank), found)
    for rank_commits in commits.values():
        if is_finished(rank_commits.folder):
            check.refuse_unknown(rank_commits, found)
    check.refuse_other_ranks(found, tasks)


def _refuse_twice(check: OutputCheck, checkpoints: Path, rank: int, logging_dir: str) -> None:
    if (twice := next(delivered_twice(checkpoints, rank), None)) is not None:
        raise OutputMismatch(
            f"{check.where}: {name_place(twice.root, rank, twice.chunk_index)}: {twice.what} To have the chunk made "
            f"again without it: {repair_command(checkpoints, logging_dir)}, then run the same command again"
            f"{', with --retry-dead-letters' if twice.root else ''}."
        )
