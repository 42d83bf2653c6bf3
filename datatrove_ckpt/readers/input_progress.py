"""The size of a rank's input, and how much of it lies before a document, for percent and time left.

The unit is stored bytes, because a listing has them; the format converts its places to bytes. This
opens no file, and costs nothing per document.
"""

import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from datatrove_ckpt.common.counts import InputPosition

# More files are measured in a thread, because a stat may take 1 ms and a request 50. Beyond
# _MEASURED, a sample is measured, because the hub limits requests.
_AT_ONCE = 64
_MEASURED = 1000


class MeasuredInputs(Protocol):
    """See ``inputs.InputFiles``."""

    names: Sequence[str]
    tasks: int | None

    def size_for_people(self, index: int) -> int: ...


@dataclass(slots=True, eq=False)
class FileProgress:
    """One file of an input, and which part of it a place is. A format fills it in when it opens the
    file.

    Attributes:
        before: bytes of the files before this file.
        per: bytes for each unit of a place's first number; None: not known.
        starts: for places of group and row: which part of the file lies before each group, from 0
            to 1, with a last 1.
        lengths: rows of a group, as far as they are known.
        end: where the reading of a file that may grow ended; None before the end.
    """

    before: float = 0.0
    size: float = 0.0
    per: float | None = None
    starts: list[float] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    end: int | None = None

    def progress(self, place: tuple[int, ...]) -> float:
        if not place:
            return self.before
        number = place[0]
        inside = 0.0
        if 0 <= number < len(self.starts) - 1:
            start, end = self.starts[number : number + 2]
            part = place[1] / max(1, self.lengths.get(number, place[1]))
            inside = self.size * (start + (end - start) * min(1.0, part))
        elif self.per is not None:
            inside = number * self.per
        return self.before + max(0.0, min(float(self.size), inside))


@dataclass(eq=False)
class InputProgress:
    """The input of one reader in one rank.

    Args:
        limit: the reader's limit; -1: none.
        is_near: a size costs no request.
    """

    inputs: MeasuredInputs
    _limit: int
    _is_near: bool
    total: float | None = None
    """In bytes; None: not known, or not yet: see ``measure``."""
    measuring: threading.Thread | None = None
    """Looks the sizes up; None: this was not needed yet, or took no thread."""
    _is_measured: bool = False

    def measure(self) -> None:
        """Looks the sizes up once, in a thread if that may take long."""
        if self._is_measured:
            return
        self._is_measured = True
        if self._is_near and len(self.inputs.names) <= _AT_ONCE:
            self._measure()
        else:
            self.measuring = threading.Thread(
                target=self._measure, name="datatrove-ckpt sizes", daemon=True
            )
            self.measuring.start()

    def _measure(self) -> None:
        # The reader raises a better error when it comes to the file.
        with suppress(Exception):
            count = len(self.inputs.names)
            most = _MEASURED if self._is_near else 50
            chosen = range(0, count, max(1, -(-count // most)))
            sizes = [self.inputs.size_for_people(index) for index in chosen]
            if not count or any(sizes):
                self.total = sum(sizes) * count / max(1, len(sizes))

    def progress(self, file: FileProgress, place: tuple[int, ...], documents: int) -> InputPosition:
        self.measure()
        done = file.progress(place)
        coarse = file.per is None and not file.starts
        total = self.total
        if coarse and len(self.inputs.names) < 20:
            total = None
        if self._limit > 0 and documents / self._limit >= done / (total or math.inf):
            return InputPosition(min(documents, self._limit), self._limit, "rows")
        if total is not None:
            return InputPosition(min(int(done), int(total)), int(total), "bytes")
        if done:
            return InputPosition(int(done), None, "bytes")
        return InputPosition()
