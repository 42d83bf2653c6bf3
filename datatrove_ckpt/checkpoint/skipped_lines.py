"""Counts of input lines and rows that became no document, kept with positions and the history."""

from dataclasses import dataclass

from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.work_counts import Addable


@dataclass(slots=True, frozen=True)
class SkippedLines(Addable):
    """How many input lines or rows became no document, up to a position, without blank lines.

    A reader yields ``DAMAGED`` or ``WITHOUT_TEXT`` in place of a document. ``numbers()`` is what
    positions and the history keep; an earlier build wrote file names after it.

    Attributes:
        damaged: not a JSON object.
        without_text: no text under ``text_key``, or none from the adapter.
    """

    damaged: int = 0
    without_text: int = 0

    def __bool__(self) -> bool:
        return self.damaged + self.without_text > 0

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


DAMAGED = SkippedLines(damaged=1)
WITHOUT_TEXT = SkippedLines(without_text=1)
