"""What ``fork`` does with a run that is no plain one: changed in the middle, a fork itself, half resharded."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.checkpoint.kept_answers import read_answers
from datatrove_ckpt.checkpoint.layout import RESHARD_PLAN, SHARES
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.checkpoint.resharding import ReshardPlan
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.cli.overrides import make_executor
from datatrove_ckpt.errors import DocumentFailed
from datatrove_ckpt.maintenance.fork_source import Source
from datatrove_ckpt.maintenance.inspect import find_ranks
from datatrove_ckpt.maintenance.verify import verify
from datatrove_ckpt.testing import FakeServer

from .test_fork import DOCUMENTS, NEW, TwoSteps, fork, old, server, start, yaml

__all__ = ["old", "server", "yaml"]  # fixtures
A, B = ({"model_kwargs": {"revision": name}} for name in "AB")
REVISION = '--pipeline.1.config.model_kwargs={"revision": "%s"}'
KEEP = "--pipeline.1.keep_answers=true"


def stop(folder: Path, server: FakeServer, config: dict[str, Any], at: str = "id 5", **settings: Any) -> None:
    """Runs until a document fails: two chunks are committed, one document is in a journal."""
    commits = folder / "checkpoints" / "00000" / "commits.jsonl"
    with pytest.raises(DocumentFailed):
        start(folder, server, TwoSteps("Shorter", at, commits), config=config, **settings)
    server.asked.clear()


def cached(new: Path, rank: int = 0) -> int:
    """The number of answers that a fork holds."""
    copy = shutil.copytree(new / "checkpoints" / f"{rank:05d}", new.with_name("copy"))
    cache = RequestCache(copy / "replay.sqlite3")
    try:
        return sum(len(cache.answers(ordinal)) for ordinal in cache.ordinals())
    finally:
        cache.close()
        shutil.rmtree(copy)


@pytest.mark.parametrize("finished", [True, False])
def test_answers_of_two_model_revisions_in_one_task_are_not_used(
    finished: bool, tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    stop(old, server, A, keep_answers=True)
    if finished:
        start(old, server, TwoSteps("Shorter"), config=B, keep_answers=True, accept_changes=True)
    else:
        stop(old, server, B, keep_answers=True, accept_changes=True)
    assert list(read_answers(old / "checkpoints" / "00000" / "answers.jsonl"))
    server.asked.clear()
    assert fork(old, new) == 0
    said = capsys.readouterr().out
    assert "answers: none can be used: model_kwargs changed in the middle of this run\n" in said
    assert cached(new) == 0
    start(new, server, TwoSteps("Shorter"), config=A)  # nothing binds it to either revision
    assert sum(server.asked.values()) == 2 * DOCUMENTS
    server.asked.clear()
    assert fork(new, tmp_path / "third") == 0
    assert "model_kwargs changed" not in capsys.readouterr().out


def test_another_prompt_in_the_middle_leaves_the_answers_usable(
    tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(tmp_path / "old", server, A, keep_answers=True)
    start(tmp_path / "old", server, TwoSteps("Longer"), config=A, keep_answers=True, accept_changes=True)
    assert fork(tmp_path / "old", tmp_path / "new") == 0
    assert f"of {DOCUMENTS} documents kept" in capsys.readouterr().out
    run = json.loads((tmp_path / "new" / "checkpoints" / "00000" / "run.json").read_bytes())
    assert run["model_kwargs"] == A["model_kwargs"]


def test_of_each_task_those_answers_are_used_that_are_of_the_new_runs_settings(
    yaml: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree("checkpoints")
    shutil.rmtree("output")
    shutil.rmtree("logs")
    two = ["--executor.tasks=2", KEEP]
    run_rank(yaml, 0, REVISION % "A", *two)
    run_rank(yaml, 1, REVISION % "B", *two, "--pipeline.1.accept_changes=true")
    server.asked.clear()
    for name, asked in (("A", {"Say c"}), ("B", {"Say a", "Say b"})):
        shutil.rmtree("new", ignore_errors=True)
        changed = [*NEW[1:], *two, REVISION % name]
        capsys.readouterr()
        assert main(["fork", "job.yaml", "job.yaml", *changed]) == 0
        said = capsys.readouterr().out
        assert "answers of 1 of 2 tasks cannot be used: model_kwargs changed\n" in said
        server.asked.clear()
        assert main(["run", "job.yaml", *changed]) == 0
        assert set(server.asked) == asked
    # A script has no file to compare with: what is kept is what the job's last settings allow, and no task is refused.
    assert main(["fork", "job.yaml", "third", *two]) == 0
    runs = [json.loads(Path(f"third/{rank:05d}/run.json").read_bytes()) for rank in (0, 1)]
    assert [run.get("model_kwargs") for run in runs] == [None, {"revision": "B"}]


def run_rank(yaml: Path, rank: int, *overrides: str) -> None:
    """Runs one task of a file's job."""
    executor = make_executor(argparse.Namespace(config=str(yaml), overrides=list(overrides)))
    documents: Any = None
    for step in executor.pipeline:
        documents = step(documents, rank, executor.world_size)


def test_a_fork_that_has_not_started_is_forked(
    yaml: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    third = [text.replace("new/", "third/") for text in NEW]
    assert main(["fork", "job.yaml", "job.yaml", *NEW]) == 0
    capsys.readouterr()
    assert main(["fork", "new/checkpoints", "job.yaml", *third]) == 0
    assert "changed: not known, because new/checkpoints is a fork that has not started\n" in capsys.readouterr().out
    assert main(["run", "job.yaml", *third]) == 0
    assert server.asked == {"Whisper a": 1, "Whisper b": 1, "Whisper c": 1}
    assert verify(Path("third/checkpoints"), full=True).problems == []


def test_a_half_resharded_run_is_not_forked(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = old / "checkpoints" / RESHARD_PLAN
    plan.parent.mkdir()
    plan.write_bytes(ReshardPlan(1, 2, 1).to_json())
    assert fork(old, tmp_path / "new") == 1
    assert "reshard` was interrupted" in capsys.readouterr().err
    assert not (tmp_path / "new" / "checkpoints").exists()


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_a_fork_that_has_not_started_has_no_output_yet(
    command: str, yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fork", "job.yaml", "job.yaml", *NEW]) == 0
    capsys.readouterr()
    assert main([command, "new/checkpoints"]) == 2
    assert "error: new/checkpoints is a fork that has not started, so it has no output yet." in capsys.readouterr().err
    assert main([command, "job.yaml", *NEW]) == (3 if command == "verify" else 0)
    said = capsys.readouterr().out
    assert f"of {yaml.parent}/new/output" in said if command == "verify" else "There is nothing to repair." in said


def test_the_old_runs_output_folder_is_refused_by_any_name(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("link").symlink_to("output")
    for name in ("link", "new/../output", f"{yaml.parent}/output"):
        capsys.readouterr()
        same = f"--pipeline.1.output_writer.output_folder={name}"
        assert main(["fork", "checkpoints", "job.yaml", *NEW, same]) == 2
        assert "is that of checkpoints. Choose another one" in capsys.readouterr().err
        assert not Path("new/checkpoints").exists()


def test_a_fork_that_is_typed_again_refuses_what_the_first_one_refused(
    yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fork", "job.yaml", "job.yaml", *NEW]) == 0
    for change in ("--pipeline.1.output_writer.output_folder=output", "--executor.logging_dir=logs"):
        capsys.readouterr()
        assert main(["fork", "job.yaml", "job.yaml", *NEW, change]) == 2
        assert "Choose another one" in capsys.readouterr().err
    assert main(["fork", "job.yaml", "job.yaml", *NEW]) == 0
    assert "is this fork already" in capsys.readouterr().out


def test_the_old_runs_logging_dir_is_refused(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("link").symlink_to("logs")
    for name in ("logs", "link"):
        for what in ("job.yaml", "checkpoints"):  # a folder does not tell its logging_dir; the markers in it do
            capsys.readouterr()
            assert main(["fork", what, "job.yaml", *NEW, f"--executor.logging_dir={name}"]) == 2
            assert f"logging_dir: {yaml.parent}/{name} is another run's: datatrove skips" in capsys.readouterr().err
    shutil.rmtree("logs/completions")
    assert main(["fork", "job.yaml", "job.yaml", *NEW, "--executor.logging_dir=logs"]) == 2
    assert main(["fork", "job.yaml", "job.yaml", *NEW]) == 0


def test_after_a_reshard_a_change_of_one_task_counts_for_all_of_them(tmp_path: Path) -> None:
    settings = {"format": 2, "tasks": 2, "model_kwargs": {}, "canned_answers": False, "use_chat": True}
    changes = ([{"field": "use_chat", "old": False, "new": True}, {"field": "records_per_chunk"}], [])
    for rank, accepted in enumerate(changes):
        path = tmp_path / f"{rank:05d}" / "run.json"
        path.parent.mkdir()
        path.write_text(json.dumps({**settings, "owner": {"fence": 1}, "accepted_changes": accepted}))
    said = "use_chat changed in the middle of this run"
    for expected in ([said, ""], [said, said]):
        ranks = find_ranks(tmp_path)
        why = Source.read(tmp_path, ranks).why_unusable(None)
        assert [why(rank) for rank in ranks] == expected
        (tmp_path / SHARES).write_text("{}")
