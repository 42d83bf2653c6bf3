"""Rollouts that do not let go: they swallow their cancellation or block the event loop.

Real processes and signals.
"""

import asyncio
import signal
import sys
import time
from contextlib import suppress

import pytest

from datatrove_ckpt.errors import DocumentFailed
from datatrove_ckpt.process import preemption
from tests.jobs import all_of, ask, ids, run_job
from tests.processes import Process
from tests.yaml_jobs import endpoint, job_yaml, write_job

pytestmark = pytest.mark.slow
STUBBORN = {
    "swallows its cancellation": "await asyncio.sleep(3600)",
    "asks again and again": "await generate({'messages': [{'role': 'user', 'content': str(next(numbers))}]})",
    "sleeps": "time.sleep(3600)",
    "computes": "sum(range(100000))",
    "sleeps in a thread": "await asyncio.to_thread(time.sleep, 3600)",
}
ROLLOUTS = """
import asyncio, itertools, pathlib, time

numbers = itertools.count()

async def ask(document, generate):
    number = int(document.id.split()[1])
    if pathlib.Path("good").exists() or number < 3:
        return await generate({"messages": [{"role": "user", "content": document.text}]})
    journal = pathlib.Path("checkpoints/00000/chunk_00000.jsonl")
    while not journal.exists() or journal.read_bytes().count(b"\\n") < 3:  # the others, or their answers would be lost
        await asyncio.sleep(0.01)
    print("stuck", flush=True)
    while True:
        try:
            STUBBORN
        except BaseException:
            pass
"""


def job(folder, server, rollouts, drain):
    (folder / "my_rollouts.py").write_text(rollouts)
    text = job_yaml(endpoint(server), rollout="my_rollouts.ask")
    text = text.replace("workers: 1", "workers: 1\n    start_method: fork")
    text += f"          records_per_chunk: 10\n          drain_seconds: {drain}\n"
    write_job(folder, text, [f"text {number}" for number in range(4)])
    return Process([sys.executable, "-m", "datatrove_ckpt", "run", "job.yaml"], folder)


@pytest.mark.parametrize(
    "kind, number",
    [("sleeps", signal.SIGINT), *((kind, signal.SIGTERM) for kind in STUBBORN)],
)
def test_a_second_signal_ends_a_rank_whatever_its_rollouts_do(tmp_path, server, kind, number):
    process = job(tmp_path, server, ROLLOUTS.replace("STUBBORN", STUBBORN[kind]), 3600.0)
    process.until("stuck")
    process.popen.send_signal(number)
    time.sleep(preemption.SAME_EVENT + 5)  # an earlier one counts as the same event
    process.popen.send_signal(number)
    assert process.end() in (128 + number, -number)
    assert not list((tmp_path / "logs").glob("completions/*"))
    assert process.left == []
    (tmp_path / "good").touch()
    asked = dict(server.asked)
    again = Process(process.popen.args, tmp_path)
    assert again.end() == 0, again.log
    assert ids(tmp_path) == all_of(4)
    assert [server.asked[f"text {n}"] - asked.get(f"text {n}", 0) for n in range(4)] == [0, 0, 0, 1]


def test_a_rank_that_fails_leaves_stubborn_rollouts_behind(tmp_path, server, log):
    async def rollout(document, generate):
        if document.id == "id 3":
            raise RuntimeError("it fails")
        while document.id == "id 2" and not good:
            with suppress(BaseException):
                await asyncio.sleep(3600)
        return await ask(document, generate)

    good = []
    with pytest.raises(DocumentFailed, match="it fails"):
        run_job(tmp_path, server, 4, rollout)
    assert log.said("1 rollouts ignored their cancellation")
    run_job(tmp_path, server, 4, accept_changes=True)
    assert ids(tmp_path) == all_of(4)


FORKS = {
    "sys.exit(3)": 3,
    "sys.exit(0)": 0,
    "raise ValueError('of the fork')": 1,
    "return True": 0,
    "await asyncio.sleep(3600)": 1,  # a fork has no running event loop
}


FORKING = """
import asyncio, os, sys, time

forked = asyncio.Event()

async def fork():
    child = os.fork()
    if child == 0:
        FORK
    deadline = time.monotonic() + 300
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    print("child", os.waitstatus_to_exitcode(ended[1]) if ended[0] else "goes on", flush=True)

async def ask(document, generate):
    answer = await generate({"messages": [{"role": "user", "content": document.text}]})
    if document.id == "id 1":
        if await fork():
            return answer
        forked.set()
    await forked.wait()
    return answer
"""


@pytest.mark.parametrize("fork", FORKS)
def test_a_fork_that_falls_out_of_a_rollout_ends_and_harms_nobody(tmp_path, server, fork):
    process = job(tmp_path, server, FORKING.replace("FORK", fork), 5.0)
    assert process.end() == 0, process.log
    assert f"child {FORKS[fork]}" in process.log
    assert ids(tmp_path) == all_of(4)
    assert process.log.count("4 of 4 documents written") == 1
