"""The parent watch: no pool worker outlives its parent, and no parent waits without end for a worker."""

from __future__ import annotations

import os
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
