"""How large a rank's input is, and how much of it lies before a document: for percent and time left, nothing else.

The unit is bytes of the input files as they are stored, because a listing knows them; compressed files count with
their compressed bytes. Within a file, the format says how its places become bytes (``FileExtent``). This costs nothing
per document: a position refers to its file's extent, and is looked at once a minute.

No file is opened for this, and no row is counted: a footer is used once the file is read anyway.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol, TypeAlias

Unit: TypeAlias = Literal["bytes", "rows"]

# More files than this are measured in a thread, because a stat may take a millisecond and a request 50; and of more
# than _MEASURED, some are measured, for a mean. Remote ones cost requests, which the hub counts.
_AT_ONCE = 64
_MEASURED = 1000
_MEASURED_REMOTE = 50
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
        before: bytes of the files before this one.
        size: of this file.
        per: bytes for each that the first number of a place is larger; None: not known.
        starts: if the first number of a place is a group of rows, and the second a row of it: which part of the file
            lies before each group, from 0 to 1, with a last 1.
        lengths: rows of a group, as far as they are known.
        end: where the reading of a file ended that may grow meanwhile; None before the end.
    """

    before: float = 0.0
    size: float = 0.0
    per: float | None = None
    starts: list[float] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    end: int | None = None

    def set_groups(self, rows: list[int]) -> None:
        """The groups have so many rows, in the order in which they are read."""
        total = max(1, sum(rows))
        self.starts = [before / total for before in accumulate(rows, initial=0)]
        self.lengths = dict(enumerate(rows))

    def reached(self, place: tuple[int, ...]) -> float:
        """What lies before the place in the input, with the files before this one."""
        return self.before + self.inside(place)

    def inside(self, place: tuple[int, ...]) -> float:
        """What lies before the place in the file."""
        if not place:
            return 0.0
        number = place[0]
        inside = 0.0
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
        is_near: a size costs no request.
    """

    def __init__(self, inputs: MeasuredInputs, limit: int, is_near: bool = True) -> None:
        self.total: float | None = None
        """In bytes; None: not known, or not yet: see ``measure``."""
        self.measuring: threading.Thread | None = None
        """Looks the sizes up; None: nobody has asked for them, or they are known at once."""
        self._inputs = inputs
        self._limit = limit
        self._is_near = is_near
        self._is_measured = False

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
            chosen = range(0, count, max(1, -(-count // most)))
            sizes = [self._inputs.size_for_people(index) for index in chosen]
            if not count or any(sizes):
                self.total = sum(sizes) * count / max(1, len(sizes))

    def reached(self, file: FileExtent, place: tuple[int, ...], documents: int) -> Reached:
        """How much of the input lies before a place, after so many documents of this rank."""
        self.measure()
        done = file.reached(place)
        coarse = file.per is None and not file.starts
        total = self.total
        if coarse and len(self._inputs.names) < _FINE:
            total = None
        if self._limit > 0 and documents / self._limit >= done / (total or math.inf):
            return Reached(min(documents, self._limit), self._limit, "rows")
        if total is not None:
            return Reached(min(int(done), int(total)), int(total), "bytes")
        if done:
            return Reached(int(done), None, "bytes")
        return UNKNOWN
