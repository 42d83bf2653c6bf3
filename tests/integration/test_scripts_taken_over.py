"""Jobs of scripts: what an executor's calls do, and runs of datatrove's that go on."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

import datatrove_ckpt
from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.datatrove_job import write_input
from tests.jobs import rejects, runner

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"


def outputs_of(folder):
    """How often each document is in the output."""
    return Counter(
        json.loads(line)["id"] for text in outputs(folder).values() for line in text.splitlines()
    )


def executor(step, tasks=1):
    logs = Path(step.checkpoints_root).with_name("logs")
    return LocalPipelineExecutor([JsonlReader("input"), step], tasks, logging_dir=str(logs))


def test_the_calls_of_an_executor_do_what_the_commands_do(here):
    write_input(here, 9, 9)
    with FakeServer(status=rejects(["text 16"], 401)) as one:
        slow = {"max_concurrent_generations": 1, "max_concurrent_documents": 1}
        first = executor(runner(here, one, config=slow))
        assert "problem" not in {each.state for each in datatrove_ckpt.doctor(first)}
        with pytest.raises(CkptError):
            first.run()
    with FakeServer() as server:
        there = here / "there"
        there.mkdir()
        shutil.copytree(here / "checkpoints", there / "checkpoints")
        shutil.copytree(here / "output", there / "output")
        executor(runner(there, server)).run()
        assert outputs_of(there / "output") == Counter(f"id {n}" for n in range(18))
        assert server.asked.total() == 2


OF_CLASSES = """
from pathlib import Path
from datatrove.executor import LocalPipelineExecutor
from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.readers import JsonlReader
from dataclasses import dataclass
from functools import partial
from tests.datatrove_job import SIZE, make_writer, payload

WORDS = {"first": "first", "second": "second"}

@dataclass
class Ask:
    words: dict

    async def __call__(self, document, generate, suffix):
        result = await generate(payload(f"{self.words['first']} {document.text}{suffix}"))
        if "twice" in document.text:
            result = await generate(payload(f"{self.words['second']} {document.text} {result.text}"))
        return None if "dropped" in document.text else result

def context(suffix):
    return {"suffix": suffix}

step = InferenceRunner(
    Ask(WORDS),
    InferenceConfig("endpoint", "fake", endpoint_url="URL"),
    make_writer(Path("new")),
    checkpoints_local_dir="new/checkpoints",
    records_per_chunk=SIZE,
    finished_from=["output", "checkpoints"],
    shared_context=partial(context, suffix=""),
)
executor = LocalPipelineExecutor([JsonlReader("input"), step], logging_dir="new/logs")
if __name__ == "__main__":
    executor.run()
"""


def test_a_script_of_classes_takes_over_what_datatroves_has_finished(here, command):
    shutil.copytree(SCRIPTS.parent / "datatrove_0_9_0", here, dirs_exist_ok=True)
    with FakeServer() as server:
        (here / "job.py").write_text(OF_CLASSES.replace("URL", server.url))
        path = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2])}
        ended = processes.run([sys.executable, "job.py"], cwd=here, env=path)
        assert ended.returncode == 0, ended.stderr
        assert {text.split(" answer")[0] for text in server.asked} == {
            "first text 5 dropped",
            "first text 10 twice",
            "second text 10 twice",
        }
        assert "no problem" in command("verify", "new", "--full")
