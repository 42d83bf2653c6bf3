"""Reads a rank's documents in a thread, ahead of the event loop, and passes them on in batches.

Switching threads costs more than reading a document, so the event loop takes a buffer whole.

A resume may seek to a position only if earlier documents came before it and later ones come after
it. A step that reorders or splits documents breaks this order. So a position is used only after the
next document has come with a later position; otherwise a resume counts documents.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence, Sized
from copy import deepcopy

from datatrove.data import Document
from datatrove.pipeline.readers.base import BaseReader
from loguru import logger

from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.common.counts import InputPosition, SkippedLines
from datatrove_ckpt.common.formatting import safe_repr, safe_text
from datatrove_ckpt.common.threads import context_thread
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.generation.finished_from import FinishedDocuments, OldDocument
from datatrove_ckpt.generation.user_frames import stands_at
from datatrove_ckpt.output.document_codec import EncodedInput, as_read, fingerprint, trim
from datatrove_ckpt.process.event_loop import end_fork
from datatrove_ckpt.process.fork_boundaries import between_forks
from datatrove_ckpt.process.shutdown import exit_error
from datatrove_ckpt.readers import SeekingReader
from datatrove_ckpt.readers.inputs import (
    Position,
    ReaderState,
    Reading,
    Revisions,
    position_of,
    position_state,
)
from datatrove_ckpt.readers.pipeline import STATS, PipelineReaders, StepStats, steps_before
from datatrove_ckpt.readers.shard_record import StepRecord

# A step sees only the remaining documents after a resume that seeks, so a step that counts, samples
# or removes duplicates would give another result. The listed steps treat each document alone.

# Without LambdaFilter (a user's function), SamplerFilter and C4BadWordsFilter (random numbers), and
# PIIFormatter (replacements in turn).
_STATELESS = frozenset(
    f"datatrove.pipeline.{name}"
    for name in (
        "extractors.modular.ReadabilityInscriptis",
        "extractors.trafilatura.Trafilatura",
        "filters.c4_filters.C4ParagraphFilter",
        "filters.c4_filters.C4QualityFilter",
        "filters.fasttext_filter.FastTextClassifierFilter",
        "filters.fineweb_quality_filter.FineWebQualityFilter",
        "filters.gopher_quality_filter.GopherQualityFilter",
        "filters.gopher_repetition_filter.GopherRepetitionFilter",
        "filters.language_filter.LanguageFilter",
        "filters.regex_filter.RegexFilter",
        "filters.unigram_log_probs.UnigramLogProbFilter",
        "filters.url_filter.URLFilter",
        "formatters.ftfy.FTFYFormatter",
        "formatters.symbol_lines_remover.SymbolLinesFormatter",
    )
)


def stateful_steps(documents: Iterable[Document]) -> list[str]:
    """Returns the names of the steps that may keep state, the last step first. Empty if there are
    readers and none seeks.
    """
    steps = []
    readers: list[BaseReader] = []
    last = type(documents).__name__
    for step, last, _ in steps_before(documents):
        if isinstance(step, BaseReader):
            readers.append(step)
        if isinstance(step, SeekingReader):
            steps += step.may_keep_state()
            continue
        kind = type(step)
        is_stateless = f"{kind.__module__}.{kind.__qualname__}" in _STATELESS
        if not is_stateless or getattr(step, "exclusion_writer", None) is not None:
            steps.append(last)
    if not readers:  # a step hides the steps before it
        return steps or [last]
    if any(isinstance(reader, SeekingReader) for reader in readers):
        return steps
    return []


# Interval at which the loop polls the buffer. Waking the loop for each document would cost more.
_LOOK_SECONDS = 0.005
_BUFFER_DOCUMENTS = 128
_BUFFER_BYTES = 2**21


class SourceDocument:
    """A document with its input's fingerprint.

    Attributes:
        id: printable id from the input. A rollout may change the document.
        stats: of the steps before the runner, after a chunk's last document.
        finished: metadata with results, if an old output has them.
    """

    def __init__(
        self,
        documents: DocumentSource,
        document: Document,
        read: EncodedInput,
        keep: bool,
        stats: ReaderState | None,
        finished: OldDocument | None,
    ) -> None:
        self.document = document
        self.id = safe_text(document.id)
        self.size = read.size
        self.fingerprint = fingerprint(read.data)
        self._as_read: Document | bytes | None = trim(read.data) if keep else None
        if keep and read.size > 2**16:  # bytes from which text and media are not copied
            with contextlib.suppress(Exception):
                self._as_read = deepcopy(document)  # texts and bytes are shared
        self.resumable = False
        self.stats = stats
        self.finished = finished
        self._documents = documents

    @property
    def as_read(self) -> bytes | None:
        if isinstance(self._as_read, Document):
            return as_read(self._as_read).data
        return self._as_read

    def position(self) -> ReaderState | None:
        if self.resumable:
            return self._documents.save(self.document, self.stats)
        return None


class DocumentSource:
    def __init__(
        self,
        documents: Iterable[Document],
        keep_as_read: bool = False,
        seek: bool | None = None,
        pipeline: Sequence[StepRecord] | None = None,
        revisions: Revisions | None = None,
        records_per_chunk: int = 1,
        finished: FinishedDocuments | None = None,
    ) -> None:
        self._finished = finished
        self._revisions = revisions
        self._stats = StepStats(documents)
        self._records_per_chunk = records_per_chunk
        self._read = 0
        self._stateful_steps = stateful_steps(documents) if seek is None else []
        self._may_seek = not self._stateful_steps if seek is None else seek
        self._readers = PipelineReaders(documents, pipeline)
        self._documents = between_forks(documents)
        self._keep_as_read = keep_as_read
        self._reading = Reading(revisions=revisions)
        self._previous: SourceDocument | None = None
        self._last: Position | None = None  # of the previous document
        self._in_order = True
        self._saved: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._room = threading.Event()  # set at each poll, so that a missed wake-up does no harm
        self._buffer: list[SourceDocument] = []
        self._bytes = 0
        self._closed = False
        self._ended = False
        self.error: BaseException | None = None
        self._shard: ReaderState = {}
        self.handed_over = 0
        """Number of documents."""
        self._newest: Position | None = None
        self._length = len(documents) if isinstance(documents, Sized) else None
        self._first = 0
        self.has_begun = False
        self._taken_at = math.inf  # the last documents; before them the start
        self._thread = threading.get_ident()  # of the reader, once it has begun

    @property
    def skipped(self) -> SkippedLines:
        return self._reading.skipped

    async def batches(self, point: ResumePoint) -> AsyncIterator[list[SourceDocument]]:
        """Yields the documents that are not done, in order. Skips the others by seeking or reading.

        An ``error`` ends the input: ``CheckpointMismatch`` if the input has shrunk or changed;
        ``InputError`` if a file is damaged or cut off, or no row of any file is a document; or the
        error of a step before the runner.
        """
        self._first = point.next_ordinal
        self.has_begun = True
        self._taken_at = time.monotonic()
        # A daemon, because a blocked reader must not keep a failed process running.
        context_thread(self._run, "datatrove-ckpt reader", point)
        ended = False
        while not ended:
            ended = self._ended  # nothing is put after this
            # In this order, the reader may count a document that is no longer in the buffer, until
            # the next poll. A lock would cost more for each document than its place in the buffer.
            self._bytes = 0
            batch = self._buffer.copy()
            del self._buffer[: len(batch)]
            if not self._room.is_set():  # setting a set event takes its lock, too
                self._room.set()
            if batch:
                self._taken_at = time.monotonic()
                self.handed_over += len(batch)
                self._newest = position_of(batch[-1].document)
                yield batch
            elif not ended:
                await asyncio.sleep(_LOOK_SECONDS)

    @property
    def is_at_end(self) -> bool:
        return self._ended and self.error is None and not self._buffer

    def stands(self, seconds: float) -> str:
        """Returns the place where the reader stands, such as ", in job.py, line 9 (pages)", if it
        has given no document for so many seconds; else "".
        """
        if self._buffer or self._ended or time.monotonic() < self._taken_at + seconds:
            return ""
        return stands_at(self._thread)

    def progress(self) -> InputPosition:
        if not self.has_begun:
            return InputPosition()
        if self._length is not None:
            return InputPosition(self._first + self.handed_over, self._length, "rows")
        if self._newest is None or self._readers.count != 1:
            return InputPosition()
        return self._newest[2].progress(self._newest)

    def shard(self) -> ReaderState:
        return self._shard | self._stats.at_end(self._read)

    def add_earlier_stats(self) -> None:
        self._stats.finish(self._read)

    def close(self) -> None:
        self._closed = True
        self._room.set()
        if self._finished is not None:
            self._finished.close()

    # in the reader's thread ----------------------------------------------------------------------

    def _run(self, point: ResumePoint) -> None:
        pid = os.getpid()
        self._thread = threading.get_ident()
        try:
            self._readers.start()
            if point.next_ordinal:
                self._skip(point)
            ends = point.chunk_ends(self._records_per_chunk)
            ordinal = point.next_ordinal
            end = next(ends)
            with self._reading:
                for document in self._documents:
                    end_fork(pid)
                    read = as_read(document)
                    finished = None
                    if self._finished is not None:
                        finished = self._finished.take(document)
                    stats = None
                    ordinal += 1
                    if ordinal == end:
                        stats = self._stats.saved()
                        end = next(ends)
                    source = SourceDocument(
                        self, document, read, self._keep_as_read, stats, finished
                    )
                    self._check_order(source)
                    while len(self._buffer) >= _BUFFER_DOCUMENTS or self._bytes > _BUFFER_BYTES:
                        self._room.clear()
                        if self._closed:
                            return
                        self._room.wait()
                    self._bytes += source.size
                    self._buffer.append(source)
                    if self._closed:
                        return
            self._read = ordinal - point.next_ordinal
            if record := self._readers.finish(self._reading):
                self._shard = record.to_json()
            last = self._previous
            if last is not None:
                last.resumable = self._in_order and self._last is not None
                last.stats = last.stats or self._stats.saved(ended=True)
        except BaseException as error:  # the rank raises the reader's error
            end_fork(pid, error)
            if isinstance(error, Exception):
                self.error = error
            else:
                self.error = exit_error("The reader, or a step after it,", error)
        finally:
            self._ended = True

    def _check_order(self, source: SourceDocument) -> None:
        """Decides whether a resume may start after the previous document."""
        position = position_of(source.document)
        last = self._last
        previous = self._previous
        self._last = position
        self._previous = source
        if previous is None:
            return
        # The first two numbers of a position give the order of reading.
        if self._in_order and position and last and last[:2] < position[:2]:
            previous.resumable = True
            return
        with self._lock:
            was_in_order = self._in_order
            self._in_order = False
        if was_in_order and (last is not None or position is not None):
            logger.info(
                "A step between the reader and InferenceRunner reorders or multiplies documents: "
                "a resume will read from the start."
            )
        if self._saved is not None and (position is None or position[:2] <= self._saved):
            raise ConfigError(
                "A step between the reader and InferenceRunner reorders or multiplies documents, "
                "so a resume would lose some. Use datatrove's own reader.",
                starts_over="anew",
            )

    def save(self, document: Document, stats: ReaderState | None = None) -> ReaderState | None:
        """Returns the state after a resumable document. Called on the storage thread."""
        position = position_of(document)
        with self._lock:
            if position is None or not (self._may_seek and self._in_order):
                return None
            # Chunks are committed in any order.
            self._saved = max(self._saved or position[:2], position[:2])
        state = position_state(document)
        if state is None or stats is None:
            return state
        return state | {STATS: stats}

    def _skip(self, point: ResumePoint) -> None:
        started = time.monotonic()
        how = "by seeking"
        if point.position is not None and self._may_seek:
            self._reading = Reading(point.position, self._revisions)
            with self._reading:
                first = list(itertools.islice(self._documents, 1))
            self._documents = itertools.chain(first, self._documents)
        if point.position is not None and self._reading.resumed:
            self._stats.resume(point.position)
        else:
            with self._reading:
                self._skip_by_reading(point)
            reason = "this reader cannot seek. Those of datatrove_ckpt.readers can"
            if self._stateful_steps:
                steps = ", ".join(self._stateful_steps)
                reason = f"{steps} may keep state between documents. If not, set seek=True"
            how = f"by reading them, because {reason}"
        seconds = time.monotonic() - started
        logger.info(f"Skipped {point.next_ordinal} finished documents in {seconds:.2f} s, {how}.")

    def _skip_by_reading(self, point: ResumePoint) -> None:
        for ordinal in range(point.next_ordinal):
            document = next(self._documents, None)
            if document is None:
                raise CheckpointMismatch(
                    f"The input ended after {ordinal} documents, but {point.next_ordinal} were "
                    "done: it or the reader's limit has shrunk. Restore it.",
                    starts_over="with old results",
                )
            if ordinal in point.milestones and point.milestones[ordinal] != fingerprint(
                as_read(document).data
            ):
                raise CheckpointMismatch(
                    f"Document {ordinal} of this task, {safe_repr(document.id)}, is not the one "
                    "that was done there: the input, or an earlier step, has changed. Restore it.",
                    starts_over="with old results",
                )
