"""The publisher thread turns complete journals into output files (steps 2 and 3 of a commit).

Publishing may take minutes (gzip, uploads), so it runs beside the storage thread, which commits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from datatrove_ckpt.checkpoint.chunks import Chunk
from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.journal import ChunkJournal, Finished
from datatrove_ckpt.checkpoint.lease import RankLease
from datatrove_ckpt.checkpoint.numbers import DocumentCounts, Took, WorkStats
from datatrove_ckpt.checkpoint.placement import Placement, Stopping, WaitingChunk
from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.process.shutdown import Shutdown

# Counting a chunk of 100,000 at once would hold the GIL for 40 ms.
_COUNTED_AT_ONCE = 1000
# How long ``stop`` waits for a publication, perhaps an upload, once a stop was requested.
_DRAIN_SECONDS = 1.0


class Output(Protocol):
    """Turns the chunks of a rank into output files. See ``ChunkOutput``.

    Attributes:
        placement: puts the files that were written in place, if ``write_chunk`` does not do that
            itself.
    """

    placement: Placement

    def write_chunk(self, chunk_index: int, documents: Iterable[Finished]) -> list[OutputFile]:
        """Writes and publishes a chunk from its written documents (steps 2 and 3), which may be
        read again.
        """

    def stop(self) -> None:
        """Ends the wait for the publication that is under way."""


@dataclass(eq=False)
class Publisher:
    """Publishes what is submitted, in order, in its own thread.

    Args:
        on_published: called with each chunk whose files are in place, in this thread or in one of
            ``placement``.
        on_failure: called likewise with the error, after which nothing more is published.
    """

    output: Output
    lease: RankLease
    on_published: Callable[[Chunk], None]
    on_failure: Callable[[BaseException], None]
    shutdown: Shutdown

    def __post_init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        work = copy_context().run  # its lines are in the rank's log
        threading.Thread(
            target=work, args=(self._run,), name="datatrove-ckpt publisher", daemon=True
        ).start()

    def submit(self, chunk: Chunk, journal: ChunkJournal) -> None:
        self._queue.put(partial(self._publish, chunk, journal))

    def no_more(self) -> None:
        self._queue.put(self.output.placement.hurry)

    def stop(self) -> None:
        """Ends the thread. The next attempt publishes what is not published yet."""
        self.lease.stopping.set()
        self._queue.put(None)
        # A publication that keeps running is harmless: it ends with this process, or gets no
        # commit.
        self.shutdown.join(self._ended, running=None, draining=_DRAIN_SECONDS)

    # publisher thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (step := self._queue.get()) is not None and not self.lease.stopping.is_set():
                step()
        except Stopping:
            return
        except BaseException as error:  # every failure here must reach the event loop
            self._fail(error)
        finally:
            self._ended.put(True)

    def _fail(self, error: BaseException) -> None:
        self.on_failure(self.lease.files.fence.explain(error))

    def _publish(self, chunk: Chunk, journal: ChunkJournal) -> None:
        # Closed also on failure, where the traceback would keep the journal open.
        with closing(_WrittenDocuments(chunk, journal, self.lease)) as documents:
            chunk.files = self.output.write_chunk(chunk.index, documents)
        if chunk.counts.read != chunk.read:
            raise CheckpointCorrupt(
                "The journal ",
                journal.path,
                f" holds {chunk.counts.read} documents instead of {chunk.read}; its output is not "
                "committed.",
            )
        self.output.placement.wait(
            chunk.index, WaitingChunk(partial(self.on_published, chunk), self._fail)
        )


@dataclass(eq=False)
class _WrittenDocuments:
    """The documents of a chunk that go to the output; may be iterated several times.

    Each pass sets the chunk's counts, work and dead letters.
    """

    chunk: Chunk
    journal: ChunkJournal
    lease: RankLease
    _pass: Generator[Finished, None, None] | None = None

    def __iter__(self) -> Iterator[Finished]:
        self.close()
        self._pass = self._read()
        return self._pass

    def close(self) -> None:
        if self._pass is not None:
            self._pass.close()

    def _read(self) -> Generator[Finished, None, None]:
        chunk = self.chunk
        chunk.counts = DocumentCounts()
        chunk.work = WorkStats()
        chunk.dead_letters = bytearray()
        took: list[Took] = []
        with closing(self.journal.read_in_order()) as documents:
            for finished in documents:
                took.append(finished.took)
                if len(took) == _COUNTED_AT_ONCE:
                    self._count(took)
                if self.lease.stopping.is_set():
                    raise Stopping
                if finished.outcome == "dead":
                    chunk.dead_letters += finished.document + b"\n"
                elif finished.outcome == "written":
                    yield finished
        self._count(took)
        # The last moment before the caller publishes.
        self.lease.check()

    def _count(self, took: list[Took]) -> None:
        self.chunk.counts += DocumentCounts.of(took)
        self.chunk.work += WorkStats.of(took)
        took.clear()
