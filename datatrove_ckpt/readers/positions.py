"""How a position gets from a reader to the checkpoint, and how a saved position finds its reader again.

From the reader: on the document, in a slot that is not one of the dataclass's fields. Filters pass it on, and writers
do not see it. A position costs one tuple per document; the state is built only for documents whose position is saved.

Back to the reader: datatrove gives a step a lazy generator, so the readers of a pipeline start at the first ``next``,
one after the other, all in the thread that reads. They find a ``Reading`` in that thread. They number themselves in the
order of starting, and a state names the number of its reader. An attribute of the step would be simpler, but one step
object may run several ranks, and a pipeline may have several readers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.checkpoint.skipped import Skipped, SkippedLines
from datatrove_ckpt.doors import StartOver
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers.revisions import Revisions
from datatrove_ckpt.readers.shard import ReaderRecord

# How large a rank's input is, and how much of it lies before a document: for percent and time left, nothing else.
#
# The unit is bytes of the input files as they are stored, because a listing knows them; compressed files count with
# their compressed bytes. Only datasets that know their rows count rows. Within a file, the format says how its places
# become bytes (``FileExtent``). This costs nothing per document: a position refers to its file's extent, and is looked
# at once a minute.
#
# No file is opened for this, and no row is counted: a footer is used once the file is read anyway.


Unit: TypeAlias = Literal["bytes", "rows"]

# More files than this are measured in a thread, because a stat may take a millisecond and a request 50; and of more
# than _MEASURED, some are measured, for a mean. Remote ones cost requests, which the hub counts.
_AT_ONCE = 64
_MEASURED, _MEASURED_REMOTE = 1000, 50
# Of fewer files than this, it is not enough to know which ones are done.
_FINE = 20


class MeasuredInputs(Protocol):
    """See ``inputs.Inputs``."""

    @property
    def names(self) -> Sequence[str]: ...
    def size_for_people(self, index: int) -> int: ...


class Reached(NamedTuple):
    """How much of an input is done. ``done`` and ``total`` in ``unit``; None: not known."""

    done: int
    total: int | None
    unit: Unit | None


UNKNOWN = Reached(0, None, None)


@dataclass(slots=True, eq=False)
class FileExtent:
    """One file of an input, and how a place in it becomes a part of it. A format fills it in when it opens the file.

    Attributes:
        before: bytes, or rows, of the files before this one.
        size: of this file.
        first: the first number of the file's first place.
        per: bytes, or rows, for each that this number is larger; None: nobody said.
        starts: if the first number of a place is a group of rows, and the second a row of it: which part of the file
            lies before each group, from 0 to 1, with a last 1.
        lengths: rows of a group, as far as they are known.
        end: where the reading of a file ended that may grow meanwhile; None before the end.
    """

    before: float = 0.0
    size: float = 0.0
    first: int = 0
    per: float | None = None
    starts: list[float] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    end: int | None = None

    def set_groups(self, rows: list[int], first: int) -> None:
        """The groups have so many rows, in the order in which they are read."""
        total = max(1, sum(rows))
        self.starts = [before / total for before in accumulate(rows, initial=0)]
        self.lengths, self.first = dict(enumerate(rows)), first

    def reached(self, place: tuple[int, ...]) -> float:
        """What lies before the place in the input, with the files before this one."""
        return self.before + self.inside(place)

    def inside(self, place: tuple[int, ...]) -> float:
        """What lies before the place in the file."""
        if not place:
            return 0.0
        number, inside = place[0] - self.first, 0.0
        if 0 <= number < len(self.starts) - 1:
            start, end = self.starts[number : number + 2]
            part = place[1] / max(1, self.lengths.get(number, place[1]))
            inside = self.size * (start + (end - start) * min(1.0, part))
        elif self.per is not None:
            inside = number * self.per
        return max(0.0, min(float(self.size), inside))


class InputExtent:
    """The input of one reader in one rank.

    Args:
        limit: most documents that the reader yields; -1: all.
        rows: in the input, if that is known. Then rows are counted, in files taken for equal.
        is_near: a size costs no request.
    """

    def __init__(self, inputs: MeasuredInputs, limit: int, rows: int | None = None, is_near: bool = True) -> None:
        self.total: float | None = rows
        """In ``unit``; None: not known, or not yet: see ``measure``."""
        self.unit: Unit = "bytes" if rows is None else "rows"
        self.measuring: threading.Thread | None = None
        """Looks the sizes up; None: nobody has asked for them, or they are known at once."""
        self._inputs = inputs
        self._limit = limit
        self._is_near = is_near
        self._is_measured = rows is not None

    @property
    def is_measuring(self) -> bool:
        """Sizes are being looked up."""
        return self.measuring is not None and self.measuring.is_alive()

    def file(self, index: int, bytes_before: int, size: int) -> FileExtent:
        """The extent of one file, whose format is still to fill it in."""
        if self.unit == "rows":
            share = (self.total or 0) / max(1, len(self._inputs.names))
            return FileExtent(before=index * share, size=share, per=1.0)
        return FileExtent(before=bytes_before, size=size)

    def measure(self) -> None:
        """Looks the sizes up, once; beside the reading if that may take long. Not before somebody wants to know."""
        if self._is_measured:
            return
        self._is_measured = True
        if self._is_near and len(self._inputs.names) <= _AT_ONCE:
            self._measure()
        else:
            self.measuring = threading.Thread(target=self._measure, name="datatrove-ckpt sizes", daemon=True)
            self.measuring.start()

    def _measure(self) -> None:
        # Whatever goes wrong here, the reader says it better when it comes to the file.
        with suppress(Exception):
            count = len(self._inputs.names)
            most = _MEASURED if self._is_near else _MEASURED_REMOTE
            chosen = range(0, count, -(-count // most)) if count else range(0)
            sizes = [self._inputs.size_for_people(index) for index in chosen]
            if not count or any(sizes):
                self.total = sum(sizes) * count / max(1, len(sizes))

    def reached(self, file: FileExtent, place: tuple[int, ...], documents: int) -> Reached:
        """How much of the input lies before a place, after so many documents of this rank."""
        self.measure()
        done = file.reached(place)
        coarse = file.per is None and not file.starts
        known = self.total is not None and not (coarse and len(self._inputs.names) < _FINE)
        share = done / self.total if known and self.total else 0.0
        if self._limit > 0 and documents / self._limit >= share:
            return Reached(min(documents, self._limit), self._limit, "rows")
        if not known:
            return Reached(int(done), None, self.unit) if done else UNKNOWN
        return Reached(min(int(done), int(self.total or 0)), int(self.total or 0), self.unit)


State: TypeAlias = dict[str, Any]
"""The state of a reader: plain JSON values."""

PLAIN_INTEGER = 2**53 - 1  # every JSON reader keeps integers up to this one exactly

FilePosition: TypeAlias = tuple[int, ...]
"""A place in a file, right after a document; () is the file's beginning. Each format defines its numbers."""


@dataclass(slots=True, eq=False)
class FileState:
    """The part of a state that all documents of one file in one run share.

    ``input`` and ``file``: how large they are, for people; None: not known.
    """

    shared: State
    input: InputExtent | None = None
    file: FileExtent | None = None

    def state(self, position: Position) -> State:
        """The reader's state at the position, which is in this file."""
        _, documents, _, file_position, skipped = position
        at = [number & PLAIN_INTEGER for number in file_position]
        return self.shared | {"documents": documents, "at": at, "skipped": skipped.to_json()}

    def reached(self, position: Position) -> Reached:
        """How much of the reader's input comes before the position, which is in this file."""
        if self.input is None or self.file is None:
            return UNKNOWN
        return self.input.reached(self.file, position[3], position[1])

    @property
    def is_measuring(self) -> bool:
        """How large the input is may be known soon."""
        return self.input is not None and self.input.is_measuring

    def __deepcopy__(self, memo: dict[int, object]) -> FileState:
        return self

    def __reduce__(self) -> tuple[type[FileState], tuple[State]]:
        return FileState, (self.shared,)


Position: TypeAlias = tuple[int, int, FileState, FilePosition, SkippedLines]
"""Number of the reader, number of documents it has yielded, file, place in the file, lines skipped so far.

Within one run, ``<`` orders positions as they were read: the first two numbers decide.
"""


class PositionedDocument(Document):  # type: ignore[misc, unused-ignore]
    """A document with the position right after it. Equal to a plain one with the same fields."""

    __slots__ = ("position",)
    __hash__ = None  # type: ignore[assignment]
    position: Position

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        return (self.text, self.id, self.media, self.metadata) == (other.text, other.id, other.media, other.metadata)


def position_of(document: Document) -> Position | None:
    """None if the document was made by another reader, or made anew by a step."""
    return getattr(document, "position", None)


def position_state(document: Document) -> State | None:
    """The state of the document's reader right after this document, or None if it has no position."""
    position = position_of(document)
    return position and position[2].state(position)


@dataclass(eq=False, repr=False)
class Reading:
    """One run of a pipeline, as its readers see it. Enter it in the thread that reads, around every ``next``.

    Args:
        state: where to resume, from ``position_state``; None to start at the beginning.
        revisions: the commits of datasets that the job reads; None outside of a job.
    """

    state: State | None = None
    revisions: Revisions | None = None
    starts: list[ReaderStart] = field(default_factory=list)
    _skipped_a_reader: bool = False
    _resumed: bool = False
    _earlier: list[str] = field(default_factory=list)

    @property
    def resumed(self) -> bool:
        """Whether the readers resumed from the state. Decided once the first ``next`` returned or raised.

        False: no reader in the pipeline can seek, so it starts at the beginning.

        Raises:
            CheckpointMismatch: a reader yielded nothing because a later one should resume, but there is no later one.
        """
        if self._skipped_a_reader and not self._resumed:
            raise CheckpointMismatch(
                f"The saved position belongs to reader {(self.state or {})['number']} of the pipeline (counted from "
                f"0), but only {len(self.starts)} of its readers can seek. Restore the pipeline, or start with ",
                StartOver(),
                ".",
            )
        return self._resumed

    def start_reader(self) -> ReaderStart:
        """How the reader that starts now starts."""
        number = len(self.starts)
        resuming = -1 if self.state is None else int(self.state.get("number", 0))
        self._resumed |= number == resuming
        self._skipped_a_reader |= number < resuming
        state = self.state if number == resuming else None
        start = ReaderStart(number, state, self._earlier)
        if number < resuming:
            earlier = (self.state or {}).get("earlier", [])
            start.finished_digest = str(earlier[number]) if number < len(earlier) else ""
        start.skipped = saved_skipped(state) if state is not None else self.skipped
        self.starts.append(start)
        return start

    @property
    def skipped(self) -> SkippedLines:
        """How many lines the readers have skipped so far, in this attempt and the earlier ones."""
        return self.starts[-1].skipped if self.starts else SkippedLines()

    def __enter__(self) -> Reading:
        _thread.readings.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _thread.readings.pop()


@dataclass(slots=True)
class ReaderStart:
    """How one reader starts.

    Attributes:
        number: the reader's number among the readers of the pipeline, from 0.
        state: where to resume, or None.
        earlier: the digest of what each reader before this one has read. A reader adds its own when it has finished.
        finished_digest: the digest of what this reader read, if it had finished before the state was saved; else None.
        skipped: lines skipped so far by this reader and those before it. The reader adds to it.
        skipped_in: files in which this reader has skipped lines, and whether one of them was damaged.
        record: makes the record of what the reader has read; None before it has finished.
    """

    number: int = 0
    state: State | None = None
    earlier: list[str] = field(default_factory=list)
    finished_digest: str | None = None
    skipped: SkippedLines = field(default_factory=SkippedLines)
    skipped_in: dict[str, bool] = field(default_factory=dict)
    record: Callable[[], ReaderRecord] | None = None

    def first_in_file(self, documents: int) -> int:
        """How many documents come before the state's file; ``documents`` if an earlier release made the state."""
        return int((self.state or {}).get("file", {}).get("first", documents))

    def note_skipped(self, name: str, before: SkippedLines, has_documents: bool) -> None:
        """Called at the end of a file, with what was skipped before it. Says it of a file that gave no document."""
        if self.skipped == before:
            return
        self.skipped_in[name] = self.skipped.damaged > before.damaged
        if not has_documents:
            self.skipped = self.skipped.plus_file(name)
            logger.warning(f"The input file {name!r} gave no document: no line or row of it is one.")


def start_reader(loaded: State | None) -> ReaderStart:
    """Called by each reader when it starts. ``loaded`` is the state that its ``load_state_dict`` got."""
    if not _thread.readings:
        return ReaderStart(state=loaded, skipped=saved_skipped(loaded))
    start = _thread.readings[-1].start_reader()
    if loaded is not None and start.state is None and start.finished_digest is None:
        start.state, start.skipped = loaded, saved_skipped(loaded)
    return start


def job_revisions() -> Revisions | None:
    """The commits that the job reads for which this thread reads."""
    return _thread.readings[-1].revisions if _thread.readings else None


def in_pipeline() -> bool:
    """Whether this thread reads for a runner, and not for a program of the user's."""
    return bool(_thread.readings)


def saved_skipped(state: State | None) -> SkippedLines:
    if state is None or "file" not in state:  # the state before the first document
        return SkippedLines()
    return SkippedLines.from_json(state["skipped"]) if "skipped" in state else SkippedLines(at_least=True)


class _ThreadReadings(threading.local):
    def __init__(self) -> None:
        self.readings: list[Reading] = []


_thread = _ThreadReadings()


# What formats give to ``SeekingReader`` ------------------------------------------------------------------------------

Row: TypeAlias = dict[str, Any]
"""A row of the input, as JSON or Arrow gives it: values of any type."""

Adapter: TypeAlias = Callable[..., Row]
"""datatrove's adapter: (reader, row, path, id_in_file) -> the fields of a document."""

ReadResult: TypeAlias = tuple[Document | Skipped, FilePosition]
"""A document, or why a line or row is none, and the place in the file right after it."""

FileRead: TypeAlias = Generator[ReadResult, None, None]
"""What a format reads of one file."""

RowShard: TypeAlias = tuple[int, int]
"""(index, count): every ``count``-th line or row of a file, from ``index`` on."""

ALL_ROWS: RowShard = (0, 1)

ShardKey: TypeAlias = list[int | str]
"""The part of the input that a run reads, as its state names it: [rank, world_size], or [index, count, "rows"]."""
