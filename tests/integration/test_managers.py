"""datatrove's executor: its manager and the workers of its pool end with its process, and a signal ends a task."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from datatrove_ckpt.inference.servers.guardian import descendants, process_table
from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.integration.test_kills import IN_FLIGHT, QUESTIONS, Job
from tests.kept import until_kept
from tests.patience import Patience, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")

SCRIPT = """
import os, sys, threading
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
    workers = int(sys.argv[3])
    if len(sys.argv) > 5 and "thread" in sys.argv[5]:
        threading.Thread(target=threading.Event().wait, args=(3600,)).start()
    more = len(sys.argv) > 5 and "idle" in sys.argv[5]
    executor = LocalPipelineExecutor(
        [documents, runner], tasks=workers, workers=workers + more, logging_dir="logs", start_method=sys.argv[4]
    )
    try:
        executor.run()
    except Exception as error:
        print("ENDS WITH", type(error).__name__, error, flush=True)
        raise
    print("done", flush=True)
"""


def left_of(session: int, seconds: float = 5) -> list[int]:
    """Processes that do not end within so many seconds. They are killed."""
    patience = Patience(seconds)
    while running := [p.pid for p in process_table() if p.session == session and not p.zombie]:
        if patience.over():
            processes.kill_session(session)
            break
        time.sleep(0.01)
    return running


class Script:
    """``script | cat``: it has ended once nobody holds its standard output. Its requests wait at the server."""

    def __init__(
        self,
        folder: Path,
        server: FakeServer,
        workers: int = 1,
        drain: float = 0.1,
        method: str = "forkserver",
        options: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)
        arguments = [server.url, str(drain), str(workers), method, *options]
        self.popen = processes.start([sys.executable, "script.py", *arguments], cwd=folder)
        deadline = time.monotonic() + 300
        while len(server.payloads) < 3 * workers:
            if self.popen.poll() is not None or time.monotonic() > deadline:
                pytest.fail(self.popen.communicate()[0])
            time.sleep(0.01)

    def worker(self, rank: int) -> int:
        return int((self.folder / f"worker {rank}").read_text())

    def ends_with_all(self, seconds: float = 5, to_end: float = 5) -> int:
        """Within so many seconds, and its processes ``to_end`` later; gives the exit code."""
        try:
            self.output = Patience(seconds).output_of(self.popen)
            return self.popen.returncode
        finally:
            assert left_of(self.popen.pid, to_end) == []


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("number", "code", "signalled"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM, "alone"),
        (signal.SIGINT, -signal.SIGINT, "alone"),
        (signal.SIGUSR1, 128 + signal.SIGUSR1, "alone"),
        (signal.SIGHUP, 128 + signal.SIGHUP, "alone"),
        (signal.SIGTERM, 128 + signal.SIGTERM, "with all"),  # the manager waits for the end of the script
        (signal.SIGTERM, -signal.SIGTERM, "with a thread that Python would wait for"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_script_in_a_pipe_ends_with_its_manager(
    tmp_path: Path, number: signal.Signals, code: int, signalled: str
) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server, options=("a thread",) if "thread" in signalled else ())
        assert len(descendants(script.popen.pid)) == 1, "the manager"
        (os.killpg if signalled == "with all" else os.kill)(script.popen.pid, number)
        assert script.ends_with_all() == code
    assert ("Traceback" in script.output) == (number == signal.SIGINT)
    assert "done" not in script.output


@pytest.mark.slow
def test_nohup_keeps_its_effect(tmp_path: Path) -> None:
    with FakeServer(hold_after=0) as server:
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            script = Script(tmp_path, server)
        finally:
            signal.signal(signal.SIGHUP, before)
        os.kill(script.popen.pid, signal.SIGHUP)
        time.sleep(0.3)
        server.release()
        assert script.ends_with_all() == 0


# pools ---------------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("number", "method"),
    [(signal.SIGTERM, "fork"), (signal.SIGINT, "forkserver"), (signal.SIGHUP, "spawn")],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_a_worker_that_is_signalled_alone_drains_and_its_pool_gets_an_error(
    tmp_path: Path, number: signal.Signals, method: str
) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server, 2, 0.2, method)
        os.kill(script.worker(1), number)
        assert script.ends_with_all(300) == 1
    assert f"ENDS WITH Preempted Stopped by {number.name}." in script.output


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("number", "method", "whole_group"),
    [
        (signal.SIGINT, "fork", True),  # each worker gets SIGINT, and then the SIGTERM that ends its pool
        (signal.SIGTERM, "forkserver", False),
        (signal.SIGTERM, "forkserver", True),  # the fork server ends, and so datatrove takes its workers for ended
        (signal.SIGHUP, "spawn", False),
        (signal.SIGTERM, "fork", True),
        (signal.SIGUSR1, "fork", False),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_a_signal_ends_a_pool_whose_ranks_drain_and_what_they_got_is_kept(
    tmp_path: Path, number: signal.Signals, method: str, whole_group: bool
) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server, 2, 120, method)
        ranks = [os.pidfd_open(script.worker(rank)) for rank in range(2)]
        (os.killpg if whole_group else os.kill)(script.popen.pid, number)
        logs = [tmp_path / "logs" / "logs" / f"task_{rank:05d}.log" for rank in range(2)]
        until(lambda: all("requests in flight have" in log.read_text() for log in logs))
        if whole_group and method == "forkserver":
            script.popen.wait(300)
        server.release()
        assert script.ends_with_all(300) == (-number if number == signal.SIGINT else 128 + number)
        for rank in ranks:
            assert Patience(30).ends(rank)
            os.close(rank)
        asked = dict(server.asked)
        assert len(asked) == 6
        assert subprocess.run(script.popen.args, cwd=tmp_path, capture_output=True, check=False).returncode == 0
        assert server.asked == asked, "an answer was requested again"
    assert sorted(outputs(tmp_path / "output")) == ["00000_00000.jsonl", "00001_00000.jsonl"]


def has_the_lock(pid: int) -> bool:
    """Whether a pool's worker waits for its next task, which it does with the lock of the queue."""
    return "pipe_read" in Path(f"/proc/{pid}/wchan").read_text()


@pytest.mark.slow
def test_a_program_that_waits_for_a_lock_which_a_killed_worker_held_ends_on_a_signal(tmp_path: Path) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server, 2, 0.1, "fork", ("an idle worker",))
        idle = {one.pid for one in descendants(script.popen.pid)} - {script.worker(0), script.worker(1)}
        assert len(idle) == 2, "and the manager"
        until(lambda: any(map(has_the_lock, idle)))
        worker = os.pidfd_open(next(filter(has_the_lock, idle)))
        for pid in idle:  # the manager ignores it once
            os.kill(pid, signal.SIGTERM)
        assert Patience(30).ends(worker)
        os.close(worker)
        script.popen.terminate()
        assert script.ends_with_all(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_program_without_a_pool_ends_of_a_signal_as_any_other(number: signal.Signals) -> None:
    program = f"""
import os, signal
from datatrove_ckpt.process.pool_signals import drain_pools, usual_handler
drain_pools([signal.{number.name}])
handler = signal.getsignal(signal.{number.name})
assert usual_handler(handler) is signal.SIG_DFL is not handler
os.kill(os.getpid(), signal.{number.name})
"""
    assert processes.run([sys.executable, "-c", program]).returncode == -number


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
def test_datatroves_pool_ends_after_ours_in_one_process(tmp_path: Path) -> None:
    """Both use one fork server. With the signals blocked that ours blocks, a pool's workers would not be terminated."""
    (tmp_path / "script.py").write_text(AFTER_OURS)
    popen = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert popen.communicate(timeout=400)[0] == "done\n"
    finally:
        left_of(popen.pid)


# the parent watch ----------------------------------------------------------------------------------------------------


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
        assert sum(server.asked.values()) - 2 * QUESTIONS <= 2 * IN_FLIGHT

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
