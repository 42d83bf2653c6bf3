"""The publisher thread: it turns complete journals into output files (steps 2 and 3 of a commit), one chunk at a time.

Publishing reads a journal that no longer grows, and may take minutes (gzip, uploads), so it runs beside the storage
thread. Only the outcome, the commit, goes through the storage thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TypeAlias

from datatrove_ckpt.checkpoint.chunks import CompleteChunk, PublishedChunk
from datatrove_ckpt.checkpoint.commits import DocumentCounts, OutputFile
from datatrove_ckpt.checkpoint.identity import Fence
from datatrove_ckpt.checkpoint.journal import ChunkJournal, Finished
from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.process.shutdown import Shutdown

# How long ``stop`` waits for a publication once the rank was asked to stop: the publication may be an upload.
_DRAIN_SECONDS = 1.0

WriteChunk: TypeAlias = Callable[[int, Iterator[Finished]], list[OutputFile]]
"""Writes and publishes the output of one chunk from its written documents (steps 2 and 3)."""


class Stopping(BaseException):
    """Ends a publication that nobody waits for any more. The next attempt publishes the chunk again."""


class Publisher:
    """Publishes what is submitted, in order, in its own thread.

    Args:
        on_published: called in this thread with each published chunk.
        on_failure: called in this thread with the error, after which nothing more is published.
    """

    def __init__(
        self,
        write_chunk: WriteChunk,
        fence: Fence,
        on_published: Callable[[PublishedChunk], None],
        on_failure: Callable[[BaseException], None],
        shutdown: Shutdown,
    ) -> None:
        self._write_chunk = write_chunk
        self._fence = fence
        self._on_published = on_published
        self._on_failure = on_failure
        self._shutdown = shutdown
        self._queue: queue.SimpleQueue[tuple[CompleteChunk, ChunkJournal] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="datatrove-ckpt publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, chunk: CompleteChunk, journal: ChunkJournal) -> None:
        """``journal`` holds all documents of the chunk, and is synced."""
        self._queue.put((chunk, journal))

    def stop(self) -> None:
        """Ends the thread. The next attempt publishes what is not published yet."""
        self._stopping.set()
        self._queue.put(None)
        # A publication that is left running does no harm: it ends with this process, or without its commit.
        self._shutdown.join(self._ended, running=None, draining=_DRAIN_SECONDS)

    # publisher thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None and not self._stopping.is_set():
                self._publish(*item)
        except Stopping:
            return
        except BaseException as error:  # every failure here must reach the event loop
            self._on_failure(self._fence.explain(error))
        finally:
            self._ended.put(True)

    def _publish(self, chunk: CompleteChunk, journal: ChunkJournal) -> None:
        counts, dead_letters = DocumentCounts(), bytearray()
        # Closed at once, also on failure: the traceback would otherwise keep the journal open.
        with closing(self._written(journal, counts, dead_letters)) as documents:
            output = self._write_chunk(chunk.key.chunk_index, documents)
        if counts.read != chunk.read:
            raise CheckpointCorrupt(
                f"The journal {journal.path} holds {counts.read} documents instead of {chunk.read}; its output "
                "is not committed."
            )
        self._on_published(PublishedChunk(chunk, counts, output, bytes(dead_letters)))

    def _written(
        self, journal: ChunkJournal, counts: DocumentCounts, dead_letters: bytearray
    ) -> Generator[Finished, None, None]:
        """Yields the documents that go to the output. Counts all documents and collects dead letters on the way."""
        with closing(journal.read_in_order()) as documents:
            for finished in documents:
                counts.count(finished.outcome, finished.requests, finished.prompt_tokens, finished.completion_tokens)
                if self._stopping.is_set():
                    raise Stopping
                if finished.outcome == "dead":
                    dead_letters += finished.document + b"\n"
                elif finished.outcome == "written":
                    yield finished
        # The last moment before the caller publishes.
        self._fence.check(thorough=True)
