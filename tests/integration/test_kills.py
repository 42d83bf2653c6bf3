"""Real processes, really killed, against a server that counts and outlives them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.testing import FakeServer, outputs

JOB = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner

folder, url, kind, tasks = sys.argv[1:]
config = InferenceConfig("endpoint", "fake", endpoint_url=url, max_concurrent_generations=16)


async def rollout(document, generate):
    first = await generate({"messages": [{"role": "user", "content": document.text}], "temperature": 1})
    second = await generate({"messages": [{"role": "user", "content": document.text + " again"}]})
    return [first, second]


name = "${rank}_chunk_${chunk_index}." + ("parquet" if kind == "parquet" else "jsonl")
writer = (
    ParquetWriter(folder + "/output", name)
    if kind == "parquet"
    else JsonlWriter(folder + "/output", name, compression=None if kind == "plain" else kind)
)
runner = InferenceRunner(
    rollout, config, writer, checkpoints_local_dir=folder + "/checkpoints", records_per_chunk=7, sync_seconds=0.01
)
reader = JsonlReader(folder + "/input", add_file_path=False)
if __name__ == "__main__":
    LocalPipelineExecutor([reader, runner], tasks=int(tasks), workers=int(tasks), logging_dir=folder + "/logs").run()
"""

IN_FLIGHT = 16
KILLS = 3
MOST = 30
"""Requests of one life, at most, before it is killed; those in flight may be answered still."""
DOCUMENTS = 100
assert 2 * DOCUMENTS > KILLS * (MOST + 2 * IN_FLIGHT), "two requests each: no life may end before it is killed"


class Job:
    """The job above in a process group of its own, as often as it takes."""

    def __init__(self, folder: Path, url: str, kind: str, tasks: int = 1) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "job.py").write_text(JOB)
        (folder / "input").mkdir()
        for task in range(tasks):
            rows = [{"id": f"{task} {n}", "text": f"document {task} {n}"} for n in range(DOCUMENTS // tasks)]
            (folder / "input" / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._argv = [sys.executable, str(folder / "job.py"), str(folder), url, kind, str(tasks)]
        self.log = ""

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def finish(self, process: subprocess.Popen[str]) -> int:
        try:
            self.log, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.log, _ = process.communicate()
        return process.returncode


def same_answer(payload: dict[str, Any], times: int) -> str:
    """Tells each question's answer without depending on when it is asked."""
    return f"answer to {payload['messages'][-1]['content']}"


class Killing:
    """A server's delay that signals a job's process group before one of its answers, however busy the machine is."""

    def __init__(self, number: signal.Signals, chance: random.Random) -> None:
        self._number, self._chance = number, chance
        self._left = 0
        self._process: subprocess.Popen[str] | None = None

    def after(self, requests: int, process: subprocess.Popen[str]) -> None:
        """Kills it after so many more requests, wherever it is by then."""
        self._left, self._process = requests, process

    def __call__(self, payload: dict[str, Any], times: int) -> float:
        self._left -= 1
        if self._left <= 0 and self._process is not None:
            os.killpg(self._process.pid, self._number)
            self._process = None
        return 0.02 * self._chance.random()


@pytest.mark.parametrize(
    ("kind", "number", "tasks"),
    [
        ("plain", signal.SIGKILL, 1),
        ("plain", signal.SIGKILL, 2),
        ("gzip", signal.SIGKILL, 1),
        ("parquet", signal.SIGKILL, 1),
        ("plain", signal.SIGTERM, 1),
        ("plain", signal.SIGINT, 1),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_a_job_killed_at_random_moments_ends_with_the_bytes_of_one_that_was_not(
    tmp_path: Path, kind: str, number: signal.Signals, tasks: int
) -> None:
    chance = random.Random(f"{kind} {number} {tasks}")
    killing = Killing(number, random.Random(chance.random()))
    with FakeServer(same_answer, delay=killing) as server:
        undisturbed = Job(tmp_path / "undisturbed", server.url, kind, tasks)
        assert undisturbed.finish(undisturbed.start()) == 0, undisturbed.log
        server.asked.clear()

        job = Job(tmp_path / "killed", server.url, kind, tasks)
        for _ in range(KILLS):
            process = job.start()
            killing.after(chance.randrange(1, MOST), process)
            assert job.finish(process) != 0, job.log
        assert job.finish(job.start()) == 0, job.log

    assert outputs(tmp_path / "killed" / "output") == outputs(tmp_path / "undisturbed" / "output")
    again = sum(server.asked.values()) - 2 * DOCUMENTS
    print(f"{kind} {number.name} {tasks} tasks: {KILLS} kills, {again} of {2 * DOCUMENTS} requests asked again")
    write_group = 8
    assert 0 <= again <= KILLS * tasks * (IN_FLIGHT + write_group)
