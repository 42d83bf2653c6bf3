"""Programs that tests start, and some that stand in for others; what tests ask of processes not
their children.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from datatrove_ckpt.inference.servers.guardian import process_table
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
