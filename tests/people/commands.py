"""Commands: starts ``datatrove-ckpt`` in children of ``forker.py``, and waits for them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]


@dataclass
class Ended:
    """How a command ended.

    Attributes:
        argv: its arguments, without the program's name.
        code: its exit code; -n if signal n ended it; None if it did not end in time, and was killed.
        terminal: what it wrote to stdout and stderr.
        seconds: time from the start to the end.
    """

    argv: list[str]
    code: int | None
    terminal: str
    seconds: float


def error_of(ended: Ended) -> str:
    """The message with which it stopped; "" if there was none."""
    place = ended.terminal.rfind("error: ")
    return ended.terminal[place:].strip() if place >= 0 else ""


class Running:
    """A command under way, the leader of its own process group."""

    def __init__(self, argv: list[str], pid: int, log: Path, ended: Future[int]) -> None:
        self._argv = argv
        self._pid = pid
        self._log = log
        self._ended = ended
        self._started_at = time.monotonic()

    def signal(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the process group, which may be gone already."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def wait(self, seconds: float) -> Ended:
        """The end of the command. It is killed if it takes longer."""
        code: int | None = None
        try:
            code = self._ended.result(seconds)
        except TimeoutError:
            self.signal()
            self._ended.result(seconds)
        seconds = time.monotonic() - self._started_at
        return Ended(self._argv, code, self._log.read_text(errors="replace"), seconds)


class Commands:
    """The process that forks, as a context manager."""

    def __init__(self) -> None:
        self._pids: queue.SimpleQueue[tuple[int, Future[int]]] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.people.forker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"},
        )
        self._logs = 0
        threading.Thread(target=self._listen, name="forker's replies", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(
        self,
        argv: list[str],
        cwd: Path,
        logs: Path,
        file_size: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> Running:
        """Starts ``datatrove-ckpt`` with these arguments.

        Args:
            cwd: its current folder.
            logs: folder for a file with what it writes to the terminal.
            file_size: the largest file that it may write, in bytes; RLIMIT_FSIZE.
            environment: variables to set.
        """
        self._logs += 1
        log = logs / f"{self._logs:06d}.txt"
        order = {
            "argv": argv,
            "cwd": str(cwd),
            "log": str(log),
            "file_size": file_size,
            "environment": environment or {},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        pid, ended = self._pids.get(timeout=300)  # it imports first
        return Running(argv, pid, log, ended)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        running: dict[int, Future[int]] = {}
        with suppress(ValueError):  # closed
            for line in self._process.stdout:
                reply = json.loads(line)
                if "code" in reply:
                    running.pop(reply["pid"]).set_result(reply["code"])
                else:
                    running[reply["pid"]] = Future()
                    self._pids.put((reply["pid"], running[reply["pid"]]))
