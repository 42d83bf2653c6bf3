"""Measures a rank's input, and the part before a document, for percentages and the remaining time.

The unit is stored bytes, because a listing has them; each format converts its positions to bytes.
No file is opened, and documents cost nothing.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from datatrove_ckpt.common.counts import InputPosition
from datatrove_ckpt.common.threads import context_thread

# More files are measured in a thread, because a stat may take 1 ms and a request 50. Beyond
# _MEASURED, a sample is measured, because the hub limits requests.
_AT_ONCE = 64
_MEASURED = 1000


class MeasuredInputs(Protocol):
    """The part of ``inputs.InputFiles`` that is needed to measure an input."""

    names: Sequence[str]
    tasks: int | None

    def size_for_people(self, index: int) -> int: ...


@dataclass(slots=True, eq=False)
class FileProgress:
    """Converts positions in one file of an input to bytes. The format sets the fields when it opens
    the file.

    Attributes:
        before: bytes of the files before this file.
        per: bytes for each unit of a position's first number; None: unknown.
        starts: share of the file before each group, from 0 to 1, with a last 1, if positions are
            group and row.
        lengths: rows of each group, as far as they are known.
        end: offset at which the reading of a file that may grow ended; None before the end.
    """

    before: float = 0.0
    size: float = 0.0
    per: float | None = None
    starts: list[float] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    end: int | None = None

    def progress(self, position: tuple[int, ...]) -> float:
        if not position:
            return self.before
        number = position[0]
        inside = 0.0
        if 0 <= number < len(self.starts) - 1:
            start, end = self.starts[number : number + 2]
            part = position[1] / max(1, self.lengths.get(number, position[1]))
            inside = self.size * (start + (end - start) * min(1.0, part))
        elif self.per is not None:
            inside = number * self.per
        return self.before + max(0.0, min(float(self.size), inside))


@dataclass(eq=False)
class InputProgress:
    """The size of the input of one reader in one rank, and the progress in it.

    Args:
        limit: the reader's limit; -1: none.
        is_near: whether a size costs no request.
    """

    inputs: MeasuredInputs
    _limit: int
    _is_near: bool
    total: float | None = None
    """Size in bytes; None: unknown, or not measured yet (``measure``)."""
    _is_measured: bool = False

    def measure(self) -> None:
        """Reads the sizes once, in a thread if this may take long."""
        if self._is_measured:
            return
        self._is_measured = True
        if self._is_near and len(self.inputs.names) <= _AT_ONCE:
            self._measure()
        else:
            context_thread(self._measure, "datatrove-ckpt sizes")

    def _measure(self) -> None:
        # The reader raises a better error when it opens the file.
        with suppress(Exception):
            count = len(self.inputs.names)
            max_measured = _MEASURED if self._is_near else 50
            chosen = range(0, count, max(1, -(-count // max_measured)))
            sizes = [self.inputs.size_for_people(index) for index in chosen]
            if not count or any(sizes):
                self.total = sum(sizes) * count / max(1, len(sizes))

    def progress(
        self, file: FileProgress, position: tuple[int, ...], documents: int
    ) -> InputPosition:
        self.measure()
        done = file.progress(position)
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
