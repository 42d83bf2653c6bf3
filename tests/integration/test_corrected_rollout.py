"""A rollout that is corrected after its own exception stopped the rank: a normal thing, with one
flag to go on.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import CheckpointMismatch, DocumentFailed
from datatrove_ckpt.testing import FakeServer
from tests.jobs import documents, rows, runner
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
BY_ID = [
    ("id 0", "old"),
    ("id 1", "old"),
    ("id 2", "old"),
    ("id 3", "old"),
    ("id 4", "new"),
    ("id 5", "new"),
]


def versions(folder):
    return [(row["id"], row["metadata"]["rollout_results"][0]["version"]) for row in rows(folder)]


def test_a_script_goes_on_with_the_argument_that_the_error_names(tmp_path):
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
        assert (
            "or pass accept_changes=True to InferenceRunner to mix the two: what is done stays"
            in str(refused.value)
        )
        runner(tmp_path, server, load(new).rollout, accept_changes=True, **one).run(documents(6))
        assert set(server.asked.values()) == {1}
    assert versions(tmp_path) == BY_ID


def test_a_yaml_file_goes_on_with_the_command_that_the_error_names(
    here,
    monkeypatch,
    capsys,
    server,
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(*arguments):
        sys.modules.pop("users_rollouts", None)
        importlib.invalidate_caches()
        return main(["run", "job.yaml", *arguments]), capsys.readouterr().err

    text = job_yaml(f"{ENDPOINT.replace('URL', server.url)}, max_concurrent_documents: 1")
    text = text.replace(
        '{class_path: PromptRollout, init_args: {prompt: "Say {text}"}}', "users_rollouts.rollout"
    )
    write_job(
        here, f"{text}          records_per_chunk: 2\n", [f"text {number}" for number in range(6)]
    )
    (here / "users_rollouts.py").write_text(BROKEN)
    flag, command = "--pipeline.1.accept_changes=true", "datatrove-ckpt run job.yaml"
    code, said = run()
    assert code == 1
    assert (
        f"the code of the rollout rollout for that, add {flag} to the command: what is done and paid"
        in said
    )
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
