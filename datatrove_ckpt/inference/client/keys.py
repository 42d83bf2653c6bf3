"""Values that no traceback shows.

loguru's ``diagnose`` (on by default, and datatrove logs every failed task with it) prints the value of each name on
each line of a traceback, so a key in a plain ``str`` or a plain dict ends in a log file one day. These print ``***``.
"""

from __future__ import annotations

from typing import Self


class Key:
    """An API key."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    @classmethod
    def wrap(cls, value: Self | str | None) -> Self | None:
        """The key in ``value``, whatever form it has."""
        return cls(value) if isinstance(value, str) else value

    def reveal(self) -> str:
        """The key itself. Never give it a name: names are what tracebacks show."""
        return self._value

    def headers(self) -> HiddenDict:
        """It as an HTTP header."""
        return HiddenDict(Authorization=f"Bearer {self._value}")

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


class HiddenDict(dict[str, str]):
    """A dict that shows its names only."""

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: ***" for name in self) + "}"


class HiddenBytes(bytes):
    """Bytes that show nothing of themselves."""

    def __repr__(self) -> str:
        return "***"
