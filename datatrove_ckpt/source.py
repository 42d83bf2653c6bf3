"""The documents of a rank, taken from datatrove's generator by one thread, in small batches.

Readers block: on a disk, on S3, on gzip. So they run in a thread of their own; but one hop to a thread and back costs
more than reading a document does (measured: 90 % of datatrove's resume time), hence batches. A batch ends early when
the reader is slow, so that no document waits for others.

A position can be saved, to go on after it, only if every document that came before lies before it, and every later one
behind it. Filters that drop documents keep that; a step that reorders or splits them does not. So a document's position
counts once the next document has come with a later one; where they do not come in order, this run's documents are
counted, as with a reader that has no positions.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.documents import encode, fingerprint
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.positions import Position, Reading, position_of, position_state

_BATCH_DOCUMENTS = 64
_BATCH_CHARACTERS = 2**20
_BATCH_SECONDS = 0.02
# Before every position there can be.
_FIRST: Any = (-1,)


class Read:
    """A document, and what was taken from it before anything could change it.

    ``as_read`` is the document's bytes, kept only where a dead letter may need them.
    """

    __slots__ = ("_source", "as_read", "document", "fingerprint", "is_safe")

    def __init__(self, source: DocumentSource, document: Document, data: bytes, keep: bool) -> None:
        self.document = document
        self.fingerprint = fingerprint(data)
        self.as_read = data if keep else None
        self.is_safe = False
        self._source = source

    def position(self) -> dict[str, Any] | None:
        """The reader's state right after this document, to be saved; None where there is none to go on from."""
        return self._source.save(self.document) if self.is_safe else None


class DocumentSource:
    """Reads ahead by one batch."""

    def __init__(self, documents: Iterable[Document], keep_as_read: bool = False) -> None:
        self._documents = iter(documents)
        self._keep_as_read = keep_as_read
        self._reading = Reading()
        self._last: Position | None = None
        self._held: Read | None = None
        self._in_order = True
        self._saved: Position | None = None
        self._lowest: Position | None = None
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="datatrove-ckpt reader")

    async def skip(self, point: ResumePoint) -> None:
        """Goes to the first document that is not done: by seeking, or by passing those before it.

        Raises:
            CheckpointMismatch: the input is shorter than it was, or another.
        """
        if point.next_ordinal:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._skip, point)

    async def batches(self) -> AsyncIterator[list[Read]]:
        loop = asyncio.get_running_loop()
        upcoming = loop.run_in_executor(self._thread, self._batch)
        while batch := await upcoming:
            upcoming = loop.run_in_executor(self._thread, self._batch)
            yield batch

    def close(self) -> None:
        """Ends the thread, without waiting for a reader that is blocked."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # the thread's side -------------------------------------------------------------------------------------------

    def _batch(self) -> list[Read]:
        batch: list[Read] = []
        characters, started = 0, 0.0
        with self._reading:
            for document in self._documents:
                started = started or time.monotonic()
                read = Read(self, document, encode(document), self._keep_as_read)
                if self._held is not None:
                    batch.append(self._held)
                self._judge(read)
                self._held = read
                characters += len(document.text)
                if (
                    len(batch) >= _BATCH_DOCUMENTS
                    or characters > _BATCH_CHARACTERS
                    or (batch and time.monotonic() - started > _BATCH_SECONDS)
                ):
                    return batch
        return [*batch, *self._end()]

    def _end(self) -> Iterator[Read]:
        if self._held is not None:
            self._held.is_safe = self._in_order and self._last is not None
            yield self._held
            self._held = None

    def _judge(self, read: Read) -> None:
        """Whether the document that is held back may be gone on from, now that the next one is known."""
        position = position_of(read.document)
        last, self._last = self._last, position
        if last is None and self._held is None:
            return
        if not self._in_order:
            if self._lowest is not None:
                self._breaks_order(position)
            return
        if position is not None and last is not None and last < position:
            if self._held is not None:
                self._held.is_safe = True
            return
        self._in_order = False
        if last is not None or position is not None:
            self._breaks_order(position)

    def _breaks_order(self, position: Position | None) -> None:
        """A document came too late, or twice, or made by somebody else: positions behind it are none to go on from."""
        with self._lock:
            if self._lowest is None:
                logger.info(
                    "A step between the reader and InferenceRunner reorders documents, or makes several of one: a "
                    "resume will count documents from the start instead of seeking."
                )
            self._lowest = min(self._lowest or position or _FIRST, position or _FIRST)
            if self._saved is not None and not self._saved < self._lowest:
                raise ConfigError(
                    "A step between the reader and InferenceRunner reorders documents, or makes several of one, so a "
                    "position that was saved is wrong, and a resume from it would lose documents. Use datatrove's own "
                    "reader, which counts documents instead, and start with another checkpoints_local_dir."
                )

    def save(self, document: Document) -> dict[str, Any] | None:
        """The state after a document that was safe when the next one came. The event loop's side."""
        position = position_of(document)
        with self._lock:
            if position is None or (self._lowest is not None and not position < self._lowest):
                return None
            self._saved = position
        return position_state(document)

    def _skip(self, point: ResumePoint) -> None:
        started = time.monotonic()
        if point.position is not None:
            self._reading = Reading(point.position)
            with self._reading:
                first = list(itertools.islice(self._documents, 1))
            self._documents = itertools.chain(first, self._documents)
            if self._reading.taken:
                logger.info(f"Went on after {point.next_ordinal} documents in {time.monotonic() - started:.2f} s.")
                return
        with self._reading:
            self._count(point)
        logger.info(
            f"Read past {point.next_ordinal} documents that are done in {time.monotonic() - started:.1f} s, because "
            "this reader cannot seek. JsonlReader, ParquetReader and IpcReader of datatrove_ckpt.readers can, and "
            "take the same arguments."
        )

    def _count(self, point: ResumePoint) -> None:
        for ordinal in range(point.next_ordinal):
            document = next(self._documents, None)
            if document is None:
                raise CheckpointMismatch(
                    f"The input ended after {ordinal} documents, but {point.next_ordinal} were done before: it has "
                    "shrunk. Restore it, or start with another checkpoints_local_dir."
                )
            if ordinal in point.milestones and point.milestones[ordinal] != fingerprint(encode(document)):
                raise CheckpointMismatch(
                    f"Document {ordinal} of this rank, {document.id!r}, is not the one that was done there before: "
                    "the input, or a step before this one, has changed. Restore it, or start with another "
                    "checkpoints_local_dir."
                )
