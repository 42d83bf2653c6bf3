"""The storage thread makes all writes to a rank's journals, request cache and commit log in order,
so no lock guards these files (``RankFiles``).

The event loop submits items and never waits on a disk. The thread writes its whole queue as one
group: one SQLite transaction and one write per journal, so groups grow when the disk is slow. A
completed write survives kill -9. Syncs run at most every ``sync_seconds``; a commit also syncs its
files. Grouping on the event loop's side was no faster (measured), and needs a timer.
"""

import queue
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TypeVar

from datatrove_ckpt.checkpoint.batch_log import ParkedRequest
from datatrove_ckpt.checkpoint.chunks import Chunk
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.rank_files import RankFiles
from datatrove_ckpt.checkpoint.request_cache import CachedRequest
from datatrove_ckpt.common.threads import context_thread
from datatrove_ckpt.process.shutdown import get_within

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
