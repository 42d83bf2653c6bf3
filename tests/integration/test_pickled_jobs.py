"""Jobs of scripts that were pickled and queued: what happens to the script file afterwards does not
matter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.testing import FakeServer
from tests import processes
from tests.jobs import Budget, ids, rows
from tests.processes import write_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.real_process,
]  # five programs, one after the other

BIN = Path(sys.executable).parent
DOCUMENTS = 8
SCRIPT = """
import re
import sys

from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner
from prompts import ending

PROMPT = "Rewrite:"
STYLES = {"plain": "plainly"}
calls = 0


def payload(text, style):
    words = re.sub(r"\\s+", " ", f"{PROMPT} {text}")
    return {"messages": [{"role": "user", "content": words + STYLES[style] + ending()}]}


def shared():
    return {"style": "plain"}


def adapter(self, document):
    return {"id": document.id, "answer": document.metadata["rollout_results"][0].text, "prompt": PROMPT}


async def rollout(document, generate, style):
    global calls
    calls += 1
    return await generate(payload(document.text, style))


def main():
    (url,) = sys.argv[1:]
    runner = InferenceRunner(
        rollout,
        InferenceConfig("endpoint", "m", endpoint_url=url, max_concurrent_documents=1, server_patience_seconds=60),
        JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None, adapter=adapter),
        shared_context=shared,
        checkpoints_local_dir="checkpoints",
        records_per_chunk=2,
    )
    reader = JsonlReader("input", adapter=lambda self, data, path, number: {**data, "id": f"id {number}"})
    SlurmPipelineExecutor(
        [reader, lambda data, rank, world_size: data, runner],
        tasks=1, time="1:00:00", partition="p", logging_dir="logs",
    ).run()


if __name__ == "__main__":
    main()
"""
PROMPTS = 'def ending():\n    return "!"\n'


class Cluster:
    """A folder with a script, and a fake sbatch. Tasks of the queue run when a test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("input", "site"):
            (folder / name).mkdir()
        for name, said in (("sbatch", "Submitted batch job 7"), ("scontrol", "node1")):
            write_program(folder / "bin" / name, f"#!/bin/sh\necho {said}\n")
        rows = [{"text": f"text {number}"} for number in range(DOCUMENTS)]
        (folder / "input" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)
        (folder / "site" / "prompts.py").write_text(PROMPTS)

    def submit(self, server: FakeServer) -> None:
        done = self._run([sys.executable, str(self.script), server.url])
        assert done.returncode == 0, done.stderr
        assert (self.folder / "logs" / "executor.pik").exists()

    def run_task(self) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "launch_pickled_pipeline"), str(self.folder / "logs" / "executor.pik")]
        return self._run(command, SLURM_ARRAY_TASK_ID="0", SLURM_NODELIST="node1")

    def _run(self, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
        }
        paths = os.pathsep.join([str(self.folder / "site"), str(Path(__file__).parents[2])])
        path = os.pathsep.join([str(self.folder / "bin"), variables["PATH"]])
        variables |= {**environment, "PATH": path, "PYTHONPATH": paths}
        # A .pyc hides an edit of the same second and length.
        variables["PYTHONDONTWRITEBYTECODE"] = "1"
        return processes.run(command, cwd=self.folder, env=variables, timeout=600)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def edited(text):
    return "# a comment more\n\n" + text.replace("calls += 1", "calls += 2").replace(
        '"Rewrite:"', '"Shorten:"'
    )


def test_a_queued_task_goes_on_whatever_happened_to_its_script(cluster):
    budget = Budget()
    with FakeServer(status=budget) as server:
        cluster.submit(server)
        for text, answers in ((SCRIPT, 3), (edited(SCRIPT), 2), (None, 99)):
            cluster.script.unlink()
            if text is not None:
                cluster.script.write_text(text)
            budget.left = answers
            done = cluster.run_task()
            assert (done.returncode == 0) == (answers == 99), done.stderr[-3000:]
            assert ("ServerRefused" in done.stderr) == (answers != 99), done.stderr[-3000:]
            if answers == 2:  # what is imported by name is what the task imports
                (cluster.folder / "site" / "prompts.py").write_text(PROMPTS.replace("!", "?"))
                done = cluster.run_task()
                assert "CheckpointMismatch" in done.stderr, done.stderr[-3000:]
                assert "  uses.ending code: " in done.stderr
                (cluster.folder / "site" / "prompts.py").write_text(PROMPTS)
    assert ids(cluster.folder) == [f"id {number}" for number in range(DOCUMENTS)]
    assert all(line["prompt"] == "Rewrite:" for line in rows(cluster.folder))
    assert list(server.asked) == [f"Rewrite: text {number}plainly!" for number in range(DOCUMENTS)]
    identity = json.loads((cluster.folder / "checkpoints" / "00000" / "run.json").read_bytes())
    assert "accepted_changes" not in identity
    assert identity["rollout_fn code"].startswith("source ")
