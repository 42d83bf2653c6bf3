"""The publisher thread: complete journals become output files (steps 2 and 3 of a commit), one chunk after the other.

Publishing reads a journal that no longer changes, and may take minutes (gzip, uploads), so it runs beside the storage
thread; only its outcome, the commit, goes through that one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from datatrove_ckpt.checkpoint.commits import DocumentCounts, OutputFile
from datatrove_ckpt.checkpoint.identity import Fence
from datatrove_ckpt.checkpoint.journal import ChunkJournal, Finished
from datatrove_ckpt.errors import CheckpointCorrupt

# Seconds that ``stop`` waits for a publication once it is told to hurry: it may be an upload.
_PATIENCE = 1.0

WriteChunk = Callable[[int, Iterator[Finished]], list[OutputFile]]
"""Writes and publishes the output of one chunk from its written documents (steps 2 and 3)."""


@dataclass(slots=True)
class Chunk:
    """A chunk in this life: what was read of it, and, once it is published, what it came to."""

    index: int
    first_ordinal: int
    capacity: int
    journal: ChunkJournal | None = None
    read: int = 0
    finished: int = 0
    full: bool = False
    position: Callable[[], dict[str, Any] | None] = lambda: None
    last_input: str = ""
    counts: DocumentCounts = field(default_factory=DocumentCounts)
    dead_letters: list[bytes] = field(default_factory=list)


class Stopping(BaseException):
    """Ends a publication that nobody waits for any more. Its chunk is published again by the next life."""


class Publisher:
    """Publishes what is submitted, in order, in a thread of its own.

    ``published`` is called with each chunk and its files, and ``failed`` with what went wrong, after which nothing more
    is published. Both are called in this thread.
    """

    def __init__(
        self,
        write_chunk: WriteChunk,
        fence: Fence,
        published: Callable[[Chunk, list[OutputFile]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._write_chunk = write_chunk
        self._fence = fence
        self._published = published
        self._failed = failed
        self._queue: queue.SimpleQueue[tuple[Chunk, ChunkJournal] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="datatrove-ckpt publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, chunk: Chunk, journal: ChunkJournal) -> None:
        """``journal`` holds all the chunk's documents, and is synced."""
        self._queue.put((chunk, journal))

    def stop(self) -> None:
        """Ends the thread; what is not published yet is left to the next life."""
        self._stopping.set()
        self._queue.put(None)
        if not self._ended.get():
            # Left alone, a publication does no harm: it ends with this process, or without its commit.
            with suppress(queue.Empty):
                self._ended.get(timeout=_PATIENCE)

    def fast_stop(self) -> None:
        """``stop`` waits a second at most; called again, not at all. Takes no lock: it may be a signal handler's."""
        self._ended.put(False)

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None and not self._stopping.is_set():
                self._publish(*item)
        except Stopping:
            return
        except BaseException as error:  # whatever failed here must reach the event loop
            self._failed(self._fence.explain(error))
        finally:
            self._ended.put(True)

    def _publish(self, chunk: Chunk, journal: ChunkJournal) -> None:
        # Closed at once, also on failure, whose traceback would keep the journal open as long as it is kept.
        with closing(self._written(chunk, journal)) as documents:
            output = self._write_chunk(chunk.index, documents)
        if chunk.counts.read != chunk.read:
            raise CheckpointCorrupt(
                f"The journal {journal.path} holds {chunk.counts.read} documents instead of {chunk.read}; its output "
                "is not committed."
            )
        self._published(chunk, output)

    def _written(self, chunk: Chunk, journal: ChunkJournal) -> Generator[Finished, None, None]:
        """The chunk's documents that go to the output, counting all of them on the way."""
        with closing(journal.read_in_order()) as documents:
            for finished in documents:
                chunk.counts.count(
                    finished.outcome, finished.requests, finished.prompt_tokens, finished.completion_tokens
                )
                if self._stopping.is_set():
                    raise Stopping
                if finished.outcome == "dead":
                    chunk.dead_letters.append(finished.document + b"\n")
                elif finished.outcome == "written":
                    yield finished
        # The last moment before the caller publishes.
        self._fence.check(thorough=True)
