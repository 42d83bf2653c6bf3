"""How a position travels from a reader to whoever saves it, and how a saved one finds its reader again.

There: on the document, in a slot that is not one of the dataclass's fields, so filters pass it on and no writer sees
it. Making one costs a tuple; the state is built only for the documents whose position is saved.

Back: datatrove gives a step a lazy generator, so the readers of a pipeline start at the first ``next``, one after the
other, all in the thread that reads. ``Reading`` is what they find in that thread. They number themselves in the order
of starting, and a state names the number it belongs to. A step attribute would be simpler, but one step object may
run several ranks, and a pipeline may have several readers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias

from datatrove.data import Document

from datatrove_ckpt.errors import CheckpointMismatch

State: TypeAlias = dict[str, Any]

PLAIN_INTEGER = 2**53 - 1  # what any JSON reader keeps exactly


@dataclass(slots=True, eq=False)
class FileOfRun:
    """One file of one run: the part of the state that all its documents share."""

    shared: State

    def state(self, position: Position) -> State:
        _, documents, _, at = position
        return self.shared | {"documents": documents, "at": [number & PLAIN_INTEGER for number in at]}

    def __deepcopy__(self, memo: dict[int, Any]) -> FileOfRun:
        return self


Position: TypeAlias = tuple[int, int, FileOfRun, tuple[int, ...]]
"""Number of the reader, documents it yielded so far, file, place in the file.

Positions of one run compare with ``<`` as they were read: the first two numbers decide.
"""


class PositionedDocument(Document):  # type: ignore[misc, unused-ignore]
    """A document that knows where it was read. Equal to a plain one with the same fields."""

    __slots__ = ("position",)
    __hash__ = None  # type: ignore[assignment]
    position: Position

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        return (self.text, self.id, self.media, self.metadata) == (other.text, other.id, other.media, other.metadata)


def position_of(document: Document) -> Position | None:
    """None for a document that no reader of ours made, or that a step made anew."""
    return getattr(document, "position", None)


def position_state(document: Document) -> State | None:
    """The state of the document's reader right after this document, or None if it has no position."""
    position = position_of(document)
    return position and position[2].state(position)


class Reading:
    """One run of a pipeline, for the readers in it. Enter it in the thread that reads, around every ``next``.

    Args:
        state: where to go on, from ``position_state``; None to start at the beginning.
    """

    def __init__(self, state: State | None = None) -> None:
        self._state = state
        self._started = 0
        self._passed_over = False
        self._taken = False
        self._earlier: list[str] = []

    @property
    def taken(self) -> bool:
        """Whether the readers stand where the state says. Decided once the first ``next`` returned or raised.

        False: no reader in the pipeline can seek, so it starts at the beginning.

        Raises:
            CheckpointMismatch: a reader stood aside for a later one that never came.
        """
        if self._passed_over and not self._taken:
            raise CheckpointMismatch(
                f"The position that was saved is one of reader {(self._state or {})['number']} of the pipeline "
                f"(counted from 0), but only {self._started} of its readers can seek. Restore the pipeline, or start "
                "with another checkpoints_local_dir."
            )
        return self._taken

    def begin(self) -> Start:
        """What the reader that starts now has to do."""
        number, self._started = self._started, self._started + 1
        wanted = -1 if self._state is None else int(self._state.get("number", 0))
        self._taken |= number == wanted
        self._passed_over |= number < wanted
        return Start(number, self._state if number == wanted else None, self._earlier, self._past(number, wanted))

    def _past(self, number: int, wanted: int) -> str | None:
        if number >= wanted:
            return None
        earlier = (self._state or {}).get("earlier", [])
        return str(earlier[number]) if number < len(earlier) else ""

    def __enter__(self) -> Reading:
        _thread.readings.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _thread.readings.pop()


@dataclass(slots=True)
class Start:
    """What one reader is to do.

    Attributes:
        number: its place among the readers of the pipeline.
        state: where to go on, or None.
        earlier: what the readers before it have read; it adds its own when it has done.
        done: what it had read when it had done, or None if it has something to read.
    """

    number: int = 0
    state: State | None = None
    earlier: list[str] = field(default_factory=list)
    done: str | None = None


def begin(loaded: State | None) -> Start:
    """Called by a reader that starts. ``loaded`` is what its ``load_state_dict`` was given."""
    if not _thread.readings:
        return Start(state=loaded)
    start = _thread.readings[-1].begin()
    if loaded is not None and start.state is None and start.done is None:
        start.state = loaded
    return start


class _Thread(threading.local):
    def __init__(self) -> None:
        self.readings: list[Reading] = []


_thread = _Thread()
