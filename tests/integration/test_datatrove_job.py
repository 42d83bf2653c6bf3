"""The process that runs datatrove's own runner for tests: it says what it lacks, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from datatrove_ckpt.testing import FakeServer
from tests.datatrove_job import write_input

_ROOT = Path(__file__).parents[2]
_WITHOUT_HTTPX = """
import runpy, sys
sys.modules["httpx"] = None
runpy.run_module("tests.datatrove_job", run_name="__main__")
"""
_PARENT = """
import sys
from pathlib import Path
from tests.datatrove_job import Datatrove
with Datatrove() as datatrove:
    print(datatrove.pid, datatrove.start(Path(sys.argv[1]), sys.argv[2]), flush=True)
    datatrove.end()
"""


def test_without_httpx_it_ends_at_once_and_says_why() -> None:
    """datatrove would wait without end for a server that it cannot ask."""
    command = [sys.executable, "-c", _WITHOUT_HTTPX, str(os.getpid())]
    done = subprocess.run(command, cwd=_ROOT, input="", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "datatrove's runner needs httpx: pip install httpx\n")


def test_the_process_and_its_run_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    write_input(tmp_path, 3)
    with FakeServer(hold_after=1) as server:
        command = [sys.executable, "-c", _PARENT, str(tmp_path), server.url]
        with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pids = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
            os.kill(parent.pid, signal.SIGKILL)
        assert len(pids) == 2
        for pid in pids:
            assert select.select([pid], [], [], 300)[0], "it still runs"
            os.close(pid)
