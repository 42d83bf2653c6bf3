"""What ``fork`` says the new run will cost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import DocumentFailed
from datatrove_ckpt.testing import FakeServer
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

from .test_fork import NEW, server, yaml
from .test_fork_sources import KEEP, run_rank

__all__ = ["server", "yaml"]  # fixtures


def said_by_fork(capsys: pytest.CaptureFixture[str], *changes: str, what: str = "job.yaml") -> str:
    capsys.readouterr()
    assert main(["fork", what, "job.yaml", *NEW[1:], *changes, "--dry-run"]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("yaml")
def test_more_rollouts_cost_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        "cost: for 3 documents, if each rollout takes what it took before, 2 per document instead of 1: 6 requests, "
        "12 prompt and 12 completion tokens, less"
    ) in said_by_fork(capsys, "--pipeline.1.config.rollouts_per_document=2")


def test_what_makes_answers_useless_is_said_beside_their_number(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("checkpoints", "output", "logs"):
        shutil.rmtree(folder)
    assert main(["run", "job.yaml", KEEP]) == 0
    kept = "so at most 3 requests, 6 prompt and 6 completion tokens are not paid again"
    assert f"{kept}\n" in said_by_fork(capsys)
    for changes, names in (
        ([NEW[0]], "rollout_fn.prompt"),
        ([NEW[0], "--pipeline.1.config.seed=3"], "rollout_fn.prompt, seed"),
        (
            ['--pipeline.1.config.default_generation_params={"temperature": 0.5}'],
            "default_generation_params",
        ),
    ):
        but = f"{kept}. It may be none, because what payloads are made of changed: "
        found = said_by_fork(capsys, *changes).partition(but)[2].partition("\n")[0]
        assert set(found.split(", ")) == set(names.split(", "))


def test_the_number_of_documents_is_no_larger_than_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeServer(status=lambda payload, times: 400 if "f" in payload["messages"][-1]["content"] else None) as server:
        text = job_yaml(f"{ENDPOINT.replace('URL', server.url)}, max_concurrent_generations: 1", tasks=2)
        write_job(tmp_path, text, "abc", "def")
        run_rank(tmp_path / "job.yaml", 0)
        assert "cost: for about 6 documents" in said_by_fork(capsys)  # the other task as much
        with pytest.raises(DocumentFailed):
            run_rank(tmp_path / "job.yaml", 1)
    Path("checkpoints/00001/history.jsonl").unlink()  # as after a kill in its first seconds
    assert "cost: for about 6 documents" in said_by_fork(capsys)


@pytest.mark.usefixtures("yaml")
def test_of_a_fork_that_has_not_started_the_documents_are_known_and_no_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fork", "job.yaml", "third"]) == 0
    assert "cost: not known for 3 documents, because none is finished in third\n" in said_by_fork(capsys, what="third")
