"""Commands: starts ``datatrove-ckpt`` in forks of a process that has imported it
(``tests/forked.py``).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = str(Path(__file__).with_name("command.py"))


@dataclass
class Ended:
    """How a command ended.

    Attributes:
        argv: its arguments, without the program's name.
        code: its exit code; -n if signal n ended it; None if it did not end in time, and was
            killed.
        terminal: what it wrote to stdout and stderr.
        seconds: time from the start to the end.
        is_cut: the terminal is a file, too, and has reached the size that no file may exceed.
    """

    argv: list[str]
    code: int | None
    terminal: str
    seconds: float
    is_cut: bool


def error_of(ended):
    """The message with which it stopped; "" if there was none."""
    place = ended.terminal.rfind("error: ")
    return ended.terminal[place:].strip() if place >= 0 else ""


class Running:
    """A command under way, the leader of its own process group."""

    def __init__(self, argv, process, log, file_size):
        self._argv = argv
        self._file_size = file_size
        self._process = process
        self._log = log
        self._started_at = time.monotonic()

    @property
    def is_alive(self):
        return self._process.poll() is None

    def signal(self, number=signal.SIGKILL):
        """Sends a signal to the process group, which may be gone already."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def wait(self, seconds):
        """The end of the command. It is killed if it takes longer."""
        handle = os.pidfd_open(self._process.pid)
        in_time = bool(select.select([handle], [], [], seconds)[0])
        os.close(handle)
        if not in_time:
            self.signal()
        code = self._process.wait()
        seconds = time.monotonic() - self._started_at
        is_cut = self._log.stat().st_size == self._file_size
        return Ended(
            self._argv,
            code if in_time else None,
            self._log.read_text(errors="replace"),
            seconds,
            is_cut,
        )


class Commands:
    """A context manager: what still runs at its end is killed."""

    def __init__(self):
        self._started = []

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for running in self._started:
            if running.is_alive:
                running.signal()

    def start(self, argv, cwd, logs, file_size=None, environment=None):
        """Starts ``datatrove-ckpt`` with these arguments.

        Args:
            cwd: its current folder.
            logs: folder for a file with what it writes to the terminal.
            file_size: the largest file that it may write, in bytes; RLIMIT_FSIZE.
            environment: variables to set.
        """
        log = logs / f"{len(self._started):06d}.txt"
        # As an argument: a process with another HOME would be no fork, but a new one.
        order = {"file_size": file_size, "environment": {"NO_COLOR": "1", **(environment or {})}}
        with log.open("ab") as terminal:
            process = subprocess.Popen(
                [sys.executable, _SCRIPT, json.dumps(order), *argv],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
            )
        self._started.append(Running(argv, process, log, file_size))
        return self._started[-1]
