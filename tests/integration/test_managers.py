"""datatrove's executor: its manager and the workers of its pool end with its process, and a signal
ends a task.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import multiprocess
import pytest

from datatrove_ckpt.inference.servers.guardian import descendants, process_table
from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.jobs import run_job
from tests.kept import until_kept
from tests.kill_job import DOCUMENTS, IN_FLIGHT, JOB, QUESTIONS
from tests.patience import Patience, until
from tests.yaml_jobs import write_tasks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")

SCRIPT = """
import asyncio, os, sys, threading, time
from pathlib import Path
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner

def documents(data, rank, world_size):
    Path(f"worker {rank}").write_text(str(os.getpid()))
    yield from (Document(text=f"text {rank} {n}", id=f"{rank} {n}") for n in range(3))

async def rollout(document, generate):
    if "asleep" in sys.argv:
        asked = asyncio.create_task(generate({"messages": [{"role": "user", "content": "x"}]}))
        while not Path("all have asked").exists():
            await asyncio.sleep(0.01)
        Path("sleeps").touch()
        time.sleep(3600)
    return await generate({"messages": [{"role": "user", "content": document.text}]})

if __name__ == "__main__":
    runner = InferenceRunner(
        rollout,
        InferenceConfig("endpoint", "m", endpoint_url=sys.argv[1]),
        JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir="checkpoints",
        drain_seconds=0.1,
    )
    if "thread" in sys.argv:
        threading.Thread(target=threading.Event().wait, args=(3600,)).start()
    executor = LocalPipelineExecutor([documents, runner], logging_dir="logs")
    executor.run()
    print("done", flush=True)
"""


class Script:
    """``script | cat``: it has ended once nobody holds its standard output.

    Its requests wait at the server.
    """

    def __init__(
        self,
        folder,
        server,
        option,
    ):
        (folder / "script.py").write_text(SCRIPT)
        arguments = [sys.executable, "script.py", server.url, option]
        self.popen = processes.start(arguments, cwd=folder)
        deadline = time.monotonic() + 300
        while len(server.payloads) < 3:
            if self.popen.poll() is not None or time.monotonic() > deadline:
                pytest.fail(self.popen.communicate()[0])
            time.sleep(0.01)
        (folder / "all have asked").touch()

    def ends_with_all(self, seconds):
        """Within so many seconds, and its processes soon after; gives the exit code."""
        try:
            self.output = Patience(seconds).output_of(self.popen)
            return self.popen.returncode
        finally:
            assert processes.left_of(self.popen.pid) == []


@pytest.mark.matrix(
    ("number", "code", "signalled"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM, "alone"),
        (signal.SIGINT, -signal.SIGINT, "alone"),
        (signal.SIGTERM, -signal.SIGTERM, "with all"),  # the manager ends before the script
        (signal.SIGTERM, -signal.SIGTERM, "thread"),  # that Python would wait for
        (signal.SIGTERM, 128 + signal.SIGTERM, "asleep"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_script_in_a_pipe_ends_with_its_manager(tmp_path, number, code, signalled):
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server, signalled)
        (manager,) = descendants(script.popen.pid)
        assert manager in descendants(os.getpid())
        if signalled == "asleep":
            until((tmp_path / "sleeps").exists)
        (os.killpg if signalled == "with all" else os.kill)(script.popen.pid, number)
        assert script.ends_with_all(60) == code
    assert ("Traceback" in script.output) == (number == signal.SIGINT)
    assert "done" not in script.output


# pools -------------------------------------------------------------------------------------------


AFTER_OURS = """
import datatrove_ckpt
from datatrove.executor import LocalPipelineExecutor

def nothing(data, rank, world_size):
    yield from ()

if __name__ == "__main__":
    for number, executor in enumerate([datatrove_ckpt.LocalPipelineExecutor, LocalPipelineExecutor]):
        executor([nothing], tasks=2, workers=2, logging_dir=f"logs {number}").run()
    print("done")
"""


@pytest.mark.slow
def test_datatroves_pool_ends_after_ours_in_one_process(tmp_path):
    """Both use one fork server.

    With the signals blocked that ours blocks, a pool's workers would not be terminated.
    """
    (tmp_path / "script.py").write_text(AFTER_OURS)
    popen = processes.start([sys.executable, "script.py"], cwd=tmp_path)
    try:
        assert popen.communicate(timeout=400)[0].endswith("done\n")
    finally:
        processes.left_of(popen.pid)


# the parent watch --------------------------------------------------------------------------------


def workers(process):
    """Handles of a job's pool workers, and of the server that forked them."""
    session = [str(other.pid) for other in process_table() if other.session == process.pid]
    forked = [pid for pid in session if b"forkserver" in Path("/proc", pid, "cmdline").read_bytes()]
    assert len(forked) == 3
    return [os.pidfd_open(int(pid)) for pid in forked]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, whole_group",
    [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGINT, True)],
)
def test_pool_workers_end_with_a_parent_that_a_signal_ends_and_the_next_run_finds_their_ranks_free(
    tmp_path, number, whole_group
):
    def start(name):
        return processes.start(
            [sys.executable, "job.py", tmp_path / name, server.url, "plain", "2"],
            cwd=tmp_path / name,
        )

    def end(process):
        said, _ = process.communicate(timeout=400)
        assert process.returncode == 0, said

    for name in ("killed", "undisturbed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.py").write_text(JOB)
        write_tasks(tmp_path / name, 2, DOCUMENTS)
    with FakeServer(hold_after=30) as server:
        process = start("killed")
        until(lambda: server.asked.total() >= 30 + 2 * IN_FLIGHT)
        until_kept(tmp_path / "killed/checkpoints", 30)
        handles = workers(process)
        (os.killpg if whole_group else os.kill)(process.pid, number)
        for worker in handles:
            assert Patience(10).ends(worker), "a worker outlived its parent"
            os.close(worker)
        assert process.wait(300) == -number
        with suppress(ProcessLookupError):
            # A process of datatrove's without a rank may still run.
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        log = tmp_path / "killed/logs/logs/task_00000.log"
        assert "Use datatrove_ckpt.LocalPipelineExecutor." in log.read_text()
        server.release()
        end(start("killed"))
        assert server.asked.total() - 2 * QUESTIONS <= 2 * IN_FLIGHT

        end(start("undisturbed"))
    assert outputs(tmp_path / "killed/output") == outputs(tmp_path / "undisturbed/output")


def test_a_handler_that_exits_makes_no_document_of_a_pools_worker_a_dead_letter(tmp_path, server):
    """Ray sets such a handler in its actors, whose pools are forked."""

    async def signals(document, generate):
        os.kill(os.getpid(), signal.SIGTERM)

    def work():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
        run_job(tmp_path, server, 1, signals, on_document_error="dead_letter")

    worker = multiprocess.get_context("fork").Process(target=work, name="ForkPoolWorker-1")
    worker.start()
    worker.join(300)
    assert worker.exitcode == -signal.SIGKILL
    assert not (tmp_path / "checkpoints/00000/dead_letters.jsonl").exists()
