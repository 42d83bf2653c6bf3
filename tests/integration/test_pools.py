"""Ranks in the workers of a pool, as datatrove's executors have them: a signal becomes an error of the task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from datatrove_ckpt.testing import FakeServer, outputs
from tests.integration.test_managers import left_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")

SCRIPT = """
import os, sys, time
from pathlib import Path
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner

def documents(data, rank, world_size):
    Path(f"worker {rank}").write_text(str(os.getpid()))
    yield from (Document(text=f"text {rank} {n}", id=f"{rank} {n}") for n in range(3))

async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})

if __name__ == "__main__":
    runner = InferenceRunner(
        rollout,
        InferenceConfig("endpoint", "m", endpoint_url=sys.argv[1]),
        JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir="checkpoints",
        drain_seconds=float(sys.argv[2]),
    )
    executor = LocalPipelineExecutor(
        [documents, runner], tasks=int(sys.argv[3]), workers=2, logging_dir="logs", start_method=sys.argv[4]
    )
    try:
        executor.run()
    except BaseException as error:
        print("ENDS WITH", type(error).__name__, error, flush=True)
        raise
"""


class Script:
    """A user's own script, with two workers of datatrove's executor."""

    def __init__(
        self, folder: Path, server: FakeServer, drain: float = 20, tasks: int = 2, method: str = "fork"
    ) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)
        self.popen = subprocess.Popen(
            [sys.executable, "script.py", server.url, str(drain), str(tasks), method],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while len(server.payloads) < 6:
            if self.popen.poll() is not None or time.monotonic() > deadline:
                pytest.fail(self.popen.communicate()[0])
            time.sleep(0.01)

    def worker(self, rank: int) -> int:
        return int((self.folder / f"worker {rank}").read_text())

    def ends(self) -> int:
        try:
            self.output, _ = self.popen.communicate(timeout=300)
            return self.popen.returncode
        finally:
            self.left = left_of(self.popen.pid)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("number", "method"),
    [
        (signal.SIGTERM, "fork"),
        (signal.SIGINT, "forkserver"),
        (signal.SIGHUP, "spawn"),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_a_worker_that_is_signalled_alone_drains_and_its_pool_gets_an_error(
    tmp_path: Path, number: signal.Signals, method: str
) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server, 0.2, method=method)
        os.kill(script.worker(1), number)
        assert script.ends() == 1
        assert f"ENDS WITH Preempted Stopped by {number.name}." in script.output
        assert script.left == []


@pytest.mark.slow
def test_ctrl_c_ends_a_pool_whose_ranks_drain_and_what_they_got_is_kept(tmp_path: Path) -> None:
    """Each worker gets SIGINT, and then the SIGTERM with which the parent ends its pool."""
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server)
        os.killpg(script.popen.pid, signal.SIGINT)
        threading.Timer(1.0, server.release).start()
        assert script.ends() == -signal.SIGINT
        assert "ENDS WITH KeyboardInterrupt" in script.output
        assert script.left == []
        asked = dict(server.asked)
        assert subprocess.run(script.popen.args, cwd=tmp_path, capture_output=True, check=False).returncode == 0
        assert server.asked == asked, "no answer was requested again"
    assert sorted(outputs(tmp_path / "output")) == ["00000_00000.jsonl", "00001_00000.jsonl"]
