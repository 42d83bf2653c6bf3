"""The last line of a terminal as a bar, and everything else that is printed above it.

The bar is drawn with the cursor left at its first column. Who prints a line first clears the bar's, in the same write:

    this process      its streams are replaced: each whole line clears the bar and draws it again below
    its workers       their streams only clear it; this process draws it again a moment later
    the terminal      writes ^C over the first two columns of the bar, and glues it to nothing
    others            overwrite the bar; what is left of it goes with the next drawing

So no process waits for another one, nothing is lost if one is killed, and the terminal needs no restoring. A thread, or
a scroll region as apt has, would have to be ended in order.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from loguru import logger

_CLEAR = "\r\x1b[K"
_FALLBACK_COLUMNS = 80


def has_terminal() -> bool:
    """Whether errors go to a terminal that can clear a line."""
    try:
        return sys.stderr.isatty() and sys.stderr.fileno() >= 0 and os.environ.get("TERM", "dumb") != "dumb"
    except (AttributeError, OSError, ValueError):  # no stream, a closed one, or one without a file
        return False


class BarTerminal:
    """``with BarTerminal() as terminal:`` around what prints. Errors must go to a terminal, see ``has_terminal``.

    Args:
        text: makes the bar from the number of columns. None: another process draws it, and here it is only cleared.
    """

    def __init__(self, text: Callable[[int], str] | None = None) -> None:
        self._text = text
        self._fd = sys.stderr.fileno()
        self._lock = threading.RLock()
        self._bar = ""
        self._is_partial = False  # the cursor stands behind a text without a line break
        self._replaced: dict[str, Above] = {}
        self._is_open = False

    def __enter__(self) -> Self:
        self._is_open = True
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if _is_same_terminal(stream, self._fd):
                self._replaced[name] = above = Above(stream, self)
                setattr(sys, name, above)
                _move_logging(stream, above)
        _opened.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if self._bar and not self._is_partial:
                self._put(_CLEAR)
            self._is_open, self._bar = False, ""
        for name, above in self._replaced.items():
            above.flush()
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
            _move_logging(above, above.stream)
        self._replaced.clear()
        _opened.remove(self)

    def draw(self) -> None:
        """Draws the bar, unless the cursor is in the middle of a line."""
        with self._lock:
            if self._text is None or not self._is_open or self._is_partial:
                return
            self._bar = self._text(self._columns())
            self._put(f"{_CLEAR}{self._bar}\r")

    def print(self, text: str) -> None:
        """Prints text above the bar."""
        with self._lock:
            before = _CLEAR if (self._bar or self._text is None) and not self._is_partial else ""
            self._is_partial = not text.endswith("\n")
            after = f"{self._bar}\r" if self._bar and not self._is_partial else ""
            _write_all(self._fd, f"{before}{text}{after}")

    def _put(self, text: str) -> None:
        with suppress(OSError):  # the terminal is gone: no reason to fail
            _write_all(self._fd, text)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._fd).columns or _FALLBACK_COLUMNS
        except OSError:
            return _FALLBACK_COLUMNS

    def remove(self) -> None:
        """Clears the bar in any thread. It waits for no lock, so that the process can end."""
        if self._bar and not self._is_partial:
            self._put(_CLEAR)

    def forget(self) -> None:
        """In a fork: the bar is its parent's, whose threads may hold the lock."""
        self._lock = threading.RLock()
        self._text, self._bar = None, ""


class Above:
    """A stream whose lines go above a bar. Everything but ``write`` and ``flush`` is the stream's own.

    Attributes:
        stream: what it replaces.
    """

    def __init__(self, stream: Any, terminal: BarTerminal) -> None:
        self.stream = stream
        self._terminal = terminal
        self._pending = ""

    def write(self, text: str) -> int:
        """Prints whole lines; the rest waits for its end, or for ``flush``."""
        if not self._terminal._is_open:
            return int(self.stream.write(text))
        lines, line_break, self._pending = (self._pending + text).rpartition("\n")
        if line_break:
            self._terminal.print(f"{lines}\n")
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if pending := self._pending:
            self._pending = ""
            self._terminal.print(pending)
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_opened: list[BarTerminal] = []


def leave_terminal() -> None:
    """Before this process ends by force: what was printed is shown, and a shell would write its prompt over a bar."""
    for terminal in _opened:
        terminal.remove()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _after_fork() -> None:
    for terminal in _opened:
        terminal.forget()


os.register_at_fork(after_in_child=_after_fork)


def _is_same_terminal(stream: Any, fd: int) -> bool:
    with suppress(AttributeError, OSError, ValueError):
        return bool(stream.isatty()) and os.fstat(stream.fileno()).st_rdev == os.fstat(fd).st_rdev
    return False


def _move_logging(old: Any, new: Any) -> None:
    """Lets loguru's handlers for a stream write to another one. Added again, they would lose their settings."""
    for handler in getattr(getattr(logger, "_core", None), "handlers", {}).values():
        sink: Any = getattr(handler, "_sink", None)
        if getattr(sink, "_stream", None) is old:
            sink._stream = new


def _write_all(fd: int, text: str) -> None:
    data = memoryview(text.encode("utf-8", "backslashreplace"))
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # somebody has made the terminal non-blocking
            select.select([], [fd], [])
