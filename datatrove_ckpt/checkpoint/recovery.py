"""What a restarted rank does before it reads a single document.

Committing a chunk takes five steps, each safe to repeat; a crash may come after any of them:

    1. sync the journal              all its documents are on disk
    2. write the output, by ordinal, from the journal, into staging; sync
    3. publish                       local: rename, sync the folder; remote: upload, check its size
    4. append the commit line; sync  <- the chunk is done from here on
    5. update last_chunk; delete the journal; delete the chunk's cache rows

    crash after    found on disk                  recovery
    1              journal                        write the output again
    2              journal, staged output         delete the staged file, write the output again
    3              journal, output                write the output again (same bytes)
    4              journal, output, commit        delete the journal and the cache rows
    5              output, commit                 nothing to do

Writing the output twice is harmless because its bytes depend on the journal only. The output of an uncommitted chunk
is written once the reader has come past its documents again and found them unchanged, never before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import Commit, CommitLog, DocumentCounts
from datatrove_ckpt.checkpoint.journal import ChunkJournal
from datatrove_ckpt.checkpoint.layout import DEAD_LETTERS, journal_indices, journal_path
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.checkpoint.request_cache import RequestCache


@dataclass(slots=True)
class ResumePoint:
    """Where a rank goes on.

    The reader goes on at ``next_ordinal``, or, if it can seek, at ``position``. ``milestones`` are the fingerprints
    of the last document of each chunk of the unbroken run, by ordinal: what a reader that counts can check.
    ``done`` are the chunks that were committed beyond the unbroken run.
    """

    next_chunk: int = 0
    next_ordinal: int = 0
    position: Json | None = None
    milestones: dict[int, str] = field(default_factory=dict)
    done: dict[int, Commit] = field(default_factory=dict)
    journals: dict[int, ChunkJournal] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    counts: DocumentCounts = field(default_factory=DocumentCounts)
    dead_letters_size: int = 0
    dead: int = 0
    """Dead letters of earlier lives, committed or not."""
    interrupted: bool = False
    """An earlier life did not come to its end, so there is something left to do."""

    @property
    def is_fresh(self) -> bool:
        """Nothing was done before."""
        return not (self.next_chunk or self.done or self.journals or self.cached)


def recover(folder: Path, last_chunk: Path, log: CommitLog, cache: RequestCache, records_per_chunk: int) -> ResumePoint:
    """Mends what a crash left behind, and says where to go on.

    Args:
        folder: the rank's folder. ``last_chunk``: the file for people. ``log`` and ``cache``: this rank's, open.

    Raises:
        CheckpointCorrupt: a file holds what no crash can have left there.
    """
    point = _resume_point(log)
    _finish_commits(folder, last_chunk, log, cache, point)
    for chunk_index, first_ordinal in _uncommitted(folder, point, records_per_chunk):
        point.journals[chunk_index] = ChunkJournal(journal_path(folder, chunk_index), first_ordinal)
    point.dead = point.counts.dead + sum(journal.recovered_dead for journal in point.journals.values())
    point.cached = cache.ordinals()
    for journal in point.journals.values():
        point.cached.difference_update(journal.recovered)
    return point


def write_last_chunk(path: Path, chunk_index: int) -> None:
    """For people and other tools; recovery does not depend on it."""
    files.disk.replace(path, b"%d\n" % chunk_index)


def _resume_point(log: CommitLog) -> ResumePoint:
    point = ResumePoint()
    for commit in log.unbroken():
        point.next_chunk = commit.chunk_index + 1
        point.next_ordinal = commit.next_ordinal
        point.position = commit.position
        point.milestones[commit.next_ordinal - 1] = commit.last_input
    for commit in log.commits.values():
        point.counts.add(commit.counts)
        point.dead_letters_size = commit.dead_letters_size
        if commit.chunk_index >= point.next_chunk:
            point.done[commit.chunk_index] = commit
    return point


def _finish_commits(folder: Path, last_chunk: Path, log: CommitLog, cache: RequestCache, point: ResumePoint) -> None:
    """Step 5 for every chunk whose life ended between steps 4 and 5, and dead letters of commits that never came."""
    for chunk_index in journal_indices(folder):
        if chunk_index in log.commits:
            files.disk.remove(journal_path(folder, chunk_index))
    for chunk_index in cache.chunks() & log.commits.keys():
        cache.drop_chunk(chunk_index)
    if point.next_chunk and _read_last_chunk(last_chunk) != point.next_chunk - 1:
        write_last_chunk(last_chunk, point.next_chunk - 1)
    dead_letters = folder / DEAD_LETTERS
    if dead_letters.exists() and dead_letters.stat().st_size > point.dead_letters_size:
        files.disk.truncate(dead_letters, point.dead_letters_size)


def _read_last_chunk(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _uncommitted(folder: Path, point: ResumePoint, records_per_chunk: int) -> Iterator[tuple[int, int]]:
    """The journals to go on with, and the ordinal each of their chunks starts at."""
    waiting = [chunk_index for chunk_index in journal_indices(folder) if chunk_index not in point.done]
    chunk_index, ordinal = point.next_chunk, point.next_ordinal
    while waiting:
        if chunk_index == waiting[0]:
            yield waiting.pop(0), ordinal
        done, following = point.done.get(chunk_index), point.done.get(chunk_index + 1)
        end = following.first_ordinal if following else ordinal + records_per_chunk
        ordinal = done.next_ordinal if done else end
        chunk_index += 1
