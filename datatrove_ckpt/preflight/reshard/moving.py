"""Moves what ranks that there will be no more have not committed: their documents, and what is kept of these.

A document that moves gets the next numbers of its new rank, right after what that one has touched. Its line of a
journal, and its answers, are written anew with this number. What such a rank has committed stays in its folder. If
chunks were committed out of order, their commits are written anew without the gaps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import Commit, DocumentCounts, read_commits
from datatrove_ckpt.checkpoint.journal import Finished, read_finished
from datatrove_ckpt.checkpoint.layout import CACHE, COMMITS, journal_path, rank_folder
from datatrove_ckpt.checkpoint.lines import seal
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.checkpoint.resharding import Staging
from datatrove_ckpt.checkpoint.shares import Part, Place
from datatrove_ckpt.preflight.reshard.scan import RankInput
from datatrove_ckpt.readers.inputs import between

_HERE = Path()
_START = Place(0, ())
_NUMBER = re.compile(rb'^\{"ordinal":[0-9]+')


@dataclass
class Moved:
    """What a rank gets of others.

    Attributes:
        first: the number of the first document that it gets.
        parts: what it reads after what it has touched.
        files: what is staged for it.
        documents, finished, answers: how many of them.
    """

    rank: RankInput
    records_per_chunk: int
    first: int = 0
    parts: list[Part] = field(default_factory=list)
    documents: int = 0
    finished: int = 0
    answers: int = 0
    files: set[str] = field(default_factory=set)

    def chunk(self, ordinal: int) -> tuple[int, int]:
        """The index and the first ordinal of the chunk that a document belongs to."""
        index, first = self.rank.point.next_chunk, self.rank.point.next_ordinal
        for end in self.rank.point.chunk_ends(self.records_per_chunk):
            if ordinal < end:
                return index, first
            index, first = index + 1, end
        raise AssertionError


def runs_of(ordinals: list[int]) -> Iterator[tuple[int, int]]:
    """First and last number of each unbroken run of ascending numbers."""
    ends = [index for index, (here, there) in enumerate(pairwise(ordinals)) if there != here + 1]
    starts = [0, *(index + 1 for index in ends)]
    for start, end in zip(starts, [*ends, len(ordinals) - 1], strict=True):
        if ordinals:
            yield ordinals[start], ordinals[end]


def move(source: RankInput, target: Moved, staging: Staging) -> None:
    """Stages what a rank has not committed as its target's."""
    open_ordinals = source.open_ordinals()
    numbers = {old: target.first + target.documents + count for count, old in enumerate(open_ordinals)}
    for first, last in runs_of(open_ordinals):
        target.parts += between(source.parts, source.place_after(first - 1), source.place_after(last))
    target.documents += len(numbers)
    _move_journals(source, target, numbers, staging)
    _move_answers(source, target, numbers, staging)


def _move_journals(source: RankInput, target: Moved, numbers: dict[int, int], staging: Staging) -> None:
    for index in source.point.journals:
        for _, finished in read_finished(journal_path(source.folder, index), {}):
            if finished is not None:
                moved = _renumbered(finished, numbers[finished.ordinal])
                chunk, _ = target.chunk(moved.ordinal)
                name = journal_path(rank_folder(_HERE, target.rank.rank), chunk).as_posix()
                path = staging.file(name)
                if name not in target.files:
                    target.files.add(name)
                    own = journal_path(target.rank.folder, chunk)
                    files.disk.replace(path, own.read_bytes() if own.exists() else b"")
                files.disk.append(path, moved.to_line())
                target.finished += 1


def _renumbered(finished: Finished, ordinal: int) -> Finished:
    document = finished.document
    if finished.outcome == "dead":  # a retry finds a letter by its number
        document = _NUMBER.sub(b'{"ordinal":%d' % ordinal, document)
    return replace(finished, ordinal=ordinal, document=document)


def _move_answers(source: RankInput, target: Moved, numbers: dict[int, int], staging: Staging) -> None:
    cached = sorted(source.point.cached)
    if not cached:
        return
    cache = RequestCache(source.folder / CACHE)
    try:
        rows = cache.answers_since(0, cached)
    finally:
        cache.close()
    moved = [
        row._replace(ordinal=numbers[row.ordinal], chunk_index=target.chunk(numbers[row.ordinal])[0]) for row in rows
    ]
    staged = RequestCache(staging.file((rank_folder(_HERE, target.rank.rank) / CACHE).as_posix()))
    try:
        staged.put(moved)
    finally:
        staged.close()
    target.answers += len(moved)


def close_gaps(source: RankInput, staging: Staging) -> list[str]:
    """Stages the commits of a rank without the documents that have moved. Returns the names of the staged files."""
    if not source.point.done:
        return []
    commits = read_commits(source.folder / COMMITS)
    last = list(commits.values())[-1]
    ordinal, text = 0, ""
    lines: dict[int, Commit] = {}
    for index in range(max(commits) + 1):
        commit = commits.get(index)
        if commit is None:
            commit = Commit(index, ordinal, DocumentCounts(), last_input=text)
        elif index >= source.point.next_chunk:  # what comes before it in the share is another part now
            commit = replace(commit, first_ordinal=ordinal, position=None)
        lines[index] = commit
        ordinal, text = commit.next_ordinal, commit.last_input
    ordered = [lines.pop(index) for index in commits] + [
        replace(commit, dead_letters_size=last.dead_letters_size, at=last.at, seconds=last.seconds)
        for commit in lines.values()
    ]
    name = f"{source.folder.name}/{COMMITS}"
    staging.write(name, b"".join(seal(commit.to_json()) for commit in ordered))
    return [name]


def kept_share(source: RankInput) -> list[Part]:
    """What a rank has committed, as parts of its input."""
    point = source.point
    parts = between(source.parts, _START, source.places[0]) if point.next_ordinal else []
    for first, last in runs_of(source.committed):
        parts += between(source.parts, source.place_after(first - 1), source.place_after(last))
    return parts
