"""``shares.json``, by which ``reshard`` has dealt the input out, and whether the ranks beside it fit it.

People restore folders from older copies, and delete them. What one task has not committed may be another task's since,
so one folder of before ``reshard`` beside ``shares.json`` of after it would lose documents, or write them twice.

    found                                             because
    a rank is newer than shares.json                  nobody knows what each rank reads
    a rank is older than shares.json                  what it had not committed then may be other ranks' now
    another number of tasks starts                    nobody would read the shares of the others
    a rank that runs no more has no folder            no task reads its documents again, and nothing shows their output
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.layout import RUN, SHARES, rank_folder, rank_numbers
from datatrove_ckpt.checkpoint.shares import Shares, read_shares
from datatrove_ckpt.checkpoint.versions import RESHARDS
from datatrove_ckpt.errors import CheckpointError, CheckpointMismatch

_BY_DATATROVE = Shares(0, 0, "", {})


def _read_dealt(root: Path) -> Shares:
    return read_shares(root) or _BY_DATATROVE


def count_reshards(root: Path, rank: int, tasks: int | None = None) -> int:
    """How many times the input was dealt out anew; 0 if there is no ``shares.json``.

    Args:
        rank: the rank that starts.
        tasks: number of tasks of the run that starts it; None: it does not start.

    Raises:
        CheckpointCorrupt: it cannot be read.
        CheckpointMismatch: ranks have read shares of it, and it is missing or older; or this rank is older; or it is
            for another number of tasks.
    """
    dealt = _read_dealt(root)
    refuse_lost_shares(root, {*rank_numbers(root)[:1], rank})  # any rank that was there tells
    if tasks is not None:
        _refuse(_older(root, [rank], dealt))
        refuse_other_number(root, tasks)
    return dealt.round


def refuse_unfitting(root: Path) -> None:
    """Refuses ranks that are newer than ``shares.json``, or older, also those that run no more.

    Raises:
        CheckpointMismatch: it names the first one, and the ways out.
        CheckpointCorrupt: ``shares.json`` cannot be read.
    """
    refuse_lost_shares(root)
    _refuse(older_ranks(root))


def refuse_lost_shares(root: Path, ranks: Iterable[int] | None = None) -> None:
    """
    Args:
        ranks: look at these; None: at all.

    Raises:
        CheckpointMismatch: a rank has read a share of ``shares.json``, and the file is missing or older.
        CheckpointCorrupt: ``shares.json`` cannot be read.
    """
    number = _read_dealt(root).round
    if ranks is None:
        ranks = rank_numbers(root) if root.is_dir() else []
    for rank in ranks:
        path = rank_folder(root, rank) / RUN
        if (kept := _kept_number(path, number)) > number:
            raise CheckpointMismatch(
                f"{path} says that the input was dealt out anew by `datatrove-ckpt reshard` (number {kept}), but "
                f"{root / SHARES} {f'is older (number {number})' if number else 'is missing'}, so nobody knows what "
                "each rank reads. Bring the file back."
            )


def refuse_other_number(root: Path, tasks: int) -> None:
    """
    Raises:
        CheckpointMismatch: ``shares.json`` deals the input out to another number of tasks.
    """
    dealt = _read_dealt(root)
    if dealt.round and dealt.tasks != tasks:
        raise CheckpointMismatch(
            f"{root / SHARES} deals the input out to another number of tasks than this run has:\n"
            f"  tasks: {dealt.tasks} -> {tasks}\n"
            f"Go on with {dealt.tasks} tasks (--executor.tasks={dealt.tasks}). If the folder was restored from a copy "
            "of before `datatrove-ckpt reshard`, it must be the whole folder, without this file."
        )


def refuse_lost_ranks(root: Path) -> None:
    """
    Raises:
        CheckpointMismatch: a rank that runs no more has read something, and has no folder.
    """
    _refuse(lost_ranks(root))


def lost_ranks(root: Path) -> Iterator[tuple[int, str]]:
    """The ranks that run no more, have read something, and have no folder; with the message for each.

    Raises:
        CheckpointCorrupt: ``shares.json`` cannot be read.
    """
    dealt = _read_dealt(root)
    for rank, share in sorted(dealt.retired.items()):
        folder = rank_folder(root, rank)
        if share and not (folder / RUN).exists():
            yield (
                rank,
                f"{folder} is missing: it holds the commits of task {rank}, which `datatrove-ckpt reshard` has left "
                f"what it had finished. The {dealt.tasks} tasks of now do not read its documents again, so nothing "
                "would show that they are in the output. Bring the folder back, as it was after reshard. If it is "
                "gone for good, have its documents processed, and paid, again: move the output files of task "
                f"{rank} elsewhere, then datatrove-ckpt reshard WHAT --tasks {dealt.tasks}, then run.",
            )


def older_ranks(root: Path) -> Iterator[tuple[int, str]]:
    """The ranks that were restored from a copy of before ``reshard``, with the message for each.

    Raises:
        CheckpointCorrupt: ``shares.json`` cannot be read.
    """
    dealt = _read_dealt(root)
    return _older(root, rank_numbers(root) if dealt.round else [], dealt)


def retired_ranks(root: Path) -> set[int]:
    """The ranks of an earlier, larger number of tasks. Their folders hold what they had committed, and are finished.

    Raises:
        CheckpointCorrupt: ``shares.json`` cannot be read.
    """
    return {*_read_dealt(root).retired}


def ranks_with_documents(root: Path) -> set[int]:
    """Of the retired ranks, those that have read something, as a folder or a share says: no task reads that again.

    Raises:
        CheckpointCorrupt: ``shares.json`` cannot be read.
    """
    return {rank for rank, share in _read_dealt(root).retired.items() if share or rank_folder(root, rank).exists()}


def _refuse(found: Iterator[tuple[int, str]]) -> None:
    for _, text in found:
        raise CheckpointMismatch(text)


def _older(root: Path, ranks: list[int], dealt: Shares) -> Iterator[tuple[int, str]]:
    for rank in ranks:
        path = rank_folder(root, rank) / RUN
        if (kept := _kept_number(path, dealt.round)) < dealt.round:
            again = f"datatrove-ckpt reshard WHAT --tasks {dealt.tasks}, then run" if rank >= dealt.tasks else "run"
            yield (
                rank,
                f"{path.parent} is of before `datatrove-ckpt reshard` dealt the input out anew (number {dealt.round}; "
                f"this folder has {f'number {kept}' if kept else 'none'}): it was restored from an older copy. What "
                "was not committed then may be other tasks' now, so documents would be lost or there twice. Bring the "
                f"folder back as it was after reshard. If there is no such copy, move it and the output files of task "
                f"{rank} elsewhere, then {again}: its documents are processed, and paid, again.",
            )


def _kept_number(path: Path, otherwise: int) -> int:
    """How many times the input was dealt out anew, as a rank's ``run.json`` says, if it can be read."""
    if path.exists():
        with suppress(CheckpointError):  # who reads the rest of it says what is wrong with it
            return int(read_run(path).get(RESHARDS, 0))
    return otherwise
