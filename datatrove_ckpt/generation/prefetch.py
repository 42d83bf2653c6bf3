"""The documents of a rank, taken from datatrove's generator by one thread, and handed over as they come.

Readers block: on a disk, on S3, on gzip. So they run in a thread of their own; but one hop to a thread and back costs
more than reading a document does (measured: 90 % of datatrove's resume time). So the thread fills a small buffer, and
the event loop takes all there is when it is woken: one hop for many documents, and none waits for others.

A position can be saved, to go on after it, only if every document that came before lies before it, and every later one
behind it. Filters that drop documents keep that; a step that reorders or splits them does not. So a document's position
counts once the next document has come with a later one; where they do not come in order, this run's documents are
counted, as with a reader that has no positions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import types
from collections.abc import AsyncIterator, Iterable
from typing import Any

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.documents import encode, fingerprint
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers import SeekingReader
from datatrove_ckpt.readers.positions import Position, Reading, position_of, position_state

_BUFFER_DOCUMENTS = 128
_BUFFER_CHARACTERS = 2**21
# How long a document waits for the next one, which tells whether a resume may go on after it.
_HOLD_SECONDS = 0.5
_ONE_BY_ONE = ("datatrove.pipeline.filters.", "datatrove.pipeline.formatters.", "datatrove.pipeline.extractors.")
# Before every position there can be.
_FIRST: Any = (-1,)


def stateful_steps(documents: Iterable[Document]) -> list[str]:
    """The steps between the reader and us that may keep something from one document to the next.

    A resume that seeks shows them only what comes after: a filter that counts, samples or writes what it excludes
    would give something else. datatrove's own filters, formatters and extractors look at one document at a time, but
    for two cases; of anybody else's we do not know. A step's generator holds the step and the generator before it.
    """
    steps: list[str] = []
    while isinstance(documents, types.GeneratorType) and documents.gi_frame is not None:
        names = documents.gi_frame.f_locals
        step = names.get("self")
        if isinstance(step, SeekingReader):
            return steps
        if not _is_stateless(step):
            steps.append(type(step).__name__ if step is not None else documents.__name__)
        documents = names.get("data") or ()
    return []  # no reader of ours: there is no position anyway


def _is_stateless(step: object) -> bool:
    if not type(step).__module__.startswith(_ONE_BY_ONE):
        return False
    return getattr(step, "exclusion_writer", None) is None and type(step).__name__ != "SamplerFilter"


class SourceDocument:
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
    """Reads ahead by at most ``_BUFFER_DOCUMENTS`` documents."""

    def __init__(self, documents: Iterable[Document], keep_as_read: bool = False, seek: bool | None = None) -> None:
        self._in_the_way = stateful_steps(documents) if seek is None else []
        self._may_seek = not self._in_the_way if seek is None else seek
        self._documents = iter(documents)
        self._keep_as_read = keep_as_read
        self._reading = Reading()
        self._last: Position | None = None
        self._held: SourceDocument | None = None
        self._previous: SourceDocument | None = None
        self._in_order = True
        self._saved: Position | None = None
        self._lowest: Position | None = None
        self._lock = threading.Lock()
        self._buffer: list[SourceDocument] = []
        self._characters = 0
        self._change = threading.Condition()
        self._closed = False
        self._ended = False
        self._error: BaseException | None = None

    async def batches(self, point: ResumePoint) -> AsyncIterator[list[SourceDocument]]:
        """Every document that is not done, in order. Goes to the first of them by seeking, or by passing the others.

        Raises:
            CheckpointMismatch: the input is shorter than it was, or another.
        """
        loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._loop = loop
        # A daemon, because a reader that is blocked must not keep a process alive that has failed.
        threading.Thread(target=self._run, args=(point,), name="datatrove-ckpt reader", daemon=True).start()
        ended = False
        while not ended:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the arrival.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HOLD_SECONDS):
                    await self._arrived.wait()
            ended, batch = self._take()
            if batch:
                yield batch
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        # A loop that is closed meanwhile has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrived.set)

    def _take(self) -> tuple[bool, list[SourceDocument]]:
        with self._change:
            stalled = not self._arrived.is_set()
            self._arrived.clear()
            batch, self._buffer = self._buffer, []
            self._characters = 0
            if stalled and self._held is not None:
                # The reader is slow: its last document has waited long enough for the next one.
                batch.append(self._held)
                self._held = None
            self._change.notify()
            return self._ended, batch

    def close(self) -> None:
        """Ends the thread, without waiting for a reader that is blocked."""
        with self._change:
            self._closed = True
            self._change.notify()

    # the thread's side -------------------------------------------------------------------------------------------

    def _run(self, point: ResumePoint) -> None:
        try:
            if point.next_ordinal:
                self._skip(point)
            with self._reading:
                for document in self._documents:
                    if not self._put(SourceDocument(self, document, encode(document), self._keep_as_read)):
                        return
            self._release(is_last=True)
        except BaseException as error:  # whatever the reader raised is the rank's to raise
            self._release()
            self._error = error
        finally:
            with self._change:
                self._ended = True
                self._wake()

    def _put(self, read: SourceDocument) -> bool:
        """Hands over the document before this one, and holds this one back until the next. False: nobody waits."""
        self._judge(read)
        with self._change:
            while len(self._buffer) >= _BUFFER_DOCUMENTS or self._characters > _BUFFER_CHARACTERS:
                if self._closed:
                    return False
                self._change.wait()
            self._hand_over()
            self._held = read
            return not self._closed

    def _hand_over(self) -> None:
        if self._held is not None:
            if not self._buffer:
                self._wake()
            self._buffer.append(self._held)
            self._characters += len(self._held.document.text)
            self._held = None

    def _release(self, is_last: bool = False) -> None:
        with self._change:
            if self._previous is not None and is_last:
                self._previous.is_safe = self._in_order and self._last is not None
            self._hand_over()

    def _judge(self, read: SourceDocument) -> None:
        """Whether the document that is held back may be gone on from, now that the next one is known."""
        position = position_of(read.document)
        last, self._last = self._last, position
        previous, self._previous = self._previous, read
        if last is None and previous is None:
            return
        if not self._in_order:
            if self._lowest is not None:
                self._breaks_order(position)
            return
        if position is not None and last is not None and last < position:
            if previous is not None:
                previous.is_safe = True
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
            if position is None or not self._may_seek or (self._lowest is not None and not position < self._lowest):
                return None
            self._saved = position
        return position_state(document)

    def _skip(self, point: ResumePoint) -> None:
        started = time.monotonic()
        if point.position is not None and self._may_seek:
            self._reading = Reading(point.position)
            with self._reading:
                first = list(itertools.islice(self._documents, 1))
            self._documents = itertools.chain(first, self._documents)
            if self._reading.resumed:
                logger.info(f"Went on after {point.next_ordinal} documents in {time.monotonic() - started:.2f} s.")
                return
        with self._reading:
            self._count(point)
        why = (
            f"{', '.join(self._in_the_way)} may keep something from one document to the next. If not, set seek=True."
            if self._in_the_way
            else "this reader cannot seek. JsonlReader, ParquetReader and IpcReader of datatrove_ckpt.readers can, and "
            "take the same arguments."
        )
        seconds = time.monotonic() - started
        logger.info(f"Read past {point.next_ordinal} documents that are done in {seconds:.1f} s, because {why}")

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
