"""Carries positions from readers to the checkpoint, and saved positions to their readers.

A document carries its position in a slot that is no dataclass field: filters pass it on, and
writers do not see it. It costs one tuple per document; only saving builds the state.

The readers of a pipeline start lazily, at the first ``next``, and find a ``Reading`` in their
thread. A state has the number of its reader, in the order of starting. An attribute of the step
would not do, because a step may run several ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.counts import InputPosition, SkippedLines
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers.input_progress import FileProgress, InputProgress
from datatrove_ckpt.readers.revisions import Revisions
from datatrove_ckpt.readers.shard_record import ReaderRecord

ReaderState = JsonObject
"""The state of a reader."""

PLAIN_INTEGER = 2**53 - 1  # the largest integer that every JSON reader keeps exactly

FilePosition = tuple[int, ...]
"""A position in a file, right after a document; () is the file's beginning.

Each format defines its numbers.
"""


@dataclass(slots=True, eq=False)
class FileState:
    """The part of a state that all documents of one file share.

    ``input`` and ``file`` measure the progress, if it is known.
    """

    shared: ReaderState
    input: InputProgress | None = None
    file: FileProgress | None = None

    def state(self, position: Position) -> ReaderState:
        _, documents, _, file_position, skipped = position
        at = [number & PLAIN_INTEGER for number in file_position]
        return self.shared | {"documents": documents, "at": at, "skipped": skipped.numbers()}

    def progress(self, position: Position) -> InputPosition:
        if self.input is None or self.file is None:
            return InputPosition()
        reached = self.input.progress(self.file, position[3], position[1])
        return reached._replace(tasks=self.input.inputs.tasks)

    def __deepcopy__(self, memo: dict[int, object]) -> FileState:
        return self

    def __reduce__(self) -> tuple[type[FileState], tuple[ReaderState]]:
        return FileState, (self.shared,)


Position = tuple[int, int, FileState, FilePosition, SkippedLines]
"""Number of the reader, number of documents it has yielded, file, position in the file, lines
skipped so far.

Within one run, the first two numbers order positions as they were read. ``<`` of whole positions
raises TypeError for copies that were pickled.
"""


class PositionedDocument(Document):  # type: ignore[misc, unused-ignore]
    """A document with the position right after it. Equal to a ``Document`` with the same fields."""

    __slots__ = ("position",)
    __hash__ = None  # type: ignore[assignment]
    position: Position

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        return (self.text, self.id, self.media, self.metadata) == (
            other.text,
            other.id,
            other.media,
            other.metadata,
        )


def position_of(document: Document) -> Position | None:
    return getattr(document, "position", None)


def position_state(document: Document) -> ReaderState | None:
    position = position_of(document)
    return position and position[2].state(position)


@dataclass(eq=False, repr=False)
class Reading:
    """One run of a pipeline, for its readers. Enter it in the thread that reads, around every
    ``next``.

    Args:
        state: position at which to resume, from ``position_state``; None: the beginning.
        revisions: the commits of datasets that the job reads; None outside of a job.
    """

    state: ReaderState | None = None
    revisions: Revisions | None = None
    starts: list[ReaderStart] = field(default_factory=list)
    _skipped_a_reader: bool = False
    _resumed: bool = False
    _earlier: list[str] = field(default_factory=list)

    @property
    def resumed(self) -> bool:
        """Whether the readers resumed from the state, after the first ``next``. False if no reader
        can seek.

        Raises:
            CheckpointMismatch: a reader yielded nothing because a later reader should resume, but
                there is no later reader.
        """
        if self._skipped_a_reader and not self._resumed:
            raise CheckpointMismatch(
                f"The saved position belongs to reader {(self.state or {})['number']} of the "
                f"pipeline (counted from 0), but only {len(self.starts)} of its readers can seek. "
                "Restore the pipeline.",
                starts_over="anew",
            )
        return self._resumed

    def start_reader(self) -> ReaderStart:
        number = len(self.starts)
        start = ReaderStart(number, None, self._earlier, skipped=self.skipped)
        self.starts.append(start)
        if self.state is None:
            return start
        resuming = int(self.state.get("number", 0))
        if number == resuming:
            self._resumed = True
            start.state = self.state
            start.skipped = saved_skipped(self.state)
        elif number < resuming:
            self._skipped_a_reader = True
            start.finished_digest = ""
            earlier = self.state.get("earlier", [])
            if number < len(earlier):
                start.finished_digest = str(earlier[number])
        return start

    @property
    def skipped(self) -> SkippedLines:
        """The lines that the readers have skipped so far, in all attempts."""
        if not self.starts:
            return SkippedLines()
        return self.starts[-1].skipped

    def __enter__(self) -> Reading:
        _thread.readings.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _thread.readings.pop()


@dataclass(slots=True)
class ReaderStart:
    """The start of one reader, and its record at the end.

    Attributes:
        number: number of the reader in the pipeline, from 0.
        earlier: digest of each finished reader's input, in order.
        finished_digest: digest of this reader's input, if it finished before the save; else None.
        skipped: lines skipped so far by this reader and earlier readers.
        skipped_in: files with skipped lines, and whether a line was damaged.
        record: makes the record of the reader's input, once it has finished.
    """

    number: int = 0
    state: ReaderState | None = None
    earlier: list[str] = field(default_factory=list)
    finished_digest: str | None = None
    skipped: SkippedLines = SkippedLines()
    skipped_in: dict[str, bool] = field(default_factory=dict)
    record: Callable[[], ReaderRecord] | None = None

    def note_skipped(self, name: str, before: SkippedLines, has_documents: bool) -> None:
        """Records skipped lines at the end of a file, and warns of a file without documents."""
        if self.skipped == before:
            return
        self.skipped_in[name] = self.skipped.damaged > before.damaged
        if not has_documents:
            advice = ""
            if self.skipped.without_text > before.without_text:
                advice = " Is text_key correct for this file?"
            logger.warning(
                f"The input file {name!r} gave no document: no line or row of it is one.{advice}"
            )


def start_reader(loaded: ReaderState | None) -> ReaderStart:
    """Returns the start of a reader whose ``load_state_dict`` has received the state ``loaded``."""
    if not _thread.readings:
        return ReaderStart(state=loaded, skipped=saved_skipped(loaded))
    start = _thread.readings[-1].start_reader()
    if loaded is not None and start.state is None and start.finished_digest is None:
        start.state = loaded
        start.skipped = saved_skipped(loaded)
    return start


def job_revisions() -> Revisions | None:
    if not _thread.readings:
        return None
    return _thread.readings[-1].revisions


def in_pipeline() -> bool:
    return bool(_thread.readings)


def saved_skipped(state: ReaderState | None) -> SkippedLines:
    if state is None or "file" not in state:  # the state before the first document
        return SkippedLines()
    return SkippedLines.of_numbers(state.get("skipped", ()))


class _ThreadReadings(threading.local):
    def __init__(self) -> None:
        self.readings: list[Reading] = []


_thread = _ThreadReadings()


Row = dict[str, Any]
"""A row of the input, from JSON or Arrow: values of any type."""


class BadRow(NamedTuple):
    """A line or row that cannot be read: the error, and the beginning of its text."""

    error: object
    begin: str = ""


ReadRow = tuple[Row | BadRow | None, int | None, FilePosition, int]
"""A row, the default id of its document, the position right after it, and its number for people.

A row that is None is an empty text. An id that is None becomes the number of documents before, if
positions of the file do not have this number.
"""


class RowBlock(NamedTuple):
    """Consecutive rows of one file, which are read before the next block.

    ``where`` names a row for people, with {} for its number.
    """

    where: str
    rows: Iterable[ReadRow]


FileRead = Iterator[tuple[Document | SkippedLines, FilePosition]]
"""The documents or skipped lines of one file, each with the position right after it."""

ALL_ROWS = (0, 1)
"""The share of rows that is all rows: every first row, from row 0 on."""
