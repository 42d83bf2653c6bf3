"""OpenCheckpoint is the event loop's side of a rank's checkpoint, RankFiles the storage thread's.

The storage thread makes all writes to journals, request cache and commit log in order, so no lock
guards these files, and commits. It writes its whole queue as one group: one SQLite transaction and
one write per journal. A completed write survives kill -9. Syncs run at most every
``sync_seconds``; a commit also syncs its files.

The publisher thread turns complete journals into output files (steps 2 and 3 of a
commit); publishing may take minutes (gzip, uploads).
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar

from loguru import logger

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.batch_log import BatchLog, ParkedRequest
from datatrove_ckpt.checkpoint.checksummed_lines import SHARD_VERSION, Json, checksummed_json
from datatrove_ckpt.checkpoint.chunks import (
    Chunk,
    ChunkSlot,
    ChunkTracker,
    PositionGetter,
    no_position,
)
from datatrove_ckpt.checkpoint.clock import RankClock, unix_seconds
from datatrove_ckpt.checkpoint.commits import Commit, CommitLog, OutputFile
from datatrove_ckpt.checkpoint.fence import Fence, RunClaim
from datatrove_ckpt.checkpoint.history import (
    AttemptEnd,
    AttemptStart,
    HistoryLog,
    ProgressRecord,
    Record,
)
from datatrove_ckpt.checkpoint.identity import RunIdentity
from datatrove_ckpt.checkpoint.interval import SYNC_TUNING, Interval
from datatrove_ckpt.checkpoint.job_file import join_job
from datatrove_ckpt.checkpoint.journal import ChunkJournal, FinishedDocument, WrittenDocument
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.checkpoint.publish_intents import Placement, PublicationStopped, WaitingChunk
from datatrove_ckpt.checkpoint.rank_summary import (
    Include,
    RankSummary,
    read_rank,
    scan_complete_commits,
)
from datatrove_ckpt.checkpoint.recovery import ResumePoint, recover, write_last_chunk
from datatrove_ckpt.checkpoint.request_cache import (
    AnswerKey,
    CachedAnswer,
    CachedRequest,
    RequestCache,
)
from datatrove_ckpt.checkpoint.run_limits import PaidFile, RunTotals, read_paid
from datatrove_ckpt.common.counts import CompletedWork, WorkCounts
from datatrove_ckpt.common.formatting import byte_size, plural
from datatrove_ckpt.common.setting_types import IntervalSeconds as SecondsOrAuto
from datatrove_ckpt.common.threads import context_thread
from datatrove_ckpt.errors import CheckpointCorrupt, CkptError
from datatrove_ckpt.process.shutdown import Shutdown, get_within
from datatrove_ckpt.process.slurm_job import job_id

_CHECK_SECONDS = 1.0


class DiskSpace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_check = 0.0
        self._is_low = False

    def holds_up(self, waiting: int) -> bool:
        now = time.monotonic()
        if waiting <= MAX_PUBLISHING:
            self._is_low = False
        elif now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            was_low = self._is_low
            free = free_bytes(self._folder)
            reserve = reserve_bytes(self._folder)
            # Else the run would alternate every second.
            self._is_low = free < reserve * (1.1 if was_low else 1.0)
            if self._is_low and not was_low:
                logger.warning(
                    f"{self._folder}: only {byte_size(free)} of the reserve of "
                    f"{byte_size(reserve)} are free, and {plural(waiting, 'chunk')} wait for the "
                    "hub. No document is started until space is free."
                )
        return self._is_low


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def reserve_bytes(folder: Path) -> int:
    """Returns the free space below which a disk is nearly full: a twentieth, and at most 10 GiB. It
    is at least 64 MiB, for SQLite's log, and at most half of the disk.
    """
    status = os.statvfs(folder)
    disk = status.f_blocks * status.f_frsize
    return min(max(64 * 2**20, min(10 * 2**30, disk // 20)), disk // 2)


# A snapshot copies only new rows of the request cache: files only grow until they are removed, so a
# size marks the bytes that belong to the snapshot.


@dataclass(slots=True)
class Snapshot:
    """The state of the checkpoint at one instant of the storage thread. ``sizes``:
    bytes by file.
    """

    run: bytes
    sizes: dict[str, int]
    unfinished: frozenset[int] = frozenset()
    answers: list[CachedRequest] = field(default_factory=list)
    last_answer: int = 0

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Describes a rank's folder, to which no other thread or process may write."""
        paths = [path for path in folder.iterdir() if layout.is_mirrored(path.name)]
        sizes = {path.name: size for path in paths if (size := path.stat().st_size)}
        return cls((folder / layout.RUN).read_bytes(), sizes)

    def with_answers(
        self, cache: RequestCache, since: int = 0, journals: Iterable[ChunkJournal] = ()
    ) -> Self:
        unfinished = frozenset(ordinal for ordinal, _ in cache.answer_counts())
        unfinished = unfinished.difference(*(journal.ordinals for journal in journals))
        answers = cache.answers_since(since, unfinished)
        return replace(self, unfinished=unfinished, answers=answers, last_answer=cache.last_answer)


# Counting a chunk of 100,000 at once would hold the GIL for 100 ms.
_COUNTED_AT_ONCE = 1000


@dataclass(eq=False)
class RankFiles:
    """The open files of one rank: journals, request cache, commit log and dead letters.

    Methods belong to the storage thread; before its start and after its end, to the thread that
    opens and closes the checkpoint. Others may read ``counts``, ``committed`` and ``last_old``.
    Methods that write raise ``Fenced`` if another process has taken the rank over.
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
        self._history = HistoryLog(self.folder / layout.HISTORY, self.fence.number)
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
            if len(journal.uncounted) >= _COUNTED_AT_ONCE:
                self._count()

    def _count(self) -> None:
        """Counts finished documents: many at once cost a fifth of what each costs alone."""
        for journal in self._dirty.values():
            self.finished += journal.count()

    @property
    def mean_answer(self) -> float:
        before = self._history.earlier.total
        tokens = before.completion_tokens + self.own.completion_tokens
        return tokens / max(1, before.requests + self.own.requests)

    def write_batch(self, answers: list[CachedRequest]) -> None:
        self.write(answers, {})
        for row in answers:
            self.point.last_cached = max(self.point.last_cached, row.ordinal)

    def paid(self, written: int = 0) -> RunTotals:
        """Returns the cost of all attempts. Any thread may call this."""
        return RunTotals.of(self._history.earlier.total, written) + RunTotals.of(self.own)

    def take_answers(self, slot: ChunkSlot) -> dict[AnswerKey, CachedAnswer]:
        """Answers of an old run become answers of this run."""
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
        self._count()
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
        journal = self._journal(chunk)
        journal.file.sync()
        self._count()
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
        self.fence.check(thorough=True)
        data = checksummed_json({"version": SHARD_VERSION, **shard}, indent=False)
        files.disk.replace(self.folder / layout.SHARD, data)
        self._shard_written = True

    # history -------------------------------------------------------------------------------------

    def start_history(self) -> None:
        start = AttemptStart(
            host=socket.gethostname(), pid=os.getpid(), job=job_id(), v=__version__
        )
        self.note([start, ProgressRecord()])

    def note(self, records: Sequence[Record]) -> None:
        self.fence.check(thorough=True)
        self._count()
        is_done = any(isinstance(record, AttemptEnd) and record.why == "done" for record in records)
        for record in records:
            record.at = record.at or unix_seconds()
            if isinstance(record, ProgressRecord):
                self.fill_in(record, is_done)
        self._plan_sync()
        self._history.append(records)

    def fill_in(self, progress: ProgressRecord, is_done: bool = False) -> None:
        """Sets the rank's fields. In another thread they may be from different moments.

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
    """Writes items and runs functions in its own thread, which alone uses the files until its
    end.
    """

    def __init__(self, rank_files: RankFiles) -> None:
        self.error: BaseException | None = None
        """The error that ended the thread. Once set, it stays."""
        self._files = rank_files
        self._queue: queue.SimpleQueue[_Queued] = queue.SimpleQueue()
        # Two counters with one writer each need no lock.
        self.submitted_bytes = 0  # event loop
        self.written_bytes = 0  # storage thread
        self._thread = context_thread(self._run, "datatrove-ckpt storage")

    # event loop ----------------------------------------------------------------------------------

    def put(self, item: _Item, size: int, chunk: Chunk | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.submitted_bytes += 500 + size  # and a few objects (measured)
        self._queue.put((self.submitted_bytes, chunk, item))

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
            except BaseException as error:  # for the caller
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
        submitted = self.written_bytes
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
        self.written_bytes = submitted_bytes


class Mirror(Protocol):
    def start(self, source: OpenCheckpoint) -> None:
        """Starts copying; called once the rank is open."""

    def check(self, first: bool, stopping: threading.Event) -> None:
        """Returns once output may be published. Any thread may call it.

        Args:
            first: nothing is committed yet: output may appear only once the mirror has a copy of
                the rank, so that a start on another node knows that the rank has begun.
            stopping: set once the caller no longer waits.

        Raises:
            StorageFailed: no copy can be made.
            PublicationStopped: the rank ends.
        """

    def save(self, stopping: threading.Event) -> None:
        """Returns once the mirror has the current state. Raises as ``check`` does."""

    def stop(self, completed: bool) -> None:
        """Stops copying, within a bounded time. Called after the last write, before files are
        removed.
        """


@dataclass(eq=False)
class RankLease:
    """Proof that this process owns a rank. Methods may be called in any thread."""

    lock: Lock
    files: RankFiles
    mirror: Mirror | None
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set once the rank ends: nothing more is published."""

    def check(self) -> None:
        """Checks that output may be published now.

        Raises:
            Fenced: another process owns the rank.
            CkptError: the mirror's owner or copy does not permit it.
        """
        self.files.fence.check(thorough=True)
        if self.mirror is not None:
            self.mirror.check(not self.files.log.commits, self.stopping)

    def check_spending(self) -> None:
        """Checks that a batch may be paid for now, and brings the mirror up to date. Raises as
        ``check`` does.
        """
        self.check()
        if self.mirror is not None:
            self.mirror.save(self.stopping)

    def read_rank(self, folder: Path, want: Include) -> RankSummary:
        if folder != self.files.folder or not self.lock.works:
            return read_rank(folder, want)
        journals = layout.journal_indices(folder)
        commits = dict(self.files.log.commits)
        open_chunks = [index for index in journals if index not in commits]
        run = {"owner": self.files.fence.owner}
        return RankSummary(folder, run, open_chunks=open_chunks, commits=commits)


class Output(Protocol):
    placement: Placement

    def write_chunk(
        self, chunk_index: int, documents: Iterable[WrittenDocument]
    ) -> list[OutputFile]:
        """Writes and publishes a chunk from its written documents (steps 2 and 3), which may be
        iterated several times.
        """

    def stop(self) -> None:
        """Ends the wait for the current publication."""


@dataclass(eq=False)
class Publisher:
    """Publishes submitted chunks, in order. ``on_failure`` may be called in any thread."""

    output: Output
    lease: RankLease
    storage: StorageThread
    on_failure: Callable[[BaseException], None]
    shutdown: Shutdown

    def __post_init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        context_thread(self._run, "datatrove-ckpt publisher")

    def submit(self, chunk: Chunk, journal: ChunkJournal) -> None:
        self._queue.put(partial(self._publish, chunk, journal))

    def finish(self) -> None:
        self._queue.put(self.output.placement.flush)

    def stop(self) -> None:
        """Ends the thread. The next attempt publishes the other chunks."""
        self.lease.stopping.set()
        self._queue.put(None)
        # A publication that keeps running ends with this process, or is not committed.
        self.shutdown.join(self._ended, running=None, draining=1.0)

    # publisher thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (step := self._queue.get()) is not None and not self.lease.stopping.is_set():
                step()
        except PublicationStopped:
            return
        except BaseException as error:  # every failure here must reach the event loop
            self._fail(error)
        finally:
            self._ended.put(True)

    def _fail(self, error: BaseException) -> None:
        self.on_failure(self.lease.files.fence.explain(error))

    def _publish(self, chunk: Chunk, journal: ChunkJournal) -> None:
        documents = _WrittenDocuments(chunk, journal, self.lease)
        chunk.files = self.output.write_chunk(chunk.index, documents)
        written = chunk.done.counts.read
        if written != chunk.read:
            raise CheckpointCorrupt(
                "The journal ",
                journal.path,
                f" holds {written} documents instead of {chunk.read}; its output is not committed.",
            )
        commit = partial(self.storage.call, self.lease.files.commit, chunk)
        self.output.placement.wait(chunk.index, WaitingChunk(commit, self._fail))


@dataclass(eq=False)
class _WrittenDocuments:
    """The documents of a chunk that go to the output; may be iterated several times.

    Each pass sets the chunk's counts, work and dead letters.
    """

    chunk: Chunk
    journal: ChunkJournal
    lease: RankLease

    def __iter__(self) -> Iterator[WrittenDocument]:
        chunk = self.chunk
        chunk.done = CompletedWork()
        chunk.dead_letters = bytearray()
        for outcome, document in self.journal.read_in_order():
            if self.lease.stopping.is_set():
                raise PublicationStopped
            if outcome == "dead":
                chunk.dead_letters += document[1] + b"\n"
            elif outcome == "written":
                yield document
        chunk.done = self.journal.done
        # The last moment before the caller publishes.
        self.lease.check()


# Beyond this many complete, unpublished chunks admission waits, because journals pile up on the
# disk. On the hub, whose limits can delay commits for an hour, only the disk's space counts.
MAX_PUBLISHING = 4


LastRecords = Callable[[bool], Sequence[Record]]


def no_records(completed: bool) -> Sequence[Record]:
    return ()


class OpenCheckpoint:
    """One rank's checkpoint, open. ``admit`` each document in input order, ``finish`` it, and
    ``close`` at the end.

    Methods belong to the event loop's thread, except those below "any thread".
    """

    def __init__(self, settings: CheckpointManager, lease: RankLease, output: Output) -> None:
        rank_files = lease.files
        self._settings = settings
        self.lease = lease
        self.run = rank_files.run
        """Digest of the run's identity."""
        self.resumed = point = rank_files.point
        self.clock = rank_files.clock
        """Measures this attempt."""
        self.own = rank_files.own
        """Work of this attempt. Other rooms add to it."""
        self.error: BaseException | None = None
        """The error of the publisher's or the mirror's thread; after ``close``, of any thread."""
        self.folder = folder = settings.folder
        self._files = rank_files  # for the storage thread, except two counters
        self._chunks = ChunkTracker(folder, settings.records_per_chunk, point, self._publish)
        self._storage = StorageThread(rank_files)
        self._output = output
        self._publisher = Publisher(output, lease, self._storage, self.fail, settings.shutdown)
        self._disk_space = DiskSpace(folder)
        self._complete = 0
        self._in_work = 0
        self._written = point.finished.written
        self._closing = threading.Lock()
        self._closed = False
        if lease.mirror is not None:
            lease.mirror.start(self)

    def close(self, completed: bool = False, last_records: LastRecords = no_records) -> None:
        """Writes all submitted data and releases the rank.

        Any thread may call this; only the first call has an effect. Errors of the threads are in
        ``error``, not raised.

        Args:
            last_records: called after the last commit. Returns the end of the attempt, for the
                history.
        """
        with self._closing:
            if not self._closed:
                self._closed = True
                self._close(completed, last_records)

    def _close(self, completed: bool, last_records: LastRecords) -> None:
        self._output.stop()
        self._publisher.stop()
        last = last_records(completed)
        self.note(*last)
        self._storage.stop()
        if self._storage.error is not None:
            # A full disk often has room for the cause.
            for records in (last, last[-1:]):
                with suppress(CkptError, OSError):
                    self._files.note(records)
                    break
        self.error = self.error or self._storage.error
        if self.lease.mirror is not None:
            self.lease.mirror.stop(completed and self.error is None)
        completed = completed and self.error is None
        try:
            self._files.close(completed)
        finally:
            self.lease.lock.release(remove=completed)
        if completed:
            files.disk.sync_dir(self.folder)  # the removals survive power loss

    def run_has_answers(self) -> bool:
        """Whether an earlier attempt of this task, or any task on this disk, had answers."""
        chunks = layout.last_chunk_of(self.folder).parent.glob("*.txt")
        return not self.resumed.is_fresh or any(chunks)

    # documents and answers -----------------------------------------------------------------------

    def admit(self, fingerprint: str, position: PositionGetter = no_position) -> ChunkSlot | None:
        """Returns the slot of the next document of the input; None if the document is done.

        Args:
            position: returns the reader's state right after the document. The storage thread calls
                it for a chunk's last document, at the commit.

        Raises:
            CheckpointMismatch: an earlier attempt finished another document in this slot.
        """
        slot = self._chunks.admit(fingerprint, position)
        if slot is not None:
            self._in_work += 1
            slot.cached = slot.cached or slot.ordinal <= self._files.last_old
        return slot

    def lookup(self, slot: ChunkSlot) -> Future[dict[AnswerKey, CachedAnswer]]:
        answers: Future[dict[AnswerKey, CachedAnswer]] = Future()
        self._storage.call(lambda: answers.set_result(self._files.take_answers(slot)))
        return answers

    def put_answer(
        self,
        slot: ChunkSlot,
        doc_id: str,
        key: AnswerKey,
        answer: CachedAnswer,
        ends_pieces: bool = False,
    ) -> None:
        size = len(answer.result or b"") + len(answer.error_message or "")
        row = CachedRequest(slot.chunk.index, slot.ordinal, doc_id, key, answer, ends_pieces)
        self._storage.put(row, size)

    def park(self, request: ParkedRequest) -> None:
        self._storage.put(request, len(request.body))

    def finish(self, slot: ChunkSlot, finished: FinishedDocument) -> None:
        """Submits a document, which is done once its line is in the journal."""
        self._storage.put(finished, len(finished.document), slot.chunk)
        self._in_work -= 1
        self._written += finished.outcome == "written"
        self._chunks.document_finished(slot.chunk)

    def end_of_input(self, shard: Json | None = None) -> None:
        """Closes the last chunk.

        Raises:
            CheckpointMismatch: earlier attempts read more documents than there are now.
        """
        self._chunks.end_of_input()
        shard_fields = {**(shard or {}), "documents": self._chunks.documents}
        self._storage.call(self._files.write_shard, shard_fields)
        self._storage.call(self._publisher.finish)

    def flush_placement(self) -> None:
        self._output.placement.flush()

    def _publish(self, chunk: Chunk) -> None:
        self._complete += 1
        self._storage.call(lambda: self._publisher.submit(chunk, self._files.synced_journal(chunk)))

    # state ---------------------------------------------------------------------------------------

    @property
    def done(self) -> CompletedWork:
        """Work that all attempts of the rank committed. The storage thread adds to it.

        It includes the last chunk after ``close``.
        """
        return self._files.done

    @property
    def totals(self) -> RunTotals:
        return self._files.paid(self.done.counts.written)

    @property
    def mean_answer(self) -> float:
        return self._files.mean_answer

    @property
    def most_written(self) -> int:
        return self._written + self._in_work

    @property
    def congested(self) -> bool:
        """Whether callers must wait for the disk."""
        storage = self._storage
        return storage.submitted_bytes - storage.written_bytes > MAX_BACKLOG_BYTES

    @property
    def publishing_behind(self) -> bool:
        if self._settings.placed_later:
            return self._disk_space.holds_up(self.publishing)
        return self._complete - self._files.committed > MAX_PUBLISHING

    @property
    def publishing(self) -> int:
        return self._complete - self._files.committed

    @property
    def all_committed(self) -> bool:
        return self._chunks.all_complete and not self.publishing

    def raise_failure(self) -> None:
        error = self.error or self._storage.error
        if error is not None:
            raise error

    # any thread ----------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        self.error = error

    def change(self, change: Callable[..., T], *arguments: object) -> T:
        """Calls ``change`` with the files of the rank. Waits for the storage thread."""
        return self._storage.ask(change, self._files, *arguments)

    def flush(self) -> None:
        self._storage.ask(self._files.sync)

    def note(self, *records: Record) -> None:
        """Has no effect once the storage thread has failed."""
        now = unix_seconds()
        for record in records:
            record.at = now
            if isinstance(record, ProgressRecord):
                record.in_work = self._in_work
        if records and self._storage.error is None:
            self._storage.call(self._files.note, records)

    def fill_in(self, progress: ProgressRecord) -> None:
        progress.in_work = self._in_work
        self._files.fill_in(progress)

    def snapshot(self, since: int) -> Snapshot:
        """Includes the answers put after number ``since``. Waits for the storage thread."""
        return self._storage.ask(self._files.snapshot, since)


# how a rank is taken -----------------------------------------------------------------------------


@dataclass
class CheckpointManager:
    """The unopened checkpoint of one rank.

    Args:
        placed_later: output is in place long after it is written, so only free disk space limits
            the waiting chunks.
    """

    root: Path
    rank: int
    records_per_chunk: int
    identity: RunIdentity
    placed_later: bool = False
    sync_seconds: SecondsOrAuto = 1.0
    retry_errors: bool = False
    keep_answers: bool = False
    accept_changes: bool = False
    mirror: Mirror | None = None
    keeps_paid: bool = False
    shutdown: Shutdown = field(default_factory=Shutdown)

    @property
    def folder(self) -> Path:
        return layout.rank_folder(self.root, self.rank)

    @contextmanager
    def lock(self) -> Iterator[LockedRank]:
        """Locks the rank, and compares its identity. The block takes the rank.

        An error in the block undoes this: a refused process leaves the rank to its owner, a
        finished rank stays finished, and no new folder remains.
        """
        folder = self.folder
        last_chunk = layout.last_chunk_of(folder)
        listing = layout.RankListing(folder)
        is_new = not folder.exists()
        files.disk.make_dirs(folder, files.PRIVATE_FOLDER)
        files.disk.make_dirs(last_chunk.parent)
        finished = listing.is_finished
        unlocked = layout.LOCK not in listing.entries
        lock = Lock(folder / layout.LOCK)
        with ExitStack() as refused:
            if is_new:
                refused.callback(files.disk.remove_dir, folder)
            refused.callback(lock.release, remove=unlocked)
            claim = RunClaim(folder, self.identity, self.accept_changes)
            scanned = None
            if claim.before:  # first of all: an earlier owner's commits may be lost
                scanned = scan_complete_commits(folder, finished, claim.before)
            yield LockedRank(self, lock, claim, scanned, finished, refused)


@dataclass(frozen=True)
class LockedRank:
    """A rank that no other process can take now, unless its file system has no locks."""

    settings: CheckpointManager
    lock: Lock
    claim: RunClaim
    scanned: tuple[dict[int, Commit], int] | None
    is_finished: bool
    refused: ExitStack

    @property
    def is_first(self) -> bool:
        return not self.claim.before

    def take(
        self,
        check_moved: Callable[[], None],
        old: RequestCache | None = None,
    ) -> RankLease:
        settings = self.settings
        folder = settings.folder
        with ExitStack() as undo:
            if old is not None:
                undo.callback(old.close)
            with ExitStack() as job:
                # Ranks retry dead letters when they like, with their own settings.
                if not layout.RankAddress.of(folder).retry:
                    joined = join_job(
                        settings.root,
                        settings.rank,
                        settings.identity,
                        settings.accept_changes,
                        check_moved,
                    )
                    job.enter_context(joined)
                self.refused.pop_all()
                undo.callback(self.lock.release)
                # A rank that completes removes its cache.
                interrupted = (folder / layout.CACHE).exists()
                fence, cache = self._take_over(undo)
            log = CommitLog(folder / layout.COMMITS, self.scanned if self.lock.works else None)
            if settings.retry_errors:
                cache.forget_errors()
            point = recover(folder, log, cache, settings.records_per_chunk)
            point.interrupted = interrupted and not self.is_first
            interval = Interval(settings.sync_seconds, SYNC_TUNING)
            run = settings.identity.digest
            rank_files = RankFiles(
                folder, cache, log, fence, interval, point, old, run, settings.keeps_paid
            )
            rank_files.start_history()
            undo.pop_all()
        return RankLease(self.lock, rank_files, settings.mirror)

    def _take_over(self, undo: ExitStack) -> tuple[Fence, RequestCache]:
        claim = self.claim
        folder = self.settings.folder
        commits = 0
        if self.scanned is not None:
            commits = len(self.scanned[0])
        if self.is_first and (last_chunk := layout.last_chunk_of(folder)).exists():
            # The file of a removed folder would name chunks that are not committed.
            files.disk.remove(last_chunk)
            files.disk.sync_dir(last_chunk.parent)
        if self.lock.works and not self.is_first:
            # SQLite has its own lock, whose holder must not be fenced off: open the cache first.
            cache = self._open_cache(undo)
            if self.settings.placed_later:
                # On a full disk run.json needs this room. Staged files are made again from the
                # journals.
                files.disk.remove_tree(folder / layout.STAGING)
            return claim.take(commits), cache
        fence = claim.take(commits)
        # An earlier owner may still have these files open, until it checks the fence.
        if not self.lock.works:
            journals = [layout.journal_name(index) for index in layout.journal_indices(folder)]
            for name in (*journals, *layout.CACHE_FILES, layout.COMMITS, layout.HISTORY):
                files.disk.detach(folder / name)
        return fence, self._open_cache(undo)

    def _open_cache(self, undo: ExitStack) -> RequestCache:
        folder = self.settings.folder
        archive = folder / layout.KEPT_ANSWERS if self.settings.keep_answers else None
        cache = RequestCache(folder / layout.CACHE, archive)
        undo.callback(cache.close)
        return cache
