"""Lines and rows of the input that became no document, counted by readers and kept with positions and the history."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

_NAMED_FILES, _NAME_CHARACTERS = 3, 40


class Skipped(Enum):
    """Why a line or row became no document. A format yields it in place of the document."""

    DAMAGED = "damaged"
    WITHOUT_TEXT = "without_text"


class SkippedLines(NamedTuple):
    """How many lines or rows of the input became no document, up to a position. Blank lines are not counted.

    ``damaged``: not a JSON object. ``without_text``: no text under ``text_key``, or none from the adapter.
    ``at_least``: there may be more, because a release that did not count them saved an earlier position. ``files``: how
    many files had such lines and no document; ``names``: the first of them. Long names are cut, as a position is small.
    """

    damaged: int = 0
    without_text: int = 0
    at_least: bool = False
    files: int = 0
    names: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> SkippedLines:
        """The opposite of ``to_json``."""
        counts = cls(*content[:4])
        return counts._replace(names=tuple(content[4])) if len(content) > 4 else counts

    def __bool__(self) -> bool:
        return self.damaged + self.without_text > 0

    def plus(self, reason: Skipped) -> SkippedLines:
        """One more."""
        return self._replace(**{reason.value: getattr(self, reason.value) + 1})

    def plus_file(self, name: str) -> SkippedLines:
        """One more file without a document."""
        shown = name if len(name) <= _NAME_CHARACTERS else f"...{name[3 - _NAME_CHARACTERS :]}"
        return self._replace(files=self.files + 1, names=(*self.names, shown)[:_NAMED_FILES])

    def to_json(self) -> list[Any]:
        """The arguments; without the last ones if they have their defaults."""
        return list(self) if self.files else list(self[:3]) if self.at_least else list(self[:2])

    def __add__(self, other: object) -> SkippedLines:
        if not isinstance(other, SkippedLines):
            return NotImplemented
        counts = self.damaged + other.damaged, self.without_text + other.without_text
        names = (*self.names, *other.names)[:_NAMED_FILES]
        return SkippedLines(*counts, self.at_least or other.at_least, self.files + other.files, names)

    def __str__(self) -> str:
        """A sentence for a closing line, with a space before it; empty if there are none."""
        parts = [f"{self.damaged} damaged line{'s' * (self.damaged != 1)}"] if self.damaged else []
        parts += [f"{self.without_text} row{'s' * (self.without_text != 1)} without text"] if self.without_text else []
        more = f" and {self.files - len(self.names)} more" if self.files > len(self.names) else ""
        files = f"; {self.files} file{'s' * (self.files != 1)} gave no document: {', '.join(self.names)}{more}"
        return (
            f" Skipped: {'at least ' * self.at_least}{' and '.join(parts)}{files * bool(self.files)}." if parts else ""
        )
