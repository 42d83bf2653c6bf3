"""Jobs of scripts: what an executor's calls do, and runs of datatrove's that go on."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datatrove.pipeline.inference.run_inference import InferenceRunner as Theirs

import datatrove_ckpt
from datatrove_ckpt import InferenceRunner, LocalPipelineExecutor
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.commands import Command
from tests.data.scripts.two_stages import LONGEST
from tests.datatrove_job import text_of, write_input
from tests.jobs import rejects, runner
from tests.patience import until

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"


def outputs_of(folder: Path) -> Counter[str]:
    """How often each document is in the output."""
    return Counter(json.loads(line)["id"] for text in outputs(folder).values() for line in text.splitlines())


def executor(step: InferenceRunner, tasks: int = 1) -> LocalPipelineExecutor:
    logs = Path(step.checkpoints_root).with_name("logs")
    return LocalPipelineExecutor([JsonlReader("input"), step], tasks, logging_dir=str(logs))


async def ask_more(document: Any, generate: Any) -> Any:
    return await generate({"messages": [{"role": "user", "content": f"more {document.text}"}]})


def test_the_calls_of_an_executor_do_what_the_commands_do(here: Path, command: Command) -> None:
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


def test_a_script_of_classes_takes_over_what_datatroves_has_finished(here: Path, command: Command) -> None:
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


@pytest.mark.slow
@pytest.mark.real_process
def test_a_script_of_datatroves_that_was_killed_is_taken_over(here: Path) -> None:
    """Its import line is changed, and it is started as before. What that says is typed, then it is started again."""
    write_input(here, 30, 30)
    short = [n for n in range(60) if len(text_of(n)) < LONGEST]
    text = (SCRIPTS / "two_stages.py").read_text()
    path = here / "job.py"
    path.write_text(text)
    with FakeServer(hold_after=14) as server:
        start = [sys.executable, "job.py", server.url, "out"]
        process = processes.start(start, cwd=here)
        until(lambda: server.asked.total() == 14 + 2 * 3)  # each task waits for three answers
        until(lambda: written_by_theirs(here) == 14)
        processes.kill_session(process.pid)
        process.communicate()
        server.release()
        asked = Counter(server.asked)

        assert text.count(Theirs.__module__) == 1
        path.write_text(text.replace(Theirs.__module__, "datatrove_ckpt"))
        refused = processes.run(start, cwd=here)
        assert refused.returncode == 1
        assert server.url not in refused.stderr
        (named,) = {*re.findall(r"set finished_from: \[(\S+), OUTPUT\]", refused.stderr)}
        assert Path(named) == here / "out/checkpoints"
        assert server.asked == asked
        assert not (here / "out/done").exists()

        new = text.replace(Theirs.__module__, "datatrove_ckpt")
        new = new.replace("records_per_chunk=4,", 'records_per_chunk=4,\n                finished_from="out",')
        path.write_text(new)
        ended = processes.run([*start[:-1], "new"], cwd=here)
        assert ended.returncode == 0, ended.stderr
        assert (here / "new/done").exists()
        assert outputs_of(here / "new/answers") == Counter(f"id {n}" for n in short)
        again = [question for question in asked if server.asked[question] > 1]
        assert len(again) == 6  # those that were in flight
        assert server.asked.total() == len(short) + 6


def written_by_theirs(folder: Path) -> int:
    """Documents that datatrove's runner has saved: in the output files of its chunks, and in its journals."""
    finished = [*(folder / "out/answers").glob("*.jsonl"), *(folder / "out/checkpoints").glob("*/chunk_*.jsonl")]
    return len({json.loads(line)["id"] for path in finished for line in path.read_text().splitlines() if line})
