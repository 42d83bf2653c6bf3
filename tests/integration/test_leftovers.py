"""What a killed run leaves of its server is ended at the next start on the node; nothing else
is.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace

import pytest

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.servers import leftovers
from datatrove_ckpt.inference.servers.leftovers import ServerRecord, end_leftovers
from datatrove_ckpt.inference.servers.server import InferenceServer
from tests.jobs import leased_gpus
from tests.patience import until
from tests.processes import is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

# A server whose descendants stay when it ends: one as it is, one without its environment (as of a
# program that sets its process title), and one in a session of its own with another output, which
# nothing can tell from another program.
SERVER = """
import os, pathlib, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(1200)"]
kinds = {"plain": {}, "title": {"env": {}},
         "stranger": {"env": {}, "start_new_session": True, "stdout": -3, "stderr": -3}}
for kind, options in kinds.items():
    process = subprocess.Popen(sleep, **options)
    pathlib.Path("new").write_text(str(process.pid))
    os.rename("new", f"{kind}.pid")
time.sleep(1200)
"""
RUNNER = """
import asyncio, os, pathlib
from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.inference.servers.server import InferenceServer
async def main():
    server = InferenceServer(InferenceConfig("custom", "m", model_kwargs={"server_script": "server.py"}), 3)
    await server.launch()
    pathlib.Path("new.g").write_text(str(server._process.pid))
    os.rename("new.g", "guardian.pid")
    await asyncio.sleep(1200)
asyncio.run(main())
"""
OURS = ("plain", "title")


class Run:
    """A process that runs the server above."""

    def __init__(self, folder):
        folder.mkdir()
        (folder / "server.py").write_text(SERVER)
        self.runner = subprocess.Popen(
            [sys.executable, "-c", RUNNER], cwd=folder, stderr=subprocess.DEVNULL
        )
        until((folder / "stranger.pid").exists)
        until((folder / "guardian.pid").exists)
        self.pids = {
            name: int((folder / f"{name}.pid").read_text())
            for name in (*OURS, "stranger", "guardian")
        }

    def kill(self):
        """Kill runner and guardian together: neither can clean up after the other."""
        os.kill(self.pids["guardian"], signal.SIGSTOP)
        self.runner.kill()
        self.runner.wait()
        guardian = os.pidfd_open(self.pids["guardian"])
        os.kill(self.pids["guardian"], signal.SIGKILL)
        select.select([guardian], [], [], 120)
        os.close(guardian)

    def alive(self):
        return {name for name, pid in self.pids.items() if is_alive(pid)}

    def clean_up(self):
        self.runner.kill()
        self.runner.wait()
        for name in (*OURS, "stranger"):
            with suppress(ProcessLookupError):
                os.kill(self.pids[name], signal.SIGKILL)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def run(tmp_path):
    started = Run(tmp_path / "run")
    yield started
    started.clean_up()


def records():
    return list(leftovers._folder().glob("*.json"))


def lease():
    async def play():
        async with leased_gpus(InferenceConfig("vllm", "m")):
            pass

    asyncio.run(play())


def test_the_next_start_on_the_node_ends_what_a_killed_run_has_left(run, log):
    run.kill()
    assert run.alive() == {*OURS, "stranger"}
    lease()
    assert run.alive() == {"stranger"}
    (line,) = log.said("Ended what a killed run had left on this node")
    assert all(f"process {run.pids[kind]} (" in line for kind in OURS)
    assert f"of the server of rank_00003 (runner: process {run.runner.pid})." in line
    assert not records()
    log.clear()
    lease()
    assert not log


@pytest.mark.slow
def test_a_record_from_another_boot_or_pid_namespace_is_left_alone(run, monkeypatch):
    run.kill()
    (path,) = records()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(leftovers, "pid_namespace_id", lambda: "another")
        lease()
    assert run.alive() == {*OURS, "stranger"}
    assert records() == [path]


def test_numbers_that_were_reused_hit_nobody(tmp_path):
    """As if other processes had taken the numbers of runner, guardian and session."""
    with (tmp_path / "log").open("wb") as output:
        another = subprocess.Popen(
            ["sleep", "1200"], stdout=output, stderr=output, start_new_session=True
        )
        ServerRecord.create("test", another.pid, output.fileno())
    (path,) = records()
    record = ServerRecord.read(path)
    assert record is not None
    write = path.write_text
    ended = {"runner": (os.getpid(), 1), "guardian": (another.pid, 1)}
    try:
        # The same session and another log; or one of the two is alive.
        for alive in ({"log": (0, 0)}, {"runner": record.runner}, {"guardian": record.guardian}):
            write(json.dumps(asdict(replace(record, **{**ended, **alive}))))
            end_leftovers()
            assert another.poll() is None
        # The proof that the above was near: the same, and nothing that differs.
        write(json.dumps(asdict(replace(record, **ended))))
        end_leftovers()
        assert another.wait(120) == -signal.SIGKILL
    finally:
        another.kill()
        another.wait()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"nonce": 1}', b'{"runner": [1, 2]}']
)
def test_a_file_that_is_no_record_is_left_alone(content):
    path = leftovers._folder() / "x.json"
    path.write_bytes(content)
    end_leftovers()
    assert path.exists()


async def test_a_server_that_stops_leaves_no_record(tmp_path):
    script = tmp_path / "server.py"
    script.write_text("import signal; signal.pause()")
    server = InferenceServer(
        InferenceConfig("custom", "m", model_kwargs={"server_script": str(script)}), 0
    )
    await server.launch()
    (path,) = records()
    kept = json.loads(path.read_text())
    assert kept["guardian"][0] == server._process.pid
    await server.stop()
    assert not records()


def test_a_server_starts_where_no_record_can_be_written(log):
    folder = leftovers._folder()
    folder.rmdir()
    folder.touch()
    ServerRecord.create("test", os.getpid(), 1)
    end_leftovers()
    assert len(log) == 2
