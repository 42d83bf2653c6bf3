"""Programs that tests start, and some that stand in for others; what tests ask of processes not
their children.
"""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from datatrove_ckpt.inference.servers.guardian import process_table
from tests import processes
from tests.patience import Patience


def run(command, **settings):
    """To its end, whatever its exit code; with what it wrote, as text."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


def start(command, **settings):
    """In a session of its own, so that it can be killed with its children; its errors are part of
    its output.
    """
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, **both, text=True, start_new_session=True, **settings)


def is_alive(pid):
    """A zombie is not: who reaps it, and when, depends on the machine."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_stopped(pid):
    """Whether no thread of it works any more, after SIGSTOP."""
    try:
        threads = [
            thread.read_text().rpartition(")")[2].split()[0]
            for thread in Path(f"/proc/{pid}/task").glob("*/stat")
        ]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(threads) and set(threads) == {"T"}


def left_of(session, seconds=5):
    """Processes of a session that do not end in time. They are killed."""
    patience = Patience(seconds)
    while running := [p.pid for p in process_table() if p.session == session and not p.zombie]:
        if patience.over():
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.01)
    return running


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Process:
    """A command in its own session, and its output."""

    def __init__(self, argv, folder):
        self.popen = processes.start(argv, cwd=folder, stdin=subprocess.DEVNULL)
        self.log = ""
        self._lines = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                self._lines.put(line)

    def until(self, text):
        while text not in (line := self._lines.get(timeout=300)):
            self.log += line
        self.log += line

    def end(self):
        """Its exit code; ``left`` are those of its session who do not end with it."""
        code = self.popen.wait(timeout=400)
        self.left = processes.left_of(self.popen.pid, 10)
        self._reader.join()
        while not self._lines.empty():
            self.log += self._lines.get()
        return code

    def ends_interrupted(self, number):
        """With nobody left, no traceback, and one line on how to continue, the last one."""
        assert self.end() == 128 + number
        assert self.log.splitlines()[-1].startswith(f"interrupted by {number.name}. To resume: ")
        assert self.log.count("To resume: datatrove-ckpt run job.yaml") == 1
        assert "Traceback" not in self.log
        assert self.left == []


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            yield path.read_bytes()
