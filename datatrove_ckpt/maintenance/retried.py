"""Compares the retries of dead letters with the letters that they took.

A retry takes a letter for good. While the chunk of its document is done, the letter must be there: else the chunk was
processed again without it (older versions did so after ``repair``), and the document is in the output twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint.commits import Commit, read_commits
from datatrove_ckpt.checkpoint.layout import COMMITS, DEAD_LETTERS, RETRY_INPUT, rank_folder, retry_number
from datatrove_ckpt.errors import CheckpointCorrupt

Attempt = tuple[int, int]
"""A document's ordinal, and the attempt at it that failed, counted from 1."""


@dataclass(frozen=True)
class Twice:
    """A document that a chunk has delivered, and a retry as well. ``root``: the chunk's retry, or ""."""

    root: str
    chunk_index: int
    ordinal: int
    retry: str

    @property
    def what(self) -> str:
        return (
            f"{self.retry} took document {self.ordinal} as a dead letter of this chunk, which does not count it as "
            "one: it is in the output twice."
        )


@dataclass
class _Folder:
    """One rank, or one retry of it. ``taken``: the letters that a retry processes, by their numbers."""

    root: str
    commits: dict[int, Commit]
    letters: set[Attempt]
    taken: dict[Attempt, int]

    @property
    def is_counted(self) -> bool:
        """Else letters are missing or damaged, which is a problem of its own and proves nothing here."""
        return len(self.letters) == sum(commit.counts.dead for commit in self.commits.values())

    def chunk_of(self, index: int) -> int | None:
        """The committed chunk of the document that has this number in the folder's input."""
        for commit in self.commits.values():
            if commit.first_ordinal <= index < commit.next_ordinal:
                return commit.chunk_index
        return None


def delivered_twice(checkpoints: Path, rank: int, retries: Iterable[Path]) -> Iterator[Twice]:
    """The documents of a rank that a retry has taken although their chunk does not count them as dead letters.

    Args:
        retries: ``retry_folders(checkpoints)``.

    Raises:
        CommitsDamaged: commits are damaged.
        CheckpointCorrupt: the input of a retry is.
    """
    retries = [path for path in retries if retry_number(path.name) is not None]
    retries = [path for path in retries if (rank_folder(path, rank) / RETRY_INPUT).exists()]
    if not retries:
        return
    folders = [_read(root, rank, "" if root == checkpoints else root.name) for root in (checkpoints, *retries)]
    for taker in folders:
        for ordinal, attempts in taker.taken:
            # The letter of a second attempt was written by the retry that took the letter of the first one.
            for source in folders:
                index = _index(source, (ordinal, attempts - 1))
                chunk_index = None if index is None else source.chunk_of(index)
                if chunk_index is not None and source.is_counted and (ordinal, attempts) not in source.letters:
                    yield Twice(source.root, chunk_index, ordinal, taker.root)


def _index(source: _Folder, attempt: Attempt) -> int | None:
    """The number of the document in the source's input, if the source processed it after this failed attempt."""
    if not source.root:
        return attempt[0] if attempt[1] == 0 else None
    return source.taken.get(attempt)


def _read(root: Path, rank: int, name: str) -> _Folder:
    folder = rank_folder(root, rank)
    commits = read_commits(folder / COMMITS)
    end = max((commit.dead_letters_size for commit in commits.values()), default=0)
    letters = _attempts(folder / DEAD_LETTERS, end)
    taken = _attempts(folder / RETRY_INPUT) if name else ()
    return _Folder(name, commits, set(letters), {attempt: index for index, attempt in enumerate(taken)})


def _attempts(path: Path, end: int | None = None) -> Iterator[Attempt]:
    """The attempts that the letters of a file name, up to an offset in bytes."""
    if not path.exists():
        return
    with path.open("rb") as file:
        at = 0
        for number, line in enumerate(file, 1):
            if end is not None and at >= end:
                return
            at += len(line)
            if not line.strip():
                continue  # overwritten by ``repair``
            try:
                letter = orjson.loads(line)
                yield letter["ordinal"], letter["attempts"]
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                if end is None:
                    raise CheckpointCorrupt(
                        f"{path}, line {number}: this is no dead letter. Restore the file from a copy."
                    ) from error
