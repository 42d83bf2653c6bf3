"""CheckpointManager: one rank's checkpoint, from its lock to its last commit.

Everything here is synchronous and returns at once: the storage thread writes, the publisher thread turns complete
journals into output files, and the caller (one event loop) learns of progress and failure through ``on_change``.

A chunk is closed when all its documents were read in this life and every one of them is in its journal. That is
decided in one place, on the caller's side, for chunks that are full, for the last one of the input, and for those
that an earlier life had finished without committing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import Commit, CommitLog, DocumentCounts, OutputFile
from datatrove_ckpt.checkpoint.identity import RunClaim, RunIdentity
from datatrove_ckpt.checkpoint.interval import Seconds
from datatrove_ckpt.checkpoint.journal import ChunkJournal, Finished
from datatrove_ckpt.checkpoint.layout import (
    CACHE,
    COMMITS,
    DEAD_LETTERS,
    LOCK,
    RETRY_INPUT,
    RUN,
    journal_path,
    last_chunk_file,
    rank_folder,
)
from datatrove_ckpt.checkpoint.publishing import Chunk, Publisher, WriteChunk
from datatrove_ckpt.checkpoint.recovery import ResumePoint, recover, write_last_chunk
from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey, CachedRequest, RequestCache
from datatrove_ckpt.checkpoint.snapshot import Mirror, NoMirror, Snapshot
from datatrove_ckpt.checkpoint.storage import MAX_BACKLOG_BYTES, Storage
from datatrove_ckpt.errors import CheckpointMismatch

# Chunks that wait to be published, beyond which admission waits: journals would pile up on the disk.
MAX_PUBLISHING = 4


@dataclass(slots=True)
class ChunkSlot:
    """A document that is to be processed. ``cached``: an earlier life left answers for it."""

    ordinal: int
    chunk_index: int
    cached: bool


class CheckpointManager:
    """The checkpoint of one rank. ``open`` it, ``admit`` each document in input order, ``finish`` it, ``close``.

    Args:
        root: ``checkpoints_local_dir``.
        identity: what makes two runs the same run, as plain JSON.
        write_chunk: steps 2 and 3, called in the publisher thread.
        retry_errors: forget cached permanent errors.
        accept_changes: go on with another identity, and record that.
        mirror: keeps a copy elsewhere.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        records_per_chunk: int,
        identity: RunIdentity,
        write_chunk: WriteChunk,
        *,
        sync_seconds: Seconds = 1.0,
        retry_errors: bool = False,
        accept_changes: bool = False,
        mirror: Mirror | None = None,
    ) -> None:
        self.root = root
        self.folder = rank_folder(root, rank)
        self.counts = DocumentCounts()
        self.error: BaseException | None = None
        self.resumed = ResumePoint()
        self._last_chunk_file = last_chunk_file(root, rank)
        self._records_per_chunk = records_per_chunk
        self._identity = identity
        self._write_chunk = write_chunk
        self._sync_seconds = sync_seconds
        self.on_change: Callable[[], None] = lambda: None
        """Called, in other threads, after progress and failure; must return at once."""
        self._retry_errors = retry_errors
        self._accept_changes = accept_changes
        self._mirror = mirror or NoMirror()
        self._journals: dict[int, ChunkJournal] = {}
        self._chunks: dict[int, Chunk] = {}
        self._current: Chunk | None = None
        self._next_chunk = 0
        self._next_ordinal = 0
        self._unbroken = 0
        self._closed = 0
        self._committed = 0

    # a life's beginning and end --------------------------------------------------------------------------------

    def open(self) -> ResumePoint:
        """Takes the lock, checks the identity, recovers, and starts the threads.

        Raises:
            CheckpointError: locked, made by another run, damaged, or refused by the disk.
        """
        files.disk.make_dirs(self.folder)
        files.disk.make_dirs(self._last_chunk_file.parent)
        finished = not (self.folder / LOCK).exists()  # a rank that ends removes it, too
        self._lock = files.Lock(self.folder / LOCK)
        with ExitStack() as undo:
            # A run that is refused leaves a finished rank finished.
            refused = undo.enter_context(ExitStack())
            refused.callback(self._lock.release, remove=finished)
            claim = RunClaim(self.folder, self._identity, self._accept_changes)
            refused.pop_all()
            undo.callback(self._lock.release)
            interrupted = (self.folder / CACHE).exists()  # a rank that ends removes it
            if self._lock.works and not claim.is_first:
                # SQLite has a lock of its own: whoever holds that one is left in peace, too.
                self._cache = RequestCache(self.folder / CACHE)
                undo.callback(self._cache.close)
                self._fence = claim.take()
            else:
                self._fence = claim.take()
                if not self._lock.works:
                    self._detach()
                self._cache = RequestCache(self.folder / CACHE)
                undo.callback(self._cache.close)
            self._log = CommitLog(self.folder / COMMITS)
            if self._retry_errors:
                self._cache.forget_errors()
            point = recover(self.folder, self._last_chunk_file, self._log, self._cache, self._records_per_chunk)
            self._dead_letters = files.AppendFile(self.folder / DEAD_LETTERS)
            undo.pop_all()
        point.interrupted = interrupted
        self.resumed = point
        self.counts.add(point.counts)
        self._next_chunk = self._unbroken = point.next_chunk
        self._next_ordinal = point.next_ordinal
        self._journals.update(point.journals)
        self._storage = Storage(
            self._cache,
            self._journal,
            self._sync_seconds,
            lambda: self.on_change(),
            self._fence.check,
            self._fence.explain,
            point.cached,
        )
        self._publisher = Publisher(self._write_chunk, self._fence, self._published, self.fail)
        self._storage.start()
        self._publisher.start()
        self._mirror.start(self)
        return point

    def _detach(self) -> None:
        """Without locks, an earlier owner may still have these files open, until it looks at the fence."""
        for path in sorted(self.folder.glob("chunk_*.jsonl")) + sorted(self.folder.glob(f"{CACHE}*")):
            files.disk.detach(path)
        files.disk.detach(self.folder / COMMITS)

    @property
    def has_locks(self) -> bool:
        """False: the file system has no locks, and only the fence keeps two processes apart."""
        return self._lock.works

    def close(self, completed: bool = False) -> None:
        """Writes down what was handed over, and lets go. ``completed``: every document of the input is committed.

        Does not raise what went wrong in the threads: see ``error``.
        """
        self._publisher.stop()
        self._storage.stop()
        self.error = self.error or self._storage.error
        self._mirror.stop(completed and self.error is None)
        completed = completed and self.error is None
        try:
            if completed:
                self._cache.remove()
            elif self._fence.lost:
                self._cache.abandon()
            else:
                self._cache.close()
        finally:
            files.disk.close(self.folder)
            self._lock.release(remove=completed)
        if completed:
            files.disk.sync_dir(self.folder)  # that the rank is finished survives power loss, too

    def fast_stop(self) -> None:
        """``close`` takes seconds at most for what is published and mirrored; called again, no time for either.

        May be called in a signal handler, so it takes no lock.
        """
        self._publisher.fast_stop()
        self._mirror.fast_stop()

    # the caller's side -----------------------------------------------------------------------------------------

    def admit(self, fingerprint: str, position: Callable[[], dict[str, Any] | None] = lambda: None) -> ChunkSlot | None:
        """The place of the next document of the input; None if it is done already.

        ``position`` gives the reader's state right after the document. It is called for the last one of a chunk, when
        that is committed, in the storage thread.

        Raises:
            CheckpointMismatch: an earlier life finished another document at this place.
        """
        chunk = self._current or self._open_chunk()
        ordinal = chunk.first_ordinal + chunk.read
        chunk.read += 1
        chunk.position, chunk.last_input = position, fingerprint
        committed = self.resumed.done.get(chunk.index)
        if committed is not None:
            self._pass_committed(chunk, committed)
            return None
        if chunk.read == chunk.capacity:
            self._fill(chunk)
        if chunk.journal is not None and (known := chunk.journal.recovered.pop(ordinal, None)) is not None:
            self._expect(known, fingerprint, ordinal)
            self._count_finished(chunk)
            return None
        cached = ordinal in self.resumed.cached
        self.resumed.cached.discard(ordinal)
        return ChunkSlot(ordinal, chunk.index, cached)

    def lookup(self, ordinal: int, receive: Callable[[dict[AnswerKey, Answer]], None]) -> None:
        """Reads a document's cached answers; ``receive`` is called in the storage thread."""
        self._storage.call(lambda: receive(self._cache.answers(ordinal)))

    def put_answer(self, place: ChunkSlot, doc_id: str, key: AnswerKey, answer: Answer) -> None:
        self._storage.put_answer(CachedRequest(place.chunk_index, place.ordinal, doc_id, key, answer))

    def finish(self, place: ChunkSlot, finished: Finished) -> None:
        """The document is done once its line is written; its chunk is closed if it was the last one missing."""
        self._storage.put_finished(place.chunk_index, finished)
        self._count_finished(self._chunks[place.chunk_index])

    def end_of_input(self) -> None:
        """No more documents: the last chunk is as full as it gets.

        Raises:
            CheckpointMismatch: earlier lives read more documents than there are now.
        """
        if self._has_more_than_the_input():
            raise CheckpointMismatch(
                f"The input ended after {self._admitted} documents, but {self.folder} holds finished documents "
                "beyond that: the input has shrunk. Restore it, or start with another checkpoints_local_dir."
            )
        if self._current is not None:
            self._fill(self._current)

    @property
    def _admitted(self) -> int:
        current = self._current
        return current.first_ordinal + current.read if current else self._next_ordinal

    def _has_more_than_the_input(self) -> bool:
        first_unread = self._next_chunk - 1 if self._current else self._next_chunk
        return (
            any(index >= first_unread for index in (*self.resumed.journals, *self.resumed.done))
            or any(chunk.journal and chunk.journal.recovered for chunk in list(self._chunks.values()))
            or any(ordinal >= self._admitted for ordinal in self.resumed.cached)
        )

    @property
    def congested(self) -> bool:
        """More was handed over than the disk takes; wait until ``on_change`` says otherwise."""
        return self._storage.backlog > MAX_BACKLOG_BYTES

    @property
    def publishing_behind(self) -> bool:
        """More chunks wait to be published than there should be: admit nothing; what is in work may go on."""
        return self.publishing > MAX_PUBLISHING

    @property
    def publishing(self) -> int:
        """Closed chunks that are not committed yet."""
        # Two counters, each written by one thread only, instead of one that would need a lock.
        return self._closed - self._committed

    @property
    def all_committed(self) -> bool:
        """After ``end_of_input``: nothing is left to do."""
        return not self._chunks

    def raise_failure(self) -> None:
        """Raises what went wrong in a thread, if anything did."""
        error = self.error or self._storage.error
        if error is not None:
            raise error

    def fail(self, error: BaseException) -> None:
        """Ends the run with what went wrong in another thread."""
        self.error = error
        self.on_change()

    def snapshot(self, since: int) -> Snapshot:
        """The checkpoint as it is now, with the answers put after number ``since``. Waits for the storage thread.

        Raises:
            Fenced: another process has taken the rank over.
        """
        return self._storage.ask(partial(self._snapshot, since))

    def _published(self, chunk: Chunk, output: list[OutputFile]) -> None:
        self._storage.call(partial(self._commit, chunk, output))

    def _open_chunk(self) -> Chunk:
        index, ordinal = self._next_chunk, self._next_ordinal
        # A chunk that ended an input which grew later is short, also when it must be made again (see ``repair``).
        next_committed = self.resumed.done.get(index + 1)
        capacity = next_committed.first_ordinal - ordinal if next_committed else self._records_per_chunk
        chunk = Chunk(index, ordinal, capacity, self.resumed.journals.pop(index, None))
        self._current = self._chunks[chunk.index] = chunk
        self._next_chunk += 1
        return chunk

    def _fill(self, chunk: Chunk) -> None:
        chunk.full = True
        self._current = None
        self._next_ordinal = chunk.first_ordinal + chunk.read
        self._close_if_complete(chunk)

    def _pass_committed(self, chunk: Chunk, committed: Commit) -> None:
        if chunk.read == committed.counts.read:
            self._expect(committed.last_input, chunk.last_input, committed.next_ordinal - 1)
            self._current = None
            self._next_ordinal = committed.next_ordinal
            del self._chunks[chunk.index]

    def _expect(self, known: str, fingerprint: str, ordinal: int) -> None:
        if known != fingerprint:
            raise CheckpointMismatch(
                f"Document {ordinal} of this rank is not the one that was finished there before (see {self.folder}): "
                "the input, or a step before this one, has changed. Restore it, or start with another "
                "checkpoints_local_dir."
            )

    def _count_finished(self, chunk: Chunk) -> None:
        chunk.finished += 1
        self._close_if_complete(chunk)

    def _close_if_complete(self, chunk: Chunk) -> None:
        if chunk.full and chunk.finished == chunk.read:
            self._closed += 1
            self._storage.call(partial(self._close_chunk, chunk))

    # the storage thread's side ---------------------------------------------------------------------------------

    def _journal(self, chunk_index: int) -> ChunkJournal:
        chunk = self._chunks[chunk_index]
        if chunk.journal is None:
            chunk.journal = ChunkJournal(journal_path(self.folder, chunk_index), chunk.first_ordinal)
            self._journals[chunk_index] = chunk.journal
        return chunk.journal

    def _snapshot(self, since: int) -> Snapshot:
        self._fence.check(thorough=True)
        sizes = {journal.path.name: journal.size for journal in self._journals.values()}
        sizes |= {COMMITS: self._log.size, DEAD_LETTERS: self._dead_letters.size}
        retried = self.folder / RETRY_INPUT
        if retried.exists():
            sizes[RETRY_INPUT] = retried.stat().st_size
        unfinished = frozenset(self._storage.unfinished)
        return Snapshot(
            run=(self.folder / RUN).read_bytes(),
            sizes={name: size for name, size in sizes.items() if size},
            unfinished=unfinished,
            answers=self._cache.answers_since(since, unfinished),
            last_answer=self._cache.last_answer,
        )

    def _close_chunk(self, chunk: Chunk) -> None:
        journal = self._journal(chunk.index)
        journal.sync()
        self._publisher.submit(chunk, journal)

    def _commit(self, chunk: Chunk, output: list[OutputFile]) -> None:
        self._fence.check(thorough=True)
        if chunk.dead_letters:
            self._dead_letters.append(b"".join(chunk.dead_letters))
            self._dead_letters.sync()
        self._log.append(
            Commit(
                chunk_index=chunk.index,
                first_ordinal=chunk.first_ordinal,
                counts=chunk.counts,
                files=output,
                position=chunk.position(),
                last_input=chunk.last_input,
                dead_letters_size=self._dead_letters.size,
            )
        )
        self._forget(chunk)
        self.counts.add(chunk.counts)
        self._committed += 1
        del self._chunks[chunk.index]

    def _forget(self, chunk: Chunk) -> None:
        before = self._unbroken
        while self._unbroken in self._log.commits:
            self._unbroken += 1
        if self._unbroken > before:
            write_last_chunk(self._last_chunk_file, self._unbroken - 1)
        journal = self._journal(chunk.index)
        journal.remove()
        del self._journals[chunk.index]
        self._storage.removed(journal)
        self._cache.drop_chunk(chunk.index)
