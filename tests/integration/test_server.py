"""Real processes: servers that start, fail, die, and never outlive their runner."""

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ServerStartFailed
from datatrove_ckpt.inference.servers import server
from datatrove_ckpt.inference.servers.server import InferenceServer
from tests import processes
from tests.clients import client_of
from tests.engines import SERVE
from tests.jobs import started_server
from tests.patience import Patience, until_async
from tests.processes import command_lines, is_alive

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl")

# A custom server with a grandchild that has left its session, its group and its parent: the hardest
# process to find.
SERVER = f"""
import subprocess, sys
{SERVE}
port = int(sys.argv[sys.argv.index("--port") + 1])
hidden = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\nprint(os.getpid(), flush=True)\\ntime.sleep(600)"
if "--family" in sys.argv:
    child = subprocess.Popen([sys.executable, "-S", "-c", hidden], stdout=subprocess.PIPE)
    open("pids", "w").write(f"{{os.getppid()}} {{os.getpid()}} {{int(child.stdout.readline())}}")
if "--helper" in sys.argv:  # writes nothing to the server's log
    quiet = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    open("helper", "w").write(str(quiet.pid))
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def complete(payload):
    os._exit(41)
print("serving", flush=True)
accept(socket.create_server(("127.0.0.1", port)))
"""

RUNNER = """
import asyncio, os, sys, tempfile
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.servers.server import InferenceServer
tempfile.tempdir = os.getcwd()  # a runner that is killed leaves its log
async def main():
    kwargs = {"server_script": "script.py", "family": True}
    config = InferenceConfig("custom", "m", model_kwargs=kwargs, server_stop_timeout_sec=1200.0)
    await InferenceServer(config, 0).start()
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _in_tmp_path(here, monkeypatch, policy):
    monkeypatch.setattr("tempfile.tempdir", str(here))
    policy("RELAUNCH", first=0.0)


def dummy(**settings):
    return InferenceConfig("dummy", "m", **settings)


def custom(script, flags=None, **settings):
    Path("script.py").write_text(script)
    settings = {"server_start_max_retries": 0, **settings}
    return InferenceConfig(
        "custom", "m", model_kwargs={"server_script": "script.py", **(flags or {})}, **settings
    )


def logs(folder="."):
    return list(Path(folder).glob("server_rank_*.log"))


def family(file="pids"):
    """Process ids of the guardian, the server and its hidden grandchild; of "helper", that of the
    server's helper.
    """
    return [int(pid) for pid in Path(file).read_text().split()]


@contextlib.contextmanager
def all_gone_within(pids, seconds):
    """Its body must end the processes. Waits on their pidfds afterwards."""
    handles = [os.pidfd_open(pid) for pid in pids]
    try:
        yield
        patience = Patience(seconds)
        for pid, handle in zip(pids, handles, strict=True):
            assert patience.ends(handle), f"process {pid} is still there after {seconds} s"
    finally:
        for handle in handles:
            os.close(handle)


async def failed_start(config):
    with pytest.raises(ServerStartFailed) as caught:
        await InferenceServer(config, 0).start()
    return str(caught.value)


async def test_a_server_started_again_has_a_new_key_and_appends_to_its_log():
    running = InferenceServer(custom(SERVER, server_log_folder="logs"), 0)
    keys = []
    for _ in range(2):
        await running.start()
        keys.append(running.api_key)
        await running.stop()
    assert None not in keys
    assert keys[0] != keys[1]
    assert [path.read_text().count("serving") for path in logs("logs")] == [2]


@linux_only
@pytest.mark.matrix("stubborn", [False, True])
def test_no_process_of_the_tree_outlives_a_runner_that_was_killed(stubborn):
    custom(SERVER)
    code = (
        RUNNER.replace('"family": True', '"family": True, "stubborn": True') if stubborn else RUNNER
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as runner:
        assert runner.stdout
        assert runner.stdout.readline() == b"ready\n"
        with all_gone_within(family(), 10):
            runner.kill()


@linux_only
async def test_a_killed_guardian_leaves_no_server():
    running = InferenceServer(custom(SERVER, {"family": True, "helper": True}), 0)
    await running.start()
    guardian_pid, engine, _hidden = family()
    os.kill(guardian_pid, signal.SIGKILL)
    assert await running.watch() == -signal.SIGKILL
    with all_gone_within([engine, *family("helper")], 10):
        await running.stop()
    # Out of the guardian's reach, because it had left the session, too.
    os.kill(_hidden, signal.SIGKILL)


@linux_only
async def test_a_stop_reaches_the_whole_family_and_a_stubborn_server_is_killed():
    flags = {"family": True, "stubborn": True}
    running = InferenceServer(custom(SERVER, flags, server_stop_timeout_sec=0.3), 0)
    await running.start()
    began = time.monotonic()
    with all_gone_within(family(), 0.1):
        await running.stop()
    assert time.monotonic() - began >= 0.3


@pytest.mark.slow
@linux_only
async def test_signals_to_the_whole_job_do_not_end_the_guardian():
    async with started_server(custom(SERVER, {"family": True})) as running:
        guardian_pid, engine, orphan = family()
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGUSR2,
        ):
            os.kill(guardian_pid, number)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(engine, number)
        os.kill(orphan, signal.SIGKILL)  # which its guardian reaps, once it has had the signals
        await until_async(lambda: not Path(f"/proc/{orphan}").exists())
        assert await running.is_ready()
        assert running.is_running


async def test_a_script_that_exits_at_once_fails_at_once_with_its_log():
    config = custom(
        "import sys; print('first\\nthe cause'); sys.exit(3)", server_start_max_retries=2
    )
    text = await failed_start(config)  # the window is longer than a test may take
    for words in ("exited with code 3", "  the cause", "Command:", "script.py --port"):
        assert words in text


async def test_a_failed_start_is_tried_again():
    script = "import pathlib, sys\nif not pathlib.Path('once').exists(): pathlib.Path('once').touch(); sys.exit(3)\n"
    async with started_server(custom(script + SERVER, server_start_max_retries=1)):
        pass


def test_a_start_with_a_permanent_cause_is_not_tried_again():
    script = "open('runs', 'a').write('x')\nimport no_such_module"
    text = asyncio.run(failed_start(custom(script, server_start_max_retries=5)))
    assert "'no_such_module' is missing. Run: pip install no_such_module" in text
    assert Path("runs").read_text() == "x"


@linux_only
async def test_a_cancelled_start_leaves_nothing():
    script = "import os, time; open('pids', 'w').write(f'{os.getppid()} {os.getpid()}')\n"
    script += "time.sleep(600)"
    os.mkfifo("pids")
    running = InferenceServer(custom(script), 0)
    start = asyncio.create_task(running.start())
    pids = await asyncio.to_thread(family)  # waits on the fifo until the script is there
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    for pid in pids:
        assert not is_alive(pid)
    assert not logs()


@pytest.mark.slow
def test_a_port_that_was_taken_meanwhile_is_exchanged(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], server.free_port()])
        monkeypatch.setattr(server, "free_port", lambda: next(ports))

        async def play():
            async with started_server(dummy(server_start_max_retries=1)) as running:
                assert running.url != f"http://127.0.0.1:{taken.getsockname()[1]}"

        asyncio.run(play())


@linux_only
async def test_a_server_that_dies_is_noticed_with_its_exit_code_and_log_and_the_key_is_nowhere():
    script = SERVER + "\n"
    script = script.replace(
        'print("serving"', 'print(os.environ["DATATROVE_CKPT_API_KEY"]); print("serving"'
    )
    config = custom(script, server_patience_seconds=0.1)
    async with started_server(config) as running:
        key = running.api_key
        assert key
        assert not [line for line in command_lines() if key.reveal().encode() in line]
        watch = asyncio.create_task(running.watch())
        async with client_of(config, [running.url], key) as client:
            with pytest.raises(Exception, match="No request was answered"):
                await client.complete(b"{}")
        code = await watch
        text = await running.report(f"died with exit code {code}", code)
        assert re.search(r"(?s)died with exit code 41\..*\*\*\*.*serving", text)
        assert key.reveal() not in text


# whole jobs, as users run them -------------------------------------------------------------------

JOB = """
import base64, json, os, pathlib, secrets, tempfile, types
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner
import datatrove_ckpt.inference.client.http1 as plain
import datatrove_ckpt.inference.servers.server as server
job = json.loads(pathlib.Path("job.json").read_text())
tempfile.tempdir = os.environ["TMPDIR"] = os.getcwd()  # where leaks are looked for
def canary():  # not a value: values that a rollout uses are part of a run's identity
    return base64.b64decode(job["canary"]).decode()
server.secrets = types.SimpleNamespace(choice=secrets.choice, token_urlsafe=lambda size: canary())
if job["case"] == "break":  # a bug of ours, in a line that names the key
    plain.Transport._head_for = lambda self, url, headers: headers[1 / 0]
def read(data, rank=0, world_size=1):
    yield Document(text=f"document of rank {rank}", id=str(rank))
async def rollout(document, generate):
    result = await generate({"messages": [{"role": "user", "content": document.text}]})
    if job["case"] == "raise":
        raise ValueError("an error of the user's")
    lines = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    if any(canary().encode() in line for line in lines):
        raise SystemError("the key is in a command line")
    return result
if __name__ == "__main__":
    runner = InferenceRunner(
        rollout,
        InferenceConfig(**job["config"]),
        JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir="checkpoints",
    )
    LocalPipelineExecutor([read, runner], logging_dir="logging").run()
"""
CANARY = "canary-4-privacy-tests"


def leaks():
    """The files below the current folder that hold the key."""
    return [
        str(path)
        for path in Path.cwd().rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes()
    ]


DUMMY = {"server_type": "dummy", "model_name_or_path": "m", "server_log_folder": "logs"}
TELLTALE = "import os, sys; print(os.environ['DATATROVE_CKPT_API_KEY'][::-1]); sys.exit('no luck')"


@linux_only
@pytest.mark.matrix("case", ["break", "answer", "raise", "no start"])
def test_the_key_of_a_launched_server_is_in_no_file_and_no_command_line(case):
    Path("script.py").write_text(TELLTALE)
    custom = {"server_type": "custom", "model_kwargs": {"server_script": "script.py"}}
    settings = DUMMY | custom if case == "no start" else DUMMY
    canary = base64.b64encode(CANARY.encode()).decode()
    Path("job.json").write_text(json.dumps({"case": case, "canary": canary, "config": settings}))
    Path("main.py").write_text(JOB)
    done = processes.run([sys.executable, "main.py"], timeout=400)
    output = done.stdout + done.stderr
    assert (done.returncode == 0) == (case == "answer"), output
    assert CANARY not in output
    assert Path("logging/executor.json").exists(), output
    if case in ("raise", "no start"):
        said = "an error of the user's" if case == "raise" else "no luck"
        assert said in Path("logging/logs/task_00000.log").read_text()
    assert leaks() == []
