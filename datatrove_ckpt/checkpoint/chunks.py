"""Assigns documents to chunks, and decides when a chunk is complete. Touches no disk.

A chunk is complete when this process has admitted all its documents and its journal holds each of
them. An earlier attempt may have finished a chunk without committing it.

A ``Chunk`` belongs to one thread at a time: event loop, storage thread, publisher, storage thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from datatrove_ckpt.checkpoint.checksummed_lines import Json
from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.common.counts import CompletedWork
from datatrove_ckpt.errors import CheckpointMismatch

PositionGetter = Callable[[], Json | None]
"""Returns the reader's state right after a document; None if the reader has no state."""


def no_position() -> None:
    """The ``PositionGetter`` of a reader without state."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk, from its first document to its commit.

    Attributes:
        recovered: fingerprints of the documents found in its journal, by ordinal, until they are
            read again.
        last_input: fingerprint of the last document.
        position: called when the chunk is committed, in the storage thread.
    """

    index: int
    first_ordinal: int
    capacity: int = 0
    recovered: dict[int, str] = field(default_factory=dict)
    read: int = 0
    finished: int = 0
    full: bool = False
    last_input: str = ""
    position: PositionGetter = no_position
    done: CompletedWork = CompletedWork()
    dead_letters: bytearray = field(default_factory=bytearray)
    files: list[OutputFile] = field(default_factory=list)

    @property
    def next_ordinal(self) -> int:
        return self.first_ordinal + self.read


@dataclass(slots=True)
class ChunkSlot:
    """The slot of a document to be processed. ``cached`` is False if it surely has no answers."""

    ordinal: int
    chunk: Chunk
    cached: bool


class ChunkTracker:
    """Assigns documents to chunks in input order. Event loop only."""

    def __init__(
        self,
        folder: Path,
        records_per_chunk: int,
        point: ResumePoint,
        on_complete: Callable[[Chunk], None],
    ) -> None:
        self._folder = folder
        self._ends = point.chunk_ends(records_per_chunk)
        self._on_complete = on_complete
        self._committed = point.done
        self._recovered = {index: journal.recovered for index, journal in point.journals.items()}
        self._point = point
        self._next_chunk = point.next_chunk
        self._next_ordinal = point.next_ordinal
        self._current: Chunk | None = None
        self._open: dict[int, Chunk] = {}

    @property
    def all_complete(self) -> bool:
        return not self._open

    def admit(self, fingerprint: str, position: PositionGetter) -> ChunkSlot | None:
        """Returns the slot of the next document of the input; None if an earlier attempt finished
        the document.
        """
        chunk = self._current
        if chunk is None:
            index = self._next_chunk
            first = self._next_ordinal
            recovered = self._recovered.pop(index, {})
            chunk = Chunk(index, first, next(self._ends) - first, recovered)
            self._current = self._open[index] = chunk
            self._next_chunk += 1
        ordinal = chunk.first_ordinal + chunk.read
        chunk.read += 1
        chunk.position = position
        chunk.last_input = fingerprint
        committed = self._committed.get(chunk.index)
        if committed is not None:
            if chunk.read == committed.counts.read:
                self._expect(committed.last_input, fingerprint, ordinal)
                self._current = None
                self._next_ordinal = committed.next_ordinal
                del self._open[chunk.index]
            return None
        if chunk.read == chunk.capacity:
            self._fill(chunk)
        if (recovered_fingerprint := chunk.recovered.pop(ordinal, None)) is not None:
            self._expect(recovered_fingerprint, fingerprint, ordinal)
            self.document_finished(chunk)
            return None
        return ChunkSlot(ordinal, chunk, ordinal <= self._point.last_cached)

    def document_finished(self, chunk: Chunk) -> None:
        chunk.finished += 1
        self._report_if_complete(chunk)

    def end_of_input(self) -> None:
        if self._has_more_than_the_input():
            raise CheckpointMismatch(
                f"The input ended after {self.documents} documents, but {self._folder} holds "
                "finished documents beyond: the input or the reader's limit has shrunk. Restore "
                "it.",
                starts_over="with old results",
            )
        if self._current is not None:
            self._fill(self._current)

    @property
    def documents(self) -> int:
        if self._current:
            return self._current.next_ordinal
        return self._next_ordinal

    def _has_more_than_the_input(self) -> bool:
        first_unread = self._next_chunk
        if self._current:
            first_unread -= 1
        return (
            any(index >= first_unread for index in (*self._recovered, *self._committed))
            or any(chunk.recovered for chunk in self._open.values())
            or self._point.last_cached >= self.documents
        )

    def _expect(self, expected: str, fingerprint: str, ordinal: int) -> None:
        if expected != fingerprint:
            raise CheckpointMismatch(
                f"Document {ordinal} of this task is not the one finished before (see "
                f"{self._folder}): the input, or an earlier step, has changed. Restore it.",
                starts_over="with old results",
            )

    def _fill(self, chunk: Chunk) -> None:
        chunk.full = True
        self._current = None
        self._next_ordinal = chunk.next_ordinal
        self._report_if_complete(chunk)

    def _report_if_complete(self, chunk: Chunk) -> None:
        if chunk.full and chunk.finished == chunk.read:
            del self._open[chunk.index]
            self._on_complete(chunk)
