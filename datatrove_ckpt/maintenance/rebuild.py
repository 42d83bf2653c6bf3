"""Rebuilds a damaged commit log from the commits that it still proves: each whole line has a
checksum.

A commit is kept if redone chunks before it end where it starts. The next run processes the other
chunks again. Their dead letters are overwritten with spaces (see ``repair``). The damaged log is
copied first.
"""

from __future__ import annotations

from pathlib import Path

from datatrove_ckpt.checkpoint.commits import Commit, read_last_chunk, read_whole_commits
from datatrove_ckpt.checkpoint.ledger import RankLedger
from datatrove_ckpt.checkpoint.lines import explained
from datatrove_ckpt.errors import CheckpointError
from datatrove_ckpt.maintenance.redo import Redo


def plan_rebuild(rank: RankLedger) -> Redo | str:
    """Returns what to do with a rank whose log is damaged, or why nothing can be done."""
    try:
        whole = read_whole_commits(rank.commits_file)
        last = read_last_chunk(rank.last_chunk_file)
        per_chunk = rank.run.get("records_per_chunk") or 0
    except CheckpointError as error:
        return str(error)
    # In the order of writing: the size only grows, and only with dead letters.
    whole.sort(key=lambda commit: (commit.dead_letters_size, commit.counts.dead == 0))
    fitting = _fitting(whole, per_chunk)
    plan = Redo(
        rank, None, [commit for commit in whole if fitting.get(commit.chunk_index) is commit]
    )
    top = max([commit.chunk_index for commit in whole], default=-1)
    if last is not None:
        top = max(top, last)
    plan.lost = [index for index in range(top + 1) if index not in fitting]
    end = 0
    for commit in plan.kept:
        foreign = rank.count_dead_letters(end, commit.dead_letters_size) - commit.counts.dead
        if foreign < 0:
            return (
                f"dead letters of chunk {commit.chunk_index} are lost in "
                f"{rank.dead_letters_file}. Restore it."
            )
        if foreign:
            plan.letters.append((end, _end_of_letter(rank.dead_letters_file, end, foreign)))
        end = commit.dead_letters_size
    return plan


def _fitting(whole: list[Commit], per_chunk: int) -> dict[int, Commit]:
    """Returns the commits before the first misplaced commit, by chunk index."""
    found: dict[int, Commit] = {}
    for commit in whole:
        found.setdefault(commit.chunk_index, commit)
    kept: dict[int, Commit] = {}
    expected = ordinal = 0
    for index, commit in sorted(found.items()):
        if commit.first_ordinal != ordinal + (index - expected) * per_chunk:
            break
        kept[index] = commit
        expected = index + 1
        ordinal = commit.next_ordinal
    return kept


def _end_of_letter(path: Path, start: int, number: int) -> int:
    with explained("read", path), path.open("rb") as file:
        file.seek(start)
        for _ in range(number):
            file.readline()
        return file.tell()
