"""Rebuilds a damaged commit log from the commits that it still proves: each whole line has a checksum.

A commit is kept if the chunks before it, where they must be processed again, end where it starts. The other chunks are
processed again by the next run, which writes their output files again. Their dead letters are overwritten with spaces
(see ``repair``), because the redone chunks append them again.

The effects on one rank, after the first two of ``repair``. After a crash between them, ``repair`` or a run continues:

    1. overwrite lost dead letters with spaces
    2. correct run.json and last_chunk         they say how many commits there were
    3. copy the damaged log; replace commits.jsonl
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import Commit, count_unbroken, read_last_chunk, read_whole_commits
from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.lines import seal
from datatrove_ckpt.checkpoint.recovery import write_last_chunk
from datatrove_ckpt.errors import CheckpointError
from datatrove_ckpt.formatting import number_range, plural
from datatrove_ckpt.maintenance.inspect import RankFolder, name_place

_NAMED_ONE_BY_ONE = 20


@dataclass
class Rebuild:
    """What to make of a rank's damaged log. ``kept``: in the order of the lines. ``lost``: chunks to process again."""

    rank: RankFolder
    kept: list[Commit] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    letters: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of bytes in the dead letters file that belong to lost commits."""

    def describe(self) -> Iterator[str]:
        place = name_place(*self.rank.key)
        yield (
            f"{place}: rebuild {self.rank.commits_file} from the {plural(len(self.kept), 'commit')} that can be "
            "proved; all other chunks are processed again, and their requests are paid again"
        )
        if len(self.lost) > _NAMED_ONE_BY_ONE:
            yield f"{place}: mark chunks {number_range(self.lost[0], self.lost[-1] + 1)} as not done"
            return
        for index in self.lost:
            yield f"{name_place(*self.rank.key, index)}: mark it as not done"


def plan_rebuild(rank: RankFolder) -> Rebuild | str:
    """What to do with a rank whose log is damaged, or why nothing can be done."""
    try:
        whole = read_whole_commits(rank.commits_file)
        last = read_last_chunk(rank.last_chunk_file)
        per_chunk = rank.identity.get("records_per_chunk") or 0
    except CheckpointError as error:
        return str(error)
    # The order in which they were written: the size only grows, and only by a commit with dead letters.
    whole.sort(key=lambda commit: (commit.dead_letters_size, commit.counts.dead == 0))
    fitting = _fitting(whole, per_chunk)
    plan = Rebuild(rank, [commit for commit in whole if fitting.get(commit.chunk_index) is commit])
    top = max(-1 if last is None else last, *(commit.chunk_index for commit in whole), -1)
    plan.lost = [index for index in range(top + 1) if index not in fitting]
    end = 0
    for commit in plan.kept:
        foreign = rank.count_dead_letters(end, commit.dead_letters_size) - commit.counts.dead
        if foreign < 0:
            return (
                f"dead letters of chunk {commit.chunk_index} are lost in {rank.dead_letters_file}. Restore that file."
            )
        if foreign:
            plan.letters.append((end, _end_of_letter(rank, end, commit.dead_letters_size, foreign)))
        end = commit.dead_letters_size
    return plan


def _fitting(whole: list[Commit], per_chunk: int) -> dict[int, Commit]:
    """The commits that can be kept, by chunk index: those before the first one that does not start where it must."""
    found: dict[int, Commit] = {}
    for commit in whole:
        found.setdefault(commit.chunk_index, commit)
    kept: dict[int, Commit] = {}
    expected = ordinal = 0
    for index, commit in sorted(found.items()):
        if commit.first_ordinal != ordinal + (index - expected) * per_chunk:
            break
        kept[index] = commit
        expected, ordinal = index + 1, commit.next_ordinal
    return kept


def _end_of_letter(rank: RankFolder, start: int, end: int, number: int) -> int:
    """The offset after the ``number``-th dead letter between two offsets."""
    at = start
    for block in rank.dead_letters(start, end):
        if (lines := block.count(b"\n")) < number:
            number -= lines
            at += len(block)
            continue
        offset = -1
        for _ in range(number):
            offset = block.index(b"\n", offset + 1)
        return at + offset + 1
    return at


def replace_log(plan: Rebuild) -> None:
    """Step 3."""
    path = plan.rank.commits_file
    if path.exists():
        with explained("read", path):
            data = path.read_bytes()
        names = (path.with_name(f"{path.name}.damaged-{number}") for number in count(1))
        files.disk.replace(next(name for name in names if not name.exists()), data)
    files.disk.replace(path, b"".join(seal(commit.to_json()) for commit in plan.kept))


def correct_last_chunk(path: Path, commits: list[int]) -> None:
    """Writes what the file for people must name once these commits are all there are. Survives power loss."""
    if unbroken := count_unbroken(commits):
        files.disk.make_dirs(path.parent)
        write_last_chunk(path, unbroken - 1)
    elif path.exists():
        files.disk.remove(path)
        files.disk.sync_dir(path.parent)
