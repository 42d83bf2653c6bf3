"""Null checkpoint: writes finished documents to the user's writer, and keeps nothing for a resume.

It has the methods of ``OpenCheckpoint``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.chunks import Chunk, ChunkSlot
from datatrove_ckpt.checkpoint.clock import RankClock
from datatrove_ckpt.checkpoint.history import Progress, Record
from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.checkpoint.numbers import Done
from datatrove_ckpt.checkpoint.open_checkpoint import LastRecords, OpenCheckpoint, no_records
from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey
from datatrove_ckpt.checkpoint.storage import MAX_BACKLOG_BYTES
from datatrove_ckpt.errors import CkptError, OutputFailed
from datatrove_ckpt.output.documents import decode
from datatrove_ckpt.output.file_managers import RemoteFiles
from datatrove_ckpt.output.names import FileNames, OurTemplate
from datatrove_ckpt.process.shutdown import Shutdown

_DRAIN_SECONDS = 1.0


class NullCheckpoint:
    """Writes finished documents in a thread of its own, in the order in which they finish."""

    def __init__(
        self, writer: DiskWriter, rank: int, records_per_chunk: int, shutdown: Shutdown
    ) -> None:
        self.has_locks = True  # it needs none
        self.publishing = 0
        self.publishing_behind = False
        self.resumed = ResumePoint()
        self._done = Done()
        self.clock = RankClock()
        self.on_change: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        if not writer.output_folder.is_local():
            files = writer.output_mg
            writer.output_mg = RemoteFiles(files.fs, files.mode, files.compression)
        self._names = FileNames(writer, rank)
        self._template = writer.output_filename
        writer.output_filename = OurTemplate(self._names)
        self._writer = writer
        self._shutdown = shutdown
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._closed = False
        self._rank = rank
        self._records_per_chunk = records_per_chunk
        self._admitted = 0
        self._handed_over = 0
        self._written = 0
        self._queue: queue.SimpleQueue[tuple[ChunkSlot, Finished] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="datatrove-ckpt writer", daemon=True).start()

    def close(self, completed: bool = False, last_records: LastRecords = no_records) -> None:
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        # A stop does not wait for a blocked writer: there is nothing to save.
        self._shutdown.join(self._ended, running=None, draining=_DRAIN_SECONDS)
        try:
            if completed and self.error is None:
                self._writer.close()
        finally:
            self._writer.output_filename = self._template
            files = self._writer.output_mg  # some may not have been closed
            if isinstance(files, RemoteFiles):
                files.abandon()
            for file in files.get_open_files().values():
                with suppress(Exception):
                    file.flush()
            files.get_open_files().clear()

    def flush(self) -> None:
        """Returns at once: nothing is kept for a resume."""

    def note(self, *records: Record) -> None:
        """Drops the records: there is no folder for a history."""

    def fill_in(self, progress: Progress) -> None:
        progress.in_work = self._admitted - self._done.counts.read
        progress.seconds = self.clock.now()
        progress.documents = self._done.counts

    def admit(
        self, fingerprint: str, position: Callable[[], object] = lambda: None
    ) -> ChunkSlot | None:
        chunk = Chunk(self._admitted // self._records_per_chunk, 0)
        slot = ChunkSlot(self._admitted, chunk, cached=False)
        self._admitted += 1
        return slot

    def lookup(self, slot: ChunkSlot, receive: Callable[[dict[AnswerKey, Answer]], None]) -> None:
        receive({})

    def put_answer(self, slot: ChunkSlot, doc_id: str, key: AnswerKey, answer: Answer) -> None:
        pass

    def finish(self, slot: ChunkSlot, finished: Finished) -> None:
        self.raise_failure()
        self._done += Done.of([finished.took])
        if finished.outcome == "written":
            self._handed_over += len(finished.document)
            self._queue.put((slot, finished))

    def end_of_input(self, shard: object = None) -> None:
        pass

    def hurry(self) -> None:
        pass

    def raise_failure(self) -> None:
        if self.error is not None:
            raise self.error

    @property
    def done(self) -> Done:
        return replace(self._done, seconds=self.clock.now())

    @property
    def congested(self) -> bool:
        return self._handed_over - self._written > MAX_BACKLOG_BYTES

    @property
    def all_committed(self) -> bool:
        return self._handed_over == self._written

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                slot, finished = item
                self._write(slot, finished)
                self._written += len(finished.document)
                if self._queue.empty() or not self.congested:
                    self.on_change()
        except BaseException as error:  # any failure must reach the event loop
            self.error = error
            self.on_change()
        finally:
            self._ended.put(True)

    def _write(self, slot: ChunkSlot, finished: Finished) -> None:
        document = decode(finished.document)
        try:
            self._writer.write(
                document, self._rank, **self._names.keywords(document, slot.chunk.index)
            )
        except CkptError:
            raise
        except Exception as error:
            raise OutputFailed(
                f"Document {document.id!r} (number {slot.ordinal} of this task) could not be "
                f"written by {type(self._writer).__name__}: {type(error).__name__}: {error}. This "
                "run has no checkpoint (checkpoints_local_dir is not set), so the next one starts "
                "over."
            ) from error


Checkpoint = OpenCheckpoint | NullCheckpoint
"""One rank's checkpoint, open."""
