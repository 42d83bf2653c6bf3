"""Recovers a rank: completes a commit that a crash interrupted, and finds where to resume.

Committing a chunk takes five steps, each safe to repeat; a crash may come after any of them:

    1. sync the journal              all its documents are on disk
    2. write the output, by ordinal, from the journal, into staging; sync
    3. publish                       local: link, sync the folder; remote: upload, check its size
    4. append the dead letters; sync; append the commit line; sync  <- the chunk is done
    5. update last_chunk; delete the journal; delete the chunk's cache rows

    crash after    found on disk                  recovery
    1              journal                        write the output again
    2              journal, staged output         delete the staged file, write the output again
    3              journal, output                write the output again (same bytes)
    4              journal, output, commit        delete the journal and the cache rows
    5              output, commit                 nothing to do

Writing the output twice is harmless, because its bytes depend on the journal only. It is written
only after the reader has read the chunk's documents again, unchanged.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import Json, size_of
from datatrove_ckpt.checkpoint.commits import (
    MAX_GAP,
    Commit,
    CommitLog,
    read_last_chunk,
    sum_commits,
)
from datatrove_ckpt.checkpoint.journal import ChunkJournal
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.common.counts import CompletedWork, DocumentCounts
from datatrove_ckpt.errors import CheckpointCorrupt


@dataclass(slots=True)
class ResumePoint:
    """The point at which a rank resumes, and the work that is done beyond this point.

    Attributes:
        next_chunk, next_ordinal: the first chunk after the unbroken run of commits, and its first
            document.
        milestones: fingerprints of the last document of each chunk of the unbroken run, by ordinal.
        last_cached: the highest ordinal of the unfinished documents that have answers; -1: none.
    """

    next_chunk: int = 0
    next_ordinal: int = 0
    position: Json | None = None
    milestones: dict[int, str] = field(default_factory=dict)
    done: dict[int, Commit] = field(default_factory=dict)
    journals: dict[int, ChunkJournal] = field(default_factory=dict)
    last_cached: int = -1
    answers: int = 0
    committed: CompletedWork = CompletedWork()
    finished: DocumentCounts = DocumentCounts()
    interrupted: bool = False

    def chunk_ends(self, records_per_chunk: int) -> Iterator[int]:
        return chunk_ends(self.done, records_per_chunk, self.next_chunk, self.next_ordinal)

    @property
    def is_fresh(self) -> bool:
        return not (self.next_chunk or self.done or self.journals or self.answers)


def recover(
    folder: Path, log: CommitLog, cache: RequestCache, records_per_chunk: int
) -> ResumePoint:
    point = _resume_point(log)
    _finish_commits(folder, log, cache, point)
    for chunk_index, first_ordinal, end in uncommitted_journals(
        folder, log.commits, records_per_chunk
    ):
        journal = ChunkJournal(layout.journal_path(folder, chunk_index), first_ordinal, end)
        if journal.file.size:
            point.journals[chunk_index] = journal
            point.finished += journal.done.counts
        else:
            journal.remove()  # a kill came before its first line was written
    finished = set[int]()
    seconds = point.committed.seconds
    for journal in point.journals.values():
        seconds = seconds.or_later(journal.seconds)
        finished.update(journal.recovered)
    point.committed = replace(point.committed, seconds=seconds)
    # One by one: with provider batches, a million documents may have answers.
    for ordinal, number in cache.answer_counts():
        if ordinal not in finished:
            point.last_cached = max(point.last_cached, ordinal)
            point.answers += number
    return point


def write_last_chunk(path: Path, chunk_index: int) -> None:
    """Writes last_chunk for people and other tools. Recovery does not need it."""
    files.disk.replace(path, b"%d\n" % chunk_index, files.PUBLIC_FILE)


def _resume_point(log: CommitLog) -> ResumePoint:
    point = ResumePoint()
    for commit in log.unbroken():
        point.next_chunk = commit.chunk_index + 1
        point.next_ordinal = commit.next_ordinal
        point.position = commit.position
        point.milestones[commit.next_ordinal - 1] = commit.last_input
    point.committed = sum_commits(log.commits.values())
    point.finished = point.committed.counts
    point.done = {
        index: commit for index, commit in log.commits.items() if index >= point.next_chunk
    }
    return point


def _finish_commits(folder: Path, log: CommitLog, cache: RequestCache, point: ResumePoint) -> None:
    """Does step 5 after a crash between steps 4 and 5, and cuts off dead letters of uncommitted
    chunks.
    """
    for chunk_index in layout.journal_indices(folder):
        if chunk_index in log.commits:
            files.disk.remove(layout.journal_path(folder, chunk_index))
    for chunk_index in cache.chunks() & log.commits.keys():
        cache.drop_chunk(chunk_index)
    if point.next_chunk and read_last_chunk(layout.last_chunk_of(folder)) != point.next_chunk - 1:
        write_last_chunk(layout.last_chunk_of(folder), point.next_chunk - 1)
    dead_letters = folder / layout.DEAD_LETTERS
    size = max((commit.dead_letters_size for commit in log.commits.values()), default=0)
    if size_of(dead_letters) > size:
        files.disk.truncate(dead_letters, size)


def chunk_ends(
    done: Mapping[int, Commit], records_per_chunk: int, index: int = 0, ordinal: int = 0
) -> Iterator[int]:
    while True:
        following = done.get(index + 1)
        # A chunk at the end of an input that grew later is short, also when redone (see
        # ``repair``).
        if index in done:
            ordinal = done[index].next_ordinal
        elif following:
            ordinal = following.first_ordinal
        else:
            ordinal += records_per_chunk
        yield ordinal
        index += 1


def uncommitted_journals(
    folder: Path, commits: dict[int, Commit], records_per_chunk: int
) -> Iterator[tuple[int, int, int]]:
    journals = [index for index in layout.journal_indices(folder) if index not in commits]
    last = max(journals, default=-1)
    if last - len(commits) > MAX_GAP:
        raise CheckpointCorrupt(
            layout.journal_path(folder, last),
            " is the journal of a chunk that this run has not begun. Move it out of the task's "
            "folder.",
        )
    first = 0
    ends = chunk_ends(commits, records_per_chunk)
    for chunk_index, end in zip(range(last + 1), ends, strict=False):
        if chunk_index in journals:
            yield chunk_index, first, end
        first = end
