"""Compares the output folder with the checkpoints of all ranks, before a job starts and after it has ended.

datatrove skips ranks that are complete, so they do not look at their own files again. A rank that runs does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.commits import CommitsDamaged, repair_command
from datatrove_ckpt.checkpoint.dealt_out import lost_ranks, retired_ranks
from datatrove_ckpt.checkpoint.layout import (
    NOTHING_PUBLISHED,
    OTHERS_FILES,
    RUN,
    is_finished,
    rank_folder,
    rank_numbers,
    retry_folders,
)
from datatrove_ckpt.errors import OutputFailed, OutputMismatch
from datatrove_ckpt.maintenance.inspect import name_place
from datatrove_ckpt.maintenance.retried import delivered_twice
from datatrove_ckpt.output.committed import OutputCheck, RankCommits, committed_files
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_access import hub_folder_of, is_missing_repository, repository_is_gone
from datatrove_ckpt.output.hub_commits import ANSWER_SECONDS, HubUploads, looks_for
from datatrove_ckpt.output.listing import FoundFiles
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.retrying import failure_line


def check_output_of_run(
    writer: DiskWriter,
    checkpoints: Path,
    logging_dir: str,
    tasks: int,
    first_starts: Iterable[int] = (),
    patience_seconds: float | None = None,
) -> int:
    """Lists the output folder once. Returns the number of committed files, all of which are there.

    Args:
        logging_dir: the executor's.
        tasks: number of tasks of the job.
        first_starts: ranks that will start for the first time, if they have no checkpoint.
        patience_seconds: how long a hub that does not answer is asked; None: as long as ranks ask it.

    Raises:
        OutputMismatch: committed files are missing or changed, files are there that no checkpoint knows, or the
            repository on the hub is gone.
        OutputFailed: the folder cannot be listed.
        CommitsDamaged: commits of a rank are lost or damaged, see ``checkpoint/completeness.py``.
    """
    check = OutputCheck(writer, checkpoints, logging_dir)
    numbers = rank_numbers(checkpoints) if checkpoints.is_dir() else []
    retries = retry_folders(checkpoints)
    try:
        commits = {
            rank: RankCommits(checkpoints, rank, retries) for rank in numbers
        }  # all, before any file is called unknown
    except CommitsDamaged as error:
        raise CommitsDamaged(error.path, error.what, logging_dir) from None
    found = _look(check, commits.values(), patience_seconds)
    check.refuse_shared(commits.values())
    check.refuse_lost(commits.values(), found)
    for rank in numbers:
        _refuse_twice(check, checkpoints, rank, retries, logging_dir)
    for rank in first_starts:
        if not (rank_folder(checkpoints, rank) / RUN).exists():
            check.refuse_existing(commits.get(rank) or RankCommits(checkpoints, rank, retries), found)
    for rank_commits in commits.values():
        if is_finished(rank_commits.folder):
            check.refuse_unknown(rank_commits, found)
        elif (rank_commits.folder / RUN).exists() and not (rank_commits.folder / OTHERS_FILES).exists():
            # It may run elsewhere. If it has published nothing even now, it had not when the folder was listed.
            check.refuse_strangers(rank_commits, found, not (rank_commits.folder / NOTHING_PUBLISHED).exists())
    _refuse_other_ranks(check, checkpoints, found, tasks)
    return sum(len(rank_commits.files) for rank_commits in commits.values())


def _look(check: OutputCheck, commits: Collection[RankCommits], patience_seconds: float | None) -> FoundFiles:
    """
    Raises:
        OutputMismatch: the repository is gone, with files that were committed.
        OutputFailed: the folder cannot be listed.
    """
    if (hub := hub_folder_of(check.writer)) is not None:
        return _look_at_hub(hub, check, commits, patience_seconds)
    try:
        return StoppableCalls().run(lambda: check.look(commits), ANSWER_SECONDS)
    except OSError as error:
        raise OutputFailed(
            f"{check.where} cannot be listed: {failure_line(error)}. Correct that and run the same command again."
        ) from error


def _look_at_hub(
    hub: HubFolder, check: OutputCheck, commits: Collection[RankCommits], patience_seconds: float | None
) -> FoundFiles:
    uploads = HubUploads(hub, StoppableCalls())
    try:
        found = uploads.looked("cannot be listed", lambda: check.look(commits), patience_seconds)
    except OutputFailed as error:
        if not is_missing_repository(error.__cause__):
            raise
        if number := committed_files(check.writer, check.root):
            raise OutputMismatch(repository_is_gone(hub, number)) from error
        return FoundFiles({})  # where it is needed, ``check_access`` asks for it
    lost = [one.file for each in commits for one in each.files if not found.is_right(one.file)]
    found.show(uploads.look_again(lost, looks_for(each.folder for each in commits)))
    return found


def _refuse_other_ranks(check: OutputCheck, checkpoints: Path, found: FoundFiles, tasks: int) -> None:
    """Refuses files of ranks that the job does not have, and that no commits stand for."""
    for rank, text in lost_ranks(checkpoints):  # they may be all that is left of its documents
        if found.by_rank[rank]:
            raise OutputMismatch(text)
    check.refuse_other_ranks(found, tasks, retired_ranks(checkpoints))


def _refuse_twice(check: OutputCheck, checkpoints: Path, rank: int, retries: list[Path], logging_dir: str) -> None:
    if (twice := next(delivered_twice(checkpoints, rank, retries), None)) is not None:
        raise OutputMismatch(
            f"{check.where}: {name_place(twice.root, rank, twice.chunk_index)}: {twice.what} To have the chunk made "
            f"again without it: {repair_command(checkpoints, logging_dir)}, then run the same command again"
            f"{', with --retry-dead-letters' if twice.root else ''}."
        )
