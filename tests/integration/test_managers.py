"""datatrove's executor with one worker: its manager process ends with the process, whatever ends that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from datatrove_ckpt.inference.servers.guardian import descendants, kill_session, process_table
from datatrove_ckpt.testing import FakeServer
from tests.patience import Patience

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")

SCRIPT = """
import os, sys
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner
from my_rollouts import rollout

if __name__ == "__main__":
    runner = InferenceRunner(
        rollout,
        InferenceConfig("endpoint", "m", endpoint_url=sys.argv[1]),
        JsonlWriter("output", "${rank}_${chunk_index}.jsonl"),
        checkpoints_local_dir="checkpoints",
        drain_seconds=0.1,
    )
    print(os.getpid(), flush=True)
    documents = [[Document(text=f"text {n}", id=f"{n}") for n in range(3)]]
    LocalPipelineExecutor([*documents, runner], tasks=1, workers=1, logging_dir="logs").run()
    print("done", flush=True)
"""
ROLLOUTS = """
async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})
"""


def left_of(session: int) -> list[int]:
    """Processes that do not end within 5 seconds. They are killed."""
    patience = Patience(5)
    while running := [p.pid for p in process_table() if p.session == session and not p.zombie]:
        if patience.over():
            kill_session(session)
            break
        time.sleep(0.01)
    return running


class Script:
    """``script | cat``: it has ended once nobody holds its standard output any more."""

    def __init__(self, folder: Path, server: FakeServer, rollouts: str = ROLLOUTS) -> None:
        (folder / "my_rollouts.py").write_text(rollouts)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, server.url],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )
        while not (line := self.popen.stdout.readline().strip()).isdecimal():
            assert line, "it failed"
        deadline = time.monotonic() + 300
        while len(server.payloads) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ends_with_all(self) -> int:
        """Within 5 seconds; gives the exit code."""
        try:
            self.output = Patience(5).output_of(self.popen)
            return self.popen.returncode
        finally:
            self.left = left_of(self.popen.pid)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGINT, -signal.SIGINT),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_script_in_a_pipe_ends_with_its_manager(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server)
        assert len(descendants(script.popen.pid)) == 2, "the manager and its guard"
        os.kill(script.popen.pid, number)
        assert script.ends_with_all() == code
    assert script.left == []
    assert ("Traceback" in script.output) == (number == signal.SIGINT)
    assert "done" not in script.output


@pytest.mark.slow
def test_a_signal_to_all_ends_the_manager_first_and_is_no_error_of_its(tmp_path: Path) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server)
        os.killpg(script.popen.pid, signal.SIGTERM)
        assert script.ends_with_all() == -signal.SIGTERM
    assert script.left == []
    assert "Traceback" not in script.output


@pytest.mark.slow
def test_a_run_that_is_done_ends_with_its_guard(tmp_path: Path) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server)
        server.release()
        assert script.ends_with_all() == 0
    assert script.left == []
    assert script.output.endswith("done\n")
