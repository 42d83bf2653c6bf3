"""Rollouts that do not let go: they swallow their cancellation or block the event loop. Real processes and signals."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document

from datatrove_ckpt.errors import DocumentFailed
from datatrove_ckpt.process import preemption
from datatrove_ckpt.testing import FakeServer
from tests.integration.test_signals import Process
from tests.integration.test_whose_fault import all_of, written
from tests.jobs import ask, documents, runner
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

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


def job(folder: Path, server: FakeServer, rollouts: str, drain: float) -> Process:
    (folder / "my_rollouts.py").write_text(rollouts)
    text = job_yaml(ENDPOINT.replace("URL", server.url), rollout="my_rollouts.ask")
    text = text.replace("workers: 1", "workers: 1\n    start_method: fork")
    text += f"          records_per_chunk: 10\n          drain_seconds: {drain}\n"
    write_job(folder, text, [f"text {number}" for number in range(4)])
    return Process([sys.executable, "-m", "datatrove_ckpt", "run", "job.yaml"], folder)


@pytest.mark.parametrize(
    ("kind", "number"),
    [("sleeps", signal.SIGINT), *((kind, signal.SIGTERM) for kind in STUBBORN)],
)
def test_a_second_signal_ends_a_rank_whatever_its_rollouts_do(
    tmp_path: Path, server: FakeServer, kind: str, number: signal.Signals
) -> None:
    process = job(tmp_path, server, ROLLOUTS.replace("STUBBORN", STUBBORN[kind]), 3600.0)
    process.until("stuck")
    process.popen.send_signal(number)
    time.sleep(preemption.SAME_EVENT + 0.5)  # an earlier one counts as the same event
    process.popen.send_signal(number)
    started = time.monotonic()
    assert process.end() in (128 + number, -number)
    assert time.monotonic() - started < 400
    assert not list((tmp_path / "logs").glob("completions/*"))
    assert process.left == []
    (tmp_path / "good").touch()
    asked = dict(server.asked)
    again = Process(process.popen.args, tmp_path)  # type: ignore[arg-type]
    assert again.end() == 0, again.log
    assert written(tmp_path) == all_of(4)
    assert [server.asked[f"text {n}"] - asked.get(f"text {n}", 0) for n in range(4)] == [0, 0, 0, 1]


def test_a_rank_that_fails_leaves_stubborn_rollouts_behind(tmp_path: Path, server: FakeServer, log: list[str]) -> None:
    async def rollout(document: Document, generate: Any) -> Any:
        if document.id == "id 3":
            raise RuntimeError("it fails")
        while document.id == "id 2" and not good:
            with suppress(BaseException):
                await asyncio.sleep(3600)
        return await ask(document, generate)

    good: list[bool] = []
    with pytest.raises(DocumentFailed, match="it fails"):
        runner(tmp_path, server, rollout).run(documents(4))
    assert [line for line in log if "1 rollouts ignored their cancellation" in line]
    runner(tmp_path, server, accept_changes=True).run(documents(4))
    assert written(tmp_path) == all_of(4)
