"""Counts of input lines and rows that became no document, kept with positions and the history."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from datatrove_ckpt.common.formatting import plural


class Skipped(Enum):
    """Why a line or row became no document. A format yields it in place of the document."""

    DAMAGED = "damaged"
    WITHOUT_TEXT = "without_text"


class SkippedLines(NamedTuple):
    """How many input lines or rows became no document, up to a position, without blank lines.

    ``damaged``: not a JSON object. ``without_text``: no text under ``text_key``, or none from the
    adapter.
    """

    damaged: int = 0
    without_text: int = 0

    @classmethod
    def from_json(cls, content: Sequence[int]) -> SkippedLines:
        """Reads the numbers; an earlier build wrote file names after them."""
        return cls(*content[:2])

    def __bool__(self) -> bool:
        return self.damaged + self.without_text > 0

    def plus(self, reason: Skipped) -> SkippedLines:
        return self._replace(**{reason.value: getattr(self, reason.value) + 1})

    def __add__(self, other: object) -> SkippedLines:
        if not isinstance(other, SkippedLines):
            return NotImplemented
        return SkippedLines(self.damaged + other.damaged, self.without_text + other.without_text)

    @property
    def text(self) -> str:
        counts = []
        if self.damaged:
            counts.append(plural(self.damaged, "damaged line"))
        if self.without_text:
            counts.append(f"{plural(self.without_text, 'row')} without text")
        return " and ".join(counts)

    def __str__(self) -> str:
        """A sentence for a closing line, with a space before it; empty if nothing was skipped."""
        if self:
            return f" Skipped: {self.text}."
        return ""
