"""A rollout that is corrected after its own exception stopped the rank: a normal thing, with one flag to go on."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import CheckpointMismatch, DocumentFailed
from datatrove_ckpt.testing import FakeServer
from tests import processes
from tests.jobs import documents, ids, rows, runner
from tests.unit.test_identity import load
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

BROKEN = """
async def rollout(document, generate):
    answer = await generate({"messages": [{"role": "user", "content": document.text}]})
    if document.id == "id 4":
        raise ValueError("no title")
    return {"answer": answer.text, "version": "old"}
"""
CORRECTED = BROKEN.replace('raise ValueError("no title")', "pass").replace('"old"', '"new"')
BY_ID = [("id 0", "old"), ("id 1", "old"), ("id 2", "old"), ("id 3", "old"), ("id 4", "new"), ("id 5", "new")]


def versions(folder: Path) -> list[tuple[str, str]]:
    return [(row["id"], row["metadata"]["rollout_results"][0]["version"]) for row in rows(folder)]


def test_a_script_goes_on_with_the_argument_that_the_error_names(tmp_path: Path) -> None:
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text(BROKEN)
    new.write_text(CORRECTED)
    one: dict[str, Any] = {"config": {"max_concurrent_documents": 1}}
    with FakeServer() as server:
        with pytest.raises(DocumentFailed) as failed:
            runner(tmp_path, server, load(old).rollout, **one).run(documents(6))
        assert str(failed.value).endswith(
            f"ValueError: no title, in {old}, line 5 (rollout). The answers of other documents are saved. Fix the "
            "cause and run the same command again. If you change the code of the rollout rollout for that, pass "
            "accept_changes=True to InferenceRunner: what is done and paid is kept, and the new code works on the "
            "documents that are not done."
        )
        with pytest.raises(CheckpointMismatch) as refused:
            runner(tmp_path, server, load(new).rollout, **one).run(documents(6))
        assert "(code of the function rollouts_of_a_user.rollout)" in str(refused.value)
        assert "or pass accept_changes=True to InferenceRunner to mix the two: what is done stays" in str(refused.value)
        runner(tmp_path, server, load(new).rollout, accept_changes=True, **one).run(documents(6))
        assert set(server.asked.values()) == {1}
    assert versions(tmp_path) == BY_ID


def test_a_yaml_file_goes_on_with_the_command_that_the_error_names(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: FakeServer
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(*arguments: str) -> tuple[int, str]:
        sys.modules.pop("users_rollouts", None)
        importlib.invalidate_caches()
        return main(["run", "job.yaml", *arguments]), capsys.readouterr().err

    text = job_yaml(f"{ENDPOINT.replace('URL', server.url)}, max_concurrent_documents: 1")
    text = text.replace('{class_path: PromptRollout, init_args: {prompt: "Say {text}"}}', "users_rollouts.rollout")
    write_job(here, f"{text}          records_per_chunk: 2\n", [f"text {number}" for number in range(6)])
    (here / "users_rollouts.py").write_text(BROKEN)
    flag, command = "--pipeline.1.accept_changes=true", "datatrove-ckpt run job.yaml"
    code, said = run()
    assert code == 1
    assert f"the code of the rollout rollout for that, add {flag} to the command: what is done and paid" in said
    assert f"The whole command: {command} {flag}" in said
    (here / "users_rollouts.py").write_text(CORRECTED)
    code, said = run()
    assert code == 1
    assert "(code of the function users_rollouts.rollout)" in said
    assert f"The whole command: {command} {flag}" in said
    assert run(flag)[0] == 0
    assert set(server.asked.values()) == {1}
    assert versions(here) == BY_ID
    sys.modules.pop("users_rollouts", None)


SCRIPT = """
import asyncio
import copy
import glob
import os
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner
from prompts import PROMPTS

class Asker:
    def __init__(self, system):
        self.request = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": ""}]}

    async def __call__(self, document, generate):
        if document.id == os.environ.get("STOP_AT"):
            while not glob.glob("output/*.jsonl"):  # without work, another run may begin there
                await asyncio.sleep(0.01)
            os._exit(9)
        self.request["messages"][1]["content"] = self.helper(document)
        return (await generate(copy.deepcopy(self.request))).text

    def helper(self, document):
        return PROMPTS["say"] + document.text

def row(writer, document):
    return {"id": document.id, "text": document.text}

if __name__ == "__main__":
    writer = JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None, adapter=row)
    config = InferenceConfig("dummy", "model", max_concurrent_documents=1)
    asker = Asker("Be brief.")
    runner = InferenceRunner(asker, config, writer, checkpoints_local_dir="checkpoints", records_per_chunk=2)
    runner.run([Document(text=f"text {number}", id=str(number)) for number in range(6)])
"""


@pytest.mark.slow
def test_a_script_that_was_edited_after_a_kill_is_refused_and_the_edited_definition_named(tmp_path: Path) -> None:
    def run(stop_at: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "STOP_AT": stop_at}
        return processes.run([sys.executable, "-B", "script.py"], cwd=tmp_path, env=environment, timeout=600)

    original = {"script.py": SCRIPT, "prompts.py": 'PROMPTS = {"say": "Say "}\n'}
    edits = {
        "Asker": ("script.py", "+ document.text", "+ document.id"),
        "PROMPTS": ("prompts.py", "Say ", "Sing "),
        "request": ("script.py", "Be brief.", "Be long."),
        "row": ("script.py", '{"id": document.id, ', "{"),
    }
    for name, text in original.items():
        (tmp_path / name).write_text(text)
    assert run(stop_at="3").returncode == 9
    for definition, (file, old, new) in edits.items():
        assert old in original[file]
        (tmp_path / file).write_text(original[file].replace(old, new))
        refused = run()
        assert refused.returncode == 1
        error = refused.stderr[refused.stderr.index("CheckpointMismatch") :]
        assert re.search(rf"\b{definition}\b", error), error
        (tmp_path / file).write_text(original[file])
    finished = run()
    assert finished.returncode == 0, finished.stderr
    assert sorted(ids(tmp_path)) == list("012345")
