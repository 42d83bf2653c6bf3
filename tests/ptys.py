"""A terminal of its own for a test: what programs write to a pty, as an emulator shows it."""

import os
import pty
import select
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

import pyte
import pytest


class Terminal:
    """``with Terminal() as terminal:``. ``slave`` is what programs get.

    ``screen`` has the lines that are visible, ``history`` those that have scrolled off as well.
    """

    def __init__(self, columns=100, lines=40):
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (lines, columns))
        self._screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._stream = pyte.ByteStream(self._screen)
        self._marks = 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for descriptor in (self.master, self.slave):
            os.close(descriptor)

    @contextmanager
    def streams(self):
        """This process prints here."""
        with (
            pytest.MonkeyPatch.context() as patch,
            open(self.slave, "w", buffering=1, closefd=False) as out,
            open(self.slave, "w", buffering=1, closefd=False) as err,
        ):
            patch.setenv("TERM", "xterm-256color")
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            yield

    def read(self):
        """The lines, without empty ones at the end, after all that was written.

        What is written to a pty reaches its other end some time later, in order. So a mark is
        written, and awaited.
        """
        self._marks += 1
        mark, content, is_marked = b"\x1b]mark %d\x07" % self._marks, b"", False
        while mark not in content:
            readable, writable, _ = select.select(
                [self.master], [] if is_marked else [self.slave], []
            )
            if readable:
                content += os.read(self.master, 1 << 16)
            elif writable:
                is_marked = bool(os.write(self.slave, mark))
        self._stream.feed(content.replace(mark, b""))
        above = [
            "".join(row[column].data for column in range(self._screen.columns))
            for row in self._screen.history.top
        ]
        lines = [line.rstrip() for line in [*above, *self._screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def until(self, wanted):
        """The lines once they are as wanted. A test's own time limit ends the wait."""
        while not wanted(lines := self.read()):
            time.sleep(0.01)
        return lines

    def type(self, text):
        """What a person types."""
        os.write(self.master, text)

    @property
    def cursor(self):
        """Column and line."""
        return self._screen.cursor.x, self._screen.cursor.y


# A program's terminal sends it signals only if it leads the session of that terminal.
_WITH_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def on_terminal(terminal, folder, *words):
    """``datatrove-ckpt WORDS`` in this folder, whose terminal it is."""
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONWARNINGS": "default",
    }
    environment = {
        name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")
    }
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    argv = [sys.executable, "-c", _WITH_TERMINAL, sys.executable, "-m", "datatrove_ckpt", *words]
    process = subprocess.Popen(argv, cwd=folder, start_new_session=True, env=environment, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
