"""Warm servers: a rank takes over the running servers of the rank before, and no server outlives
its process.
"""

import asyncio
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor as DatatroveExecutor
from datatrove.pipeline.readers import JsonlReader

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.errors import DocumentFailed
from datatrove_ckpt.inference.servers import host, server
from datatrove_ckpt.inference.servers.guardian import process_table
from datatrove_ckpt.inference.servers.host import close_warm_servers
from datatrove_ckpt.testing import outputs
from tests import jobs
from tests.engines import SCRIPT, engines, lines, run, runner
from tests.patience import until
from tests.processes import is_alive


@pytest.fixture(autouse=True)
def _in_tmp_path(here, monkeypatch, policy):
    monkeypatch.setattr("tempfile.tempdir", str(here))
    policy("RESTART", first=0.01)
    Path("engine.py").write_text(SCRIPT)


def running():
    return [pid for pid in engines() if is_alive(pid)]


def test_a_rank_takes_over_the_server_of_the_one_before_and_writes_the_same(log):
    for rank in (3, 7, 8):
        run(rank, server_log_folder="logs", hang_timeout=600 + rank)
    assert len(engines()) == 1
    path = Path("logs/server_rank_00003.log")
    for rank in (7, 8):
        assert f"DEBUG Task {rank} takes over server 0 (log {path.absolute()}).\n" in log
    run(8, folder="cold", reuse_servers=False)
    assert len(engines()) == 2
    assert not running()
    (cold,) = outputs(Path("cold/output")).items()
    assert cold in outputs(Path("job/output")).items()


def test_a_rank_without_documents_starts_no_server_and_leaves_the_warm_one():
    runner().run([], 0, 9)
    assert not Path("engines").exists()
    run(1)
    runner().run([], 2, 9)
    run(3)
    assert len(running()) == len(engines()) == 1


@pytest.mark.matrix("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_not_well_between_two_ranks_is_started_anew(number, monkeypatch, log):
    kill = server.InferenceServer.kill

    async def kill_and_have_patience(self):
        monkeypatch.setattr(server, "_TAKE_OVER_TIMEOUT", 300.0)
        await kill(self)

    run(0)
    monkeypatch.setattr(server.InferenceServer, "kill", kill_and_have_patience)
    monkeypatch.setattr(server, "_TAKE_OVER_TIMEOUT", 0.2)
    (guardian,) = [each.parent for each in process_table() if each.pid == engines()[0]]
    os.kill(engines()[0], number)
    if number == signal.SIGKILL:
        until(lambda: not is_alive(guardian))
    run(1)
    assert len(engines()) == 2
    assert running() == engines()[1:]
    (line,) = log.said("Task 1 cannot take over server 0 (log")
    what = "has ended" if number == signal.SIGKILL else "does not answer"
    assert line.startswith("WARNING")
    assert line.endswith(f"it {what}. It is started anew.\n")
    run(2)
    assert len(engines()) == 2
    assert "takes over server 0 (log" in log[-1] + "".join(log)


@pytest.mark.matrix("end", [KeyboardInterrupt, DocumentFailed])
@pytest.mark.parametrize("after_its_last_answer", [False, True])
def test_a_rank_that_is_stopped_or_fails_leaves_no_server(end, after_its_last_answer, monkeypatch):
    def finish(*_):
        assert running(), "not the moment that this test is about"
        signal.raise_signal(signal.SIGINT) if end is KeyboardInterrupt else 1 / 0

    async def rollout(document, generate):
        result = await jobs.ask(document, generate)
        if not after_its_last_answer:
            finish()
        return result

    run(0)
    if after_its_last_answer:
        monkeypatch.setattr("datatrove_ckpt.output.chunk_writing.ChunkOutput.finish", finish)
    with pytest.raises((end, ZeroDivisionError)):
        run(1, "only", rollout=rollout, folder="another")
    assert len(engines()) == 1
    assert not running()


def change_environment():
    os.environ["SOME_SWITCH_OF_AN_ENGINE"] = "on"
    return {}


@pytest.mark.matrix(
    "change, is_other",
    [
        (lambda: {"model_kwargs": {"server_script": "engine.py", "seed": 1}}, True),
        (change_environment, True),
        (lambda: {"replicas": 2}, True),
        (lambda: {"reuse_servers": False}, True),
        (lambda: {"request_timeout": 100.0, "server_max_restarts": 1}, False),
    ],
)
def test_a_server_with_other_settings_is_stopped_before_the_new_one_starts(
    change,
    is_other,
    monkeypatch,
):
    monkeypatch.delenv("SOME_SWITCH_OF_AN_ENGINE", raising=False)
    run(0)
    run(1, folder="another", **change())
    monkeypatch.delenv("SOME_SWITCH_OF_AN_ENGINE", raising=False)
    if not is_other:
        assert len(engines()) == 1
        return
    assert set(lines("alive")[:2]) == {"0"}, (
        "the new server started while the old one held its GPUs"
    )
    assert not is_alive(engines()[0])


def test_nothing_of_warm_servers_is_pickled_or_shown():
    step = runner()
    step.run([Document(text="a", id="a")], 0, 9)
    ((settings, (server,)),) = host._warm.values()
    key = server.api_key
    assert key is not None
    assert key.reveal() not in repr(server) + repr(vars(server)) + settings
    assert key.reveal().encode() not in pickle.dumps(step)


# the end of the process --------------------------------------------------------------------------

JOB = """
import os, signal, sys, tempfile, time
import multiprocess
from datatrove.data import Document
sys.path.insert(0, {root!r})
tempfile.tempdir = os.getcwd()
from tests.engines import engines, run
from tests.processes import is_alive
def two_ranks():
    run(0)
    run(1)
    assert len(engines()) == 1 and is_alive(engines()[0])
if __name__ == "__main__":
    {end}
"""
ENDS = {
    "exit": "two_ranks()",
    "an error": "two_ranks(); 1 / 0",
    "Ctrl-C": "two_ranks(); signal.raise_signal(signal.SIGINT)",
    "a spawned child's end": (
        "child = multiprocess.get_context('spawn').Process(target=two_ranks); child.start(); child.join()"
    ),
}


def job(end):
    Path("job.py").write_text(JOB.format(root=str(Path(__file__).parents[2]), end=end))
    return subprocess.Popen(
        [sys.executable, "job.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ends_normally_has_ended_its_servers_first(end):
    process = job(ENDS[end])
    _, errors = process.communicate(timeout=400)
    assert len(engines()) == 1, errors
    assert not running()
    assert not list(Path().glob("server_rank_*"))
    assert process.returncode == {"an error": 1, "Ctrl-C": -2}.get(end, 0), errors


@pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd")
@pytest.mark.matrix("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_between_two_ranks_leaves_no_server(number):
    # Not one long sleep: a signal that comes just before it would be handled after it only.
    with job(
        "two_ranks(); print('between', flush=True); [time.sleep(0.1) for _ in range(6000)]"
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "between\n"
        (engine,) = running()
        handle = os.pidfd_open(engine)
        process.send_signal(number)
        assert process.wait(300) == -number
        assert select.select([handle], [], [], 120)[0], "the server outlived its process"
        os.close(handle)


@pytest.mark.slow
def test_a_fork_neither_ends_nor_keeps_the_servers_of_its_parent():
    run(0, server_stop_timeout_sec=1200.0)
    (engine,) = running()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            close_warm_servers()
            os.write(write, b"closed")
            signal.pause()
        os._exit(0)
    try:
        assert os.read(read, 100) == b"closed"
        assert is_alive(engine)
        run(1, server_stop_timeout_sec=1200.0)
        assert engines() == [engine]
        close_warm_servers()  # the fork does not hold the lifeline: that would take 20 minutes
        assert not is_alive(engine)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


# executors ---------------------------------------------------------------------------------------


def steps(folder, tasks, **settings):
    """A pipeline with one document for each task."""
    Path("input").mkdir(exist_ok=True)
    for rank in range(tasks):
        Path(f"input/{rank:02d}.jsonl").write_text(f'{{"text": "text {rank}", "id": "{rank}"}}\n')
    return [JsonlReader(str(Path("input").absolute())), runner(folder, **settings)]


def run_local(executor, folder, workers, **settings):
    logs = str(Path(folder, "logs").absolute())
    pipeline = steps(folder, 3, **settings)
    executor(pipeline, tasks=3, workers=workers, logging_dir=logs, start_method="fork").run()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize(
    "executor", [LocalPipelineExecutor, DatatroveExecutor], ids=["ours", "datatrove's"]
)
def test_a_process_of_a_local_executor_starts_one_server_for_all_its_tasks(executor, workers):
    run_local(executor, "job", workers)
    if executor is LocalPipelineExecutor:
        assert not running()
    close_warm_servers()
    warm_starts = len(engines())
    assert warm_starts <= workers
    until(lambda: not running())
    run_local(executor, "cold", workers, reuse_servers=False)
    assert len(engines()) - warm_starts == 3
    assert len(outputs(Path("job/output"))) == 3
    assert outputs(Path("job/output")) == outputs(Path("cold/output"))


def test_rollouts_that_block_all_threads_of_the_event_loop_hold_back_no_server():
    """As agents that ask ``generate.url()`` do."""

    def asked(url):
        payload = json.dumps(jobs.chat("a")).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{url}/chat/completions", payload, headers)) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    async def rollout(document, generate):
        one_thread = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(one_thread)
        async with generate.url() as url:
            return await asyncio.to_thread(asked, url)

    run(0, "a", rollout=rollout)
    (answer,) = [row["metadata"]["rollout_results"] for row in jobs.rows(Path("job"))]
    assert answer == ["says a"]
