"""A rollout that is corrected after its own exception stopped the rank: a normal thing, with one
flag to go on.
"""

import importlib
import sys

from datatrove_ckpt.cli.main import main
from tests.jobs import results
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

BROKEN = """
async def rollout(document, generate):
    answer = await generate({"messages": [{"role": "user", "content": document.text}]})
    if document.id == "id 4":
        raise ValueError("no title")
    return {"answer": answer.text, "version": "old"}
"""
CORRECTED = BROKEN.replace('raise ValueError("no title")', "pass").replace('"old"', '"new"')


def test_a_yaml_file_goes_on_with_the_command_that_the_error_names(
    here,
    monkeypatch,
    capsys,
    server,
):
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
        "the code of the rollout rollout for that, set accept_changes: what is done and paid"
        in said
    )
    assert f"The whole command: {command} {flag}" in said
    (here / "users_rollouts.py").write_text(CORRECTED)
    code, said = run()
    assert code == 1
    assert "users_rollouts.py, line 2: rollout_fn)" in said
    assert f"The whole command: {command} {flag}" in said
    assert run(flag)[0] == 0
    assert set(server.asked.values()) == {1}
    versions = [found["version"] for (found,) in results(here)]
    assert versions == ["old"] * 4 + ["new"] * 2
    sys.modules.pop("users_rollouts", None)
