"""RankFiles holds the open files of one rank. The storage thread makes all writes to journals,
request cache and commit log in order, so no lock guards these files.

The event loop submits items and never waits on a disk. The thread writes its whole queue as one
group: one SQLite transaction and one write per journal, so groups grow when the disk is slow. A
completed write survives kill -9. Syncs run at most every ``sync_seconds``; a commit also syncs its
files. Grouping on the event loop's side was no faster (measured), and needs a timer.
"""

import os
import queue
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint import files, history, layout
from datatrove_ckpt.checkpoint.batch_log import BatchLog, ParkedRequest
from datatrove_ckpt.checkpoint.checksummed_lines import SHARD_VERSION, Json, checksummed_json
from datatrove_ckpt.checkpoint.chunks import Chunk, ChunkSlot
from datatrove_ckpt.checkpoint.clock import RankClock, unix_seconds
from datatrove_ckpt.checkpoint.commits import Commit, CommitLog
from datatrove_ckpt.checkpoint.fence import Fence
from datatrove_ckpt.checkpoint.interval import Interval
from datatrove_ckpt.checkpoint.journal import ChunkJournal, FinishedDocument
from datatrove_ckpt.checkpoint.recovery import ResumePoint, write_last_chunk
from datatrove_ckpt.checkpoint.request_cache import (
    AnswerKey,
    CachedAnswer,
    CachedRequest,
    RequestCache,
)
from datatrove_ckpt.checkpoint.run_limits import PaidFile, RunTotals, read_paid
from datatrove_ckpt.common.counts import DocumentCounts, WorkCounts
from datatrove_ckpt.common.threads import context_thread
from datatrove_ckpt.process.shutdown import get_within
from datatrove_ckpt.process.slurm_job import job_id

# A snapshot copies nothing but new rows of the request cache. A file of a checkpoint only grows
# until it is removed, so its size at the instant marks the bytes that belong to the snapshot, to be
# read later.


@dataclass(slots=True)
class Snapshot:
    """The state of the checkpoint at one instant of the storage thread, for a copy of it.

    Attributes:
        run: the content of ``run.json``.
        sizes: bytes of each other file that belong to the snapshot, by file name.
        unfinished: ordinals of the unfinished documents that have answers.
        answers: answers of these documents that were put after the answer numbered ``since``.
        last_answer: number of the last answer so far.
    """

    run: bytes
    sizes: dict[str, int]
    unfinished: frozenset[int] = frozenset()
    answers: list[CachedRequest] = field(default_factory=list)
    last_answer: int = 0

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Describes the files in a rank's folder. No other thread or process may write to them."""
        paths = [path for path in folder.iterdir() if layout.is_mirrored(path.name)]
        sizes = {path.name: size for path in paths if (size := path.stat().st_size)}
        return cls((folder / layout.RUN).read_bytes(), sizes)

    def with_answers(
        self, cache: RequestCache, since: int = 0, journals: Iterable[ChunkJournal] = ()
    ) -> Self:
        """Adds the answers that were put after number ``since``, except of journals' documents."""
        unfinished = frozenset(ordinal for ordinal, _ in cache.answer_counts())
        unfinished = unfinished.difference(*(journal.ordinals for journal in journals))
        answers = cache.answers_since(since, unfinished)
        return replace(self, unfinished=unfinished, answers=answers, last_answer=cache.last_answer)


@dataclass(eq=False)
class RankFiles:
    """The open files of one rank: journals, request cache, commit log and dead letters.

    Methods belong to the storage thread; before its start and after its end, to the thread that
    opens and closes the checkpoint. Other threads may read ``counts``, ``committed`` and
    ``last_old``. Methods that write raise ``Fenced`` if another process has taken the rank over.

    Args:
        cache, log: the rank's request cache and commit log, open and recovered.
        point: result of the recovery.
        old: the answers of an old run and of samples, see ``old_answers``.
        run: digest of the run's identity.
        keeps_paid: whether the cost is written with each group of answers, for the run's limits.
    """

    folder: Path
    cache: RequestCache
    log: CommitLog
    fence: Fence
    interval: Interval
    point: ResumePoint
    old: RequestCache | None = None
    run: str = ""
    keeps_paid: bool = False

    def __post_init__(self) -> None:
        point = self.point
        self.done = point.committed
        """Work that all attempts of the rank committed. ``committed`` grows after it."""
        self.finished = point.finished
        """The documents that all attempts finished, in commits and in journals."""
        self.own = WorkCounts()
        """Work of this attempt. Other rooms add to it, on the event loop."""
        self.clock = RankClock(point.committed.seconds)
        self.committed = 0
        """Number of chunks that this process committed."""
        self.last_old = -1
        """The highest ordinal that has answers of an old run."""
        if self.old is not None:
            self.last_old, _ = next(self.old.answer_counts(), (-1, 0))
        self._journals = dict(point.journals)
        self.batches = BatchLog(self.folder, self.fence, self.run)
        self._dead_letters = files.AppendFile(self.folder / layout.DEAD_LETTERS)
        self._history = history.HistoryLog(self.folder / layout.HISTORY, self.fence.number)
        # A kill cuts off the history's last seconds, and none of this file.
        earlier = self._history.earlier
        earlier.total = read_paid(self.folder / layout.PAID).at_least_in(earlier.total)
        self._paid = [PaidFile(self.folder / layout.PAID)] if self.keeps_paid else []
        self._unbroken = point.next_chunk
        self._dirty: dict[Path, ChunkJournal] = {}
        self._next_sync = 0.0
        self._shard_written = False

    def close(self, completed: bool) -> None:
        try:
            for file in self._paid:
                file.close()
            if completed:
                files.disk.remove(self.folder / layout.PAID)
                self.cache.remove()
            elif self.fence.lost:
                self.cache.abandon()
            else:
                self.cache.close()
        finally:
            if self.old is not None:
                self.old.close()
            files.disk.close(self.folder)

    # answers and documents -----------------------------------------------------------------------

    def write(
        self, answers: list[CachedRequest], documents: Mapping[Chunk, list[FinishedDocument]]
    ) -> None:
        """Writes one group: one SQLite transaction, and one write per journal."""
        self.fence.check()
        self._plan_sync()
        if answers:
            for file in self._paid:
                file.write(self.paid())
            self.cache.put(answers)
        for chunk, group in documents.items():
            journal = self._journal(chunk)
            group[0].seconds = self.clock.now()
            journal.append(group)
            self._dirty[journal.path] = journal
            self.finished += DocumentCounts.of([finished.took for finished in group])

    def write_batch(self, answers: list[CachedRequest]) -> None:
        """Writes answers of a batch, to requests of documents that are not read yet."""
        self.write(answers, {})
        for row in answers:
            self.point.last_cached = max(self.point.last_cached, row.ordinal)

    def paid(self, written: int = 0) -> RunTotals:
        """Returns the cost of all attempts until now. Any thread may call this."""
        return RunTotals.of(self._history.earlier.total, written) + RunTotals.of(self.own)

    def take_answers(self, slot: ChunkSlot) -> dict[AnswerKey, CachedAnswer]:
        """Returns a document's cached answers. Answers of an old run become answers of this run."""
        answers = self.cache.answers(slot.ordinal)
        if self.old is None:
            return answers
        rows = [row for row in self.old.answers_since(0, [slot.ordinal]) if row.key not in answers]
        self.write([row._replace(chunk_index=slot.chunk.index) for row in rows], {})
        return answers | {row.key: row.answer for row in rows}

    @property
    def seconds_to_sync(self) -> float | None:
        if (
            not self._dirty
            and not self.cache.log.is_unsynced
            and not self._history.file.is_unsynced
        ):
            return None
        return max(0.0, self._next_sync - time.monotonic())

    def _plan_sync(self) -> None:
        if self.seconds_to_sync is None:
            self._next_sync = time.monotonic() + self.interval.seconds

    def sync(self) -> None:
        if self.seconds_to_sync is None:
            return
        start = time.monotonic()
        for journal in self._dirty.values():
            journal.file.sync()
        self._dirty.clear()
        self.cache.sync()
        self._history.file.sync()
        self.interval.took(time.monotonic() - start)

    def _journal(self, chunk: Chunk) -> ChunkJournal:
        journal = self._journals.get(chunk.index)
        if journal is None:
            path = layout.journal_path(self.folder, chunk.index)
            journal = self._journals[chunk.index] = ChunkJournal(path, chunk.first_ordinal)
        return journal

    # chunks --------------------------------------------------------------------------------------

    def synced_journal(self, chunk: Chunk) -> ChunkJournal:
        """Does step 1 of a commit, and returns the complete chunk's journal for steps 2 and 3."""
        journal = self._journal(chunk)
        journal.file.sync()
        return journal

    def commit(self, chunk: Chunk) -> None:
        """Steps 4 and 5: appends the commit line, then drops the journal and the answers."""
        self.fence.check(thorough=True)
        if chunk.dead_letters:
            self._dead_letters.append(bytes(chunk.dead_letters))
            self._dead_letters.sync()
        seconds = self.clock.now()
        commit = Commit(
            chunk_index=chunk.index,
            first_ordinal=chunk.first_ordinal,
            counts=chunk.done.counts,
            files=chunk.files,
            position=chunk.position(),
            last_input=chunk.last_input,
            dead_letters_size=self._dead_letters.size,
            work=chunk.done.work.fields(),
            seconds=seconds,
            at=unix_seconds(),
        )
        self.log.append(commit)
        self._forget(chunk)
        self.done = replace(self.done + chunk.done, seconds=seconds)
        # Must come last: the event loop may now consider the rank finished.
        self.committed += 1

    def _forget(self, chunk: Chunk) -> None:
        before = self._unbroken
        while self._unbroken in self.log.commits:
            self._unbroken += 1
        if self._unbroken > before:
            write_last_chunk(layout.last_chunk_of(self.folder), self._unbroken - 1)
        journal = self._journal(chunk)
        journal.remove()
        del self._journals[chunk.index]
        self._dirty.pop(journal.path, None)
        self.cache.drop_chunk(chunk.index)

    def write_shard(self, shard: Json) -> None:
        """Writes ``shard.json``, which describes the input that the rank has read."""
        self.fence.check(thorough=True)
        data = checksummed_json({"version": SHARD_VERSION, **shard}, indent=False)
        files.disk.replace(self.folder / layout.SHARD, data)
        self._shard_written = True

    # history -------------------------------------------------------------------------------------

    def start_history(self) -> None:
        start = history.AttemptStart(
            host=socket.gethostname(), pid=os.getpid(), job=job_id(), v=__version__
        )
        self.note([start, history.ProgressRecord()])

    def note(self, records: Sequence[history.Record]) -> None:
        """Appends to the history, with the time and the documents of all attempts."""
        self.fence.check(thorough=True)
        is_done = any(
            isinstance(record, history.AttemptEnd) and record.why == "done" for record in records
        )
        for record in records:
            record.at = record.at or unix_seconds()
            if isinstance(record, history.ProgressRecord):
                self.fill_in(record, is_done)
        self._plan_sync()
        self._history.append(records)

    def fill_in(self, progress: history.ProgressRecord, is_done: bool = False) -> None:
        """Sets the fields that come from the rank's files. If another thread calls this, they may
        be from slightly different moments.

        An attempt that has read nothing yet has its predecessor's position.
        """
        progress.total = self._history.earlier.total + progress.own
        progress.skipped = progress.skipped or self._history.earlier.skipped
        if progress.position.unit is not None:
            position = progress.position
        else:
            position = self._history.earlier.position
        if is_done and position.total is not None:
            position = position._replace(done=position.total)
        progress.position = position
        progress.seconds = self.clock.now()
        progress.documents = self.finished
        progress.chunks = len(self.log.commits)

    # the mirror ----------------------------------------------------------------------------------

    def snapshot(self, since: int) -> Snapshot:
        """Describes the checkpoint at this instant, with the answers put after number ``since``."""
        self.fence.check(thorough=True)
        snapshot = Snapshot.of(self.folder)
        # Not earlier: files of a snapshot only grow, and this file is replaced once.
        if not self._shard_written:
            snapshot.sizes.pop(layout.SHARD, None)
        return snapshot.with_answers(self.cache, since, self._journals.values())


T = TypeVar("T")

# Beyond this many unwritten bytes admission waits, so a slow disk does not fill the memory.
MAX_BACKLOG_BYTES = 64 * 2**20
# Keeps a group's transaction short: a lookup behind it is answered in milliseconds.
MAX_GROUP = 2000

_Item = FinishedDocument | CachedRequest | ParkedRequest
"""A finished document, an answer, or a request for a batch."""
_Queued = tuple[int, Chunk | None, _Item] | Callable[[], object] | None
"""An item, with the bytes submitted so far. None ends the thread."""


class StorageThread:
    """Writes items and runs functions, in order, in its own thread.

    Args:
        rank_files: files that only this thread uses until ``stop`` returns.
    """

    def __init__(self, rank_files: RankFiles) -> None:
        self.error: BaseException | None = None
        """The error that ended the thread. Once set, it stays."""
        self._files = rank_files
        self._queue: queue.SimpleQueue[_Queued] = queue.SimpleQueue()
        # Two counters with one writer each need no lock.
        self._submitted_bytes = 0  # event loop
        self._written_bytes = 0  # storage thread
        self._thread = context_thread(self._run, "datatrove-ckpt storage")

    # event loop ----------------------------------------------------------------------------------

    @property
    def backlog_bytes(self) -> int:
        return self._submitted_bytes - self._written_bytes

    def put(self, item: _Item, size: int, chunk: Chunk | None = None) -> None:
        """Submits an item whose JSON has ``size`` bytes; a finished document with its ``chunk``."""
        if self.error is not None:
            raise self.error
        self._submitted_bytes += 500 + size  # and a few objects (measured)
        self._queue.put((self._submitted_bytes, chunk, item))

    def stop(self) -> None:
        """Writes and syncs all submitted items, and ends the thread. Sets ``error`` instead of
        raising it.
        """
        self._queue.put(None)
        self._thread.join()

    # any thread ----------------------------------------------------------------------------------

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        if self.error is not None:
            raise self.error
        self._queue.put(partial(function, *arguments))

    def ask(self, function: Callable[..., T], *arguments: object) -> T:
        """Runs ``function`` like ``call`` and returns its result. Blocks: not for the event loop.

        Once the storage thread has ended, ``function`` runs in the calling thread.
        """
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # for the caller, not for this thread
                future.set_exception(error)

        self._queue.put(answer)
        while not wait([future], timeout=0.05).done:
            if not self._thread.is_alive() and not future.done():
                return function(*arguments)
        return future.result()

    # storage thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._work():
                pass
            self._files.sync()
        except BaseException as error:  # every failure here must reach the event loop
            self.error = self._files.fence.explain(error)

    def _work(self) -> bool:
        answers: list[CachedRequest] = []
        documents: dict[Chunk, list[FinishedDocument]] = defaultdict(list)
        submitted = self._written_bytes
        for item in self._take():
            if not isinstance(item, tuple):
                self._write(answers, documents, submitted)
                answers.clear()
                documents.clear()
                if item is None:
                    return False
                item()
                continue
            submitted, chunk, written = item
            if isinstance(written, CachedRequest):
                answers.append(written)
            elif isinstance(written, FinishedDocument):
                assert chunk is not None
                documents[chunk].append(written)
            else:
                self._files.batches.park(written)
        self._write(answers, documents, submitted)
        if self._files.seconds_to_sync == 0:
            self._files.sync()
        return True

    def _take(self) -> list[_Queued]:
        """Waits for items and returns them; returns no item if a sync is due first."""
        items = []
        with suppress(queue.Empty):
            items.append(get_within(self._queue, self._files.seconds_to_sync))
            while len(items) < MAX_GROUP:
                items.append(self._queue.get_nowait())
        return items

    def _write(
        self,
        answers: list[CachedRequest],
        documents: dict[Chunk, list[FinishedDocument]],
        submitted_bytes: int,
    ) -> None:
        if answers or documents:
            self._files.write(answers, documents)
        self._written_bytes = submitted_bytes
