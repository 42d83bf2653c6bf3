"""datatrove's executor: its manager and the workers of its pool end with its process, and a signal ends a task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from datatrove_ckpt.inference.servers.guardian import descendants, kill_session, process_table
from datatrove_ckpt.testing import FakeServer, outputs
from tests.patience import Patience

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
    if len(sys.argv) > 5:
        threading.Thread(target=threading.Event().wait, args=(3600,)).start()
    executor = LocalPipelineExecutor(
        [documents, runner], tasks=workers, workers=workers, logging_dir="logs", start_method=sys.argv[4]
    )
    try:
        executor.run()
    except Exception as error:
        print("ENDS WITH", type(error).__name__, error, flush=True)
        raise
    print("done", flush=True)
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
        self.popen = subprocess.Popen(
            [sys.executable, "script.py", server.url, str(drain), str(workers), method, *options],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while len(server.payloads) < 3 * workers:
            if self.popen.poll() is not None or time.monotonic() > deadline:
                pytest.fail(self.popen.communicate()[0])
            time.sleep(0.01)

    def worker(self, rank: int) -> int:
        return int((self.folder / f"worker {rank}").read_text())

    def ends_with_all(self, seconds: float = 5) -> int:
        """Within so many seconds; gives the exit code."""
        try:
            self.output = Patience(seconds).output_of(self.popen)
            return self.popen.returncode
        finally:
            assert left_of(self.popen.pid) == []


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGINT, -signal.SIGINT),
        (signal.SIGUSR1, 128 + signal.SIGUSR1),
        (signal.SIGHUP, 128 + signal.SIGHUP),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_script_in_a_pipe_ends_with_its_manager(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server)
        assert len(descendants(script.popen.pid)) == 2, "the manager and its guard"
        os.kill(script.popen.pid, number)
        assert script.ends_with_all() == code
    assert ("Traceback" in script.output) == (number == signal.SIGINT)
    assert "done" not in script.output


@pytest.mark.slow
def test_a_signal_to_all_ends_the_manager_first_and_is_no_error_of_its(tmp_path: Path) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server)
        os.killpg(script.popen.pid, signal.SIGTERM)
        assert script.ends_with_all() == -signal.SIGTERM
    assert "Traceback" not in script.output


@pytest.mark.slow
def test_a_run_that_is_done_ends_with_its_guard(tmp_path: Path) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server)
        server.release()
        assert script.ends_with_all() == 0
    assert script.output.endswith("done\n")


@pytest.mark.slow
def test_a_thread_that_python_would_wait_for_keeps_nobody(tmp_path: Path) -> None:
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server, options=("a thread",))
        os.kill(script.popen.pid, signal.SIGTERM)
        assert script.ends_with_all() == -signal.SIGTERM


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


@pytest.mark.slow
def test_ctrl_c_ends_a_pool_whose_ranks_drain_and_what_they_got_is_kept(tmp_path: Path) -> None:
    """Each worker gets SIGINT, and then the SIGTERM with which the parent ends its pool."""
    with FakeServer(hold_after=0) as server:
        script = Script(tmp_path, server, 2, 20, "fork")
        os.killpg(script.popen.pid, signal.SIGINT)
        threading.Timer(1.0, server.release).start()
        assert script.ends_with_all(300) == -signal.SIGINT
        asked = dict(server.asked)
        assert subprocess.run(script.popen.args, cwd=tmp_path, capture_output=True, check=False).returncode == 0
        assert server.asked == asked, "no answer was requested again"
    assert sorted(outputs(tmp_path / "output")) == ["00000_00000.jsonl", "00001_00000.jsonl"]


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
