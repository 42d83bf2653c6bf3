"""The storage thread: every write to journals, request cache and commit log of a rank, in one order.

The event loop hands over and goes on; it never waits on a disk. The thread takes everything that is queued as one
group: one SQLite transaction and one write per journal, so groups grow by themselves when the disk is slow. What was
written survives kill -9 at once. It is synced at most every ``sync_seconds``, so power loss costs that much; a commit
syncs what it needs by itself, whatever the interval.

Handing over item by item is as fast as collecting on the event loop's side (measured), and needs no timer there.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from datatrove_ckpt.checkpoint.interval import SYNC_TUNING, Seconds, make_interval
from datatrove_ckpt.checkpoint.journal import ChunkJournal, Finished
from datatrove_ckpt.checkpoint.request_cache import CachedRequest, RequestCache

# Beyond this much handed over and not yet written, admission waits: a slow disk slows the run, it never fills memory.
MAX_BACKLOG_BYTES = 64 * 2**20
# What an item takes beside its JSON: a few objects (measured).
_OBJECTS = 500
# One group's transaction stays short enough that a lookup queued behind it is answered in milliseconds.
MAX_GROUP = 2000

Call = Callable[[], None]
T = TypeVar("T")


class Storage:
    """Runs what is submitted, in order, in a thread of its own.

    ``journal(chunk_index)`` gives the journal a finished document goes to; ``unfinished`` are the documents that have
    answers of earlier lives. ``on_change`` is called, in this thread,
    after each group and when the thread fails. ``may_write`` raises when this process must not write any more,
    and ``explain`` may know a better reason for a failure than the failure itself.
    """

    def __init__(
        self,
        cache: RequestCache,
        journal: Callable[[int], ChunkJournal],
        sync_seconds: Seconds,
        on_change: Callable[[], None],
        may_write: Callable[[], None] = lambda: None,
        explain: Callable[[BaseException], BaseException] = lambda error: error,
        unfinished: Iterable[int] = (),
    ) -> None:
        self.error: BaseException | None = None
        self.unfinished = set(unfinished)
        """Documents that have answers and are not finished. Storage thread only."""
        self._cache = cache
        self._journal = journal
        self._interval = make_interval(sync_seconds, SYNC_TUNING)
        self._on_change = on_change
        self._may_write = may_write
        self._explain = explain
        self._queue: queue.SimpleQueue[tuple[int, Finished] | CachedRequest | Call | None] = queue.SimpleQueue()
        self._submitted = 0
        self._written = 0
        self._dirty: dict[Path, ChunkJournal] = {}
        self._next_sync = 0.0
        self._thread = threading.Thread(target=self._run, name="datatrove-ckpt storage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # the event loop's side -------------------------------------------------------------------------------------

    @property
    def sync_seconds(self) -> float:
        """The interval between two syncs, as it is now."""
        return self._interval.seconds

    @property
    def backlog(self) -> int:
        """Bytes handed over and not yet written."""
        # Two counters, each written by one thread only, instead of one that would need a lock.
        return self._submitted - self._written

    def put_answer(self, request: CachedRequest) -> None:
        self._raise_failure()
        self._submitted += _size(request)
        self._queue.put(request)

    def put_finished(self, chunk_index: int, finished: Finished) -> None:
        self._raise_failure()
        self._submitted += _size(finished)
        self._queue.put((chunk_index, finished))

    def call(self, function: Call) -> None:
        """Runs ``function`` in the storage thread, after everything submitted so far is written."""
        self._raise_failure()
        self._queue.put(function)

    def ask(self, function: Callable[[], T]) -> T:
        """What ``function`` gives, when it is run like ``call``'s; waits for that, so it is not for the event loop.

        Once this thread has ended, nobody else works with its files, and the function is run right here.
        """
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # the asker's business, not this thread's
                future.set_exception(error)

        self._queue.put(answer)
        while not wait([future], timeout=0.05).done:
            if not self._thread.is_alive() and not future.done():
                return function()
        return future.result()

    def stop(self) -> None:
        """Writes and syncs what was submitted, and ends the thread. Does not raise: see ``error``."""
        self._queue.put(None)
        self._thread.join()

    def _raise_failure(self) -> None:
        if self.error is not None:
            raise self.error

    # the thread's side -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._work():
                self._on_change()
            self._sync()
        except BaseException as error:  # what failed here must reach the event loop, whatever it is
            self.error = self._explain(error)
        self._on_change()

    def _work(self) -> bool:
        answers: list[CachedRequest] = []
        documents: dict[int, list[Finished]] = defaultdict(list)
        for item in self._take():
            if isinstance(item, CachedRequest):
                answers.append(item)
            elif isinstance(item, tuple):
                documents[item[0]].append(item[1])
            else:
                self._write(answers, documents)
                answers.clear()
                documents.clear()
                if item is None:
                    return False
                item()
        self._write(answers, documents)
        if self._has_unsynced and time.monotonic() >= self._next_sync:
            self._sync()
        return True

    def _take(self) -> list[tuple[int, Finished] | CachedRequest | Call | None]:
        """Waits for something, and takes all there is. Empty when it is time to sync."""
        wait = max(0.0, self._next_sync - time.monotonic()) if self._has_unsynced else None
        items = []
        with suppress(queue.Empty):
            items.append(self._queue.get(timeout=wait))
            while len(items) < MAX_GROUP:
                items.append(self._queue.get_nowait())
        return items

    def _write(self, answers: list[CachedRequest], documents: dict[int, list[Finished]]) -> None:
        if not answers and not documents:
            return
        self._may_write()
        if not self._has_unsynced:
            self._next_sync = time.monotonic() + self._interval.seconds
        if answers:
            self._cache.put(answers)
            self.unfinished.update(request.ordinal for request in answers)
        for chunk_index, group in documents.items():
            journal = self._journal(chunk_index)
            journal.append(group)
            self._dirty[journal.path] = journal
            self.unfinished.difference_update(finished.ordinal for finished in group)
        self._written += sum(_size(r) for r in answers) + sum(_size(f) for g in documents.values() for f in g)

    @property
    def _has_unsynced(self) -> bool:
        return bool(self._dirty) or self._cache.unsynced

    def _sync(self) -> None:
        if not self._has_unsynced:
            return
        start = time.monotonic()
        for journal in self._dirty.values():
            journal.sync()
        self._dirty.clear()
        self._cache.sync()
        self._interval.took(time.monotonic() - start)

    def removed(self, journal: ChunkJournal) -> None:
        """The journal is gone (its chunk is committed) and needs no sync any more. Storage thread only."""
        self._dirty.pop(journal.path, None)


def _size(item: CachedRequest | Finished) -> int:
    """Bytes of memory, roughly."""
    if isinstance(item, Finished):
        return _OBJECTS + len(item.document)
    return _OBJECTS + len(item.answer.result or b"") + len(item.answer.error_message or "")
