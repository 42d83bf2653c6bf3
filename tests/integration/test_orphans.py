"""The parent watch: no pool worker outlives its parent, and no parent waits without end for a worker."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.inference.servers.guardian import process_table
from datatrove_ckpt.testing import FakeServer, outputs
from tests.integration.test_kills import DOCUMENTS, IN_FLIGHT, Job
from tests.kept import until_kept
from tests.patience import Patience, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, pidfd and prctl")


def workers(process: subprocess.Popen[str]) -> list[int]:
    """Handles of a job's pool workers, and of the server that forked them."""
    session = [str(other.pid) for other in process_table() if other.session == process.pid]
    forked = [pid for pid in session if b"forkserver" in Path("/proc", pid, "cmdline").read_bytes()]
    assert len(forked) == 3
    return [os.pidfd_open(int(pid)) for pid in forked]


@pytest.mark.slow
def test_pool_workers_end_with_a_parent_that_is_killed_and_the_next_run_finds_their_ranks_free(tmp_path: Path) -> None:
    with FakeServer(hold_after=30) as server:
        job = Job(tmp_path / "killed", server.url, "plain", tasks=2)
        process = job.start()
        until(lambda: server.asked.total() >= 30 + 2 * IN_FLIGHT)
        until_kept(tmp_path / "killed/checkpoints", 30)
        handles = workers(process)
        os.kill(process.pid, signal.SIGKILL)
        for worker in handles:
            assert Patience(10).ends(worker), "a worker outlived its parent"
            os.close(worker)
        os.killpg(process.pid, signal.SIGKILL)  # a process of datatrove's without a rank may still run
        job.finish(process)
        server.release()
        assert job.finish(job.start()) == 0, job.log
        assert sum(server.asked.values()) - 2 * DOCUMENTS <= 2 * IN_FLIGHT

        undisturbed = Job(tmp_path / "undisturbed", server.url, "plain", tasks=2)
        assert undisturbed.finish(undisturbed.start()) == 0, undisturbed.log
    assert outputs(tmp_path / "killed/output") == outputs(tmp_path / "undisturbed/output")


# As in Ray's actors, whose pools are forked, with Ray's handler in them.
FORKED = """
import multiprocess, os, signal, sys, time
from pathlib import Path
from datatrove.data import Document
from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter

async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})

def work(rank):
    try:
        infer(rank)
    finally:
        while not Path("may_end").exists():
            time.sleep(0.001)

def infer(rank):
    Path("worker").write_text(str(os.getpid()))
    config = InferenceConfig("endpoint", "m", endpoint_url=sys.argv[1])
    writer = JsonlWriter("output", "${rank}_${chunk_index}.jsonl")
    InferenceRunner(rollout, config, writer, checkpoints_local_dir="checkpoints", drain_seconds=0.1).run(
        [Document(text="text", id="id")], rank
    )

def handle():
    # Not inherited: in the hooks of a fork, Python ignores what a handler raises, and the pool waits for ever.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))

with multiprocess.get_context("fork").Pool(1, handle) as pool:
    pool.map(work, [0])
"""


@pytest.mark.slow
def test_a_worker_whose_handler_exits_leaves_its_parent_an_error_to_go_on_with(tmp_path: Path) -> None:
    with FakeServer(hold_after=0) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", FORKED, server.url], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        until(lambda: server.asked.total() >= 1)
        worker = os.pidfd_open(int((tmp_path / "worker").read_text()))
        signal.pidfd_send_signal(worker, signal.SIGTERM)
        assert not select.select([worker], [], [], 1.5)[0], "it ended before it had sent its error"
        (tmp_path / "may_end").touch()
        assert select.select([worker], [], [], 300)[0]
        os.close(worker)
        _, error = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Preempted: Stopped by SIGTERM" in error
