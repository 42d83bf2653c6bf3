"""``run --start-over`` renames the run folder and deletes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.executor import LocalPipelineExecutor
from datatrove_ckpt.testing import FakeServer, outputs
from tests.commands import Command
from tests.jobs import rows
from tests.yaml_jobs import ENDPOINT, job_yaml, write_input


def short_job(server: FakeServer) -> None:
    """job.yaml in the short form, for the run folder runs/x."""
    settings = {"run_folder": "runs/x", "input": "input", "prompt": "Old: {text}", "model": "fake"}
    Path("job.yaml").write_text(json.dumps({**settings, "endpoint": server.url, "records_per_chunk": 2}))


def answers(folder: Path) -> list[str]:
    return [row["metadata"]["rollout_results"][0]["text"] for row in rows(folder)]


@pytest.fixture(autouse=True)
def _in_a_folder(here: Path) -> None:
    write_input(here, [f"text {number}" for number in range(6)])


def test_the_run_folder_is_renamed_and_both_runs_can_be_used(server: FakeServer, command: Command) -> None:
    short_job(server)
    command("run", "job.yaml")
    old, first = answers(Path("runs/x")), outputs(Path("runs/x/output"))
    prompt = "--prompt=New: {text}"
    refused = command("run", "job.yaml", prompt, code=1)
    assert "choose another run_folder" in refused.err
    again = f"datatrove-ckpt run job.yaml '{prompt}' --start-over"
    assert refused.err.endswith(f"\nTo start over, with what is there moved aside: {again}\n")
    said = command("run", "job.yaml", prompt, "--start-over", "--tasks=2").out
    assert f"Moved aside: {Path('runs/x').absolute()} -> {Path('runs/x.1').absolute()}\n" in said
    assert outputs(Path("runs/x.1/output")) == first
    assert len(answers(Path("runs/x"))) == 6
    assert not {*answers(Path("runs/x"))} & {*old}
    command("verify", "runs/x/checkpoints", "--full")
    assert f"of {Path('runs/x.1/output').absolute()} " in command("verify", "runs/x.1/checkpoints", "--full")
    command("run", "job.yaml", "--start-over")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["x", "x.1", "x.2"]
    assert answers(Path("runs/x")) == old, "with the one task of the file, and not with two"


def test_all_that_is_in_the_run_folder_moves_with_it(server: FakeServer, command: Command) -> None:
    short_job(server)
    command("run", "job.yaml", "--start-over")  # nothing is there yet
    Path("runs/x/notes.txt").write_text("mine")
    Path("runs/x.1").mkdir()
    before = outputs(Path("runs/x"))
    command("run", "job.yaml", "--start-over")
    assert outputs(Path("runs/x.2")) == before
    assert sorted(path.name for path in Path("runs").iterdir()) == ["x", "x.1", "x.2"]


def test_a_run_that_lacks_a_file_is_repaired_where_it_is_now(server: FakeServer, command: Command) -> None:
    short_job(server)
    command("run", "job.yaml")
    next(Path("runs/x/output").iterdir()).unlink()
    command("run", "job.yaml", "--start-over")
    command("repair", "runs/x.1")
    command("verify", "runs/x", "--full")


def test_output_that_was_moved_is_verified_where_it_is_now(server: FakeServer, command: Command) -> None:
    job = ["run", "--input", "input", "--prompt", "a {text}", "--endpoint", server.url, "--model", "m"]
    command(*job, "--run-folder", "x")
    shutil.copytree("x/output", "large/output")
    command(*job, "--run-folder", "x", "--pipeline.1.output_writer.output_folder=large/output")
    next(Path("large/output").iterdir()).unlink()
    assert "large/output" in command("verify", "x", code=1).out, "what is left beside the checkpoints is an old copy"


@pytest.mark.parametrize("how", [shutil.copytree, shutil.move])
def test_a_run_folder_that_was_copied_or_renamed_is_repaired_with_its_own_output(
    server: FakeServer, command: Command, how: Callable[[str, str], object]
) -> None:
    job = ["run", "--input", "input", "--endpoint", server.url, "--model", "m", "--records-per-chunk", "2"]
    command(*job, "--prompt", "a {text}", "--run-folder", "x")
    how("x", "old")
    command(*job, "--prompt", "newer {text}", "--run-folder", "x", code=None)
    old, kept = answers(Path("old")), outputs(Path("x"))
    next(Path("old/output").iterdir()).unlink()
    assert f"of {Path('old/output').absolute()} " in command("verify", "old", code=1).out
    command("repair", "old")
    command(*job, "--prompt", "a {text}", "--run-folder", "old")
    assert sorted(answers(Path("old"))) == sorted(old)
    assert outputs(Path("x")) == kept


@pytest.mark.parametrize("how", [shutil.copytree, shutil.move])
def test_output_of_the_run_that_took_the_place_of_a_renamed_one_is_not_read_and_not_removed(
    server: FakeServer, command: Command, how: Callable[[str, str], object]
) -> None:
    job = ["run", "--input", "input", "--endpoint", server.url, "--model", "m"]
    command(*job, "--prompt", "a {text}", "--run-folder", "x")
    how("x", "old")
    shutil.move("old/output", "results")
    command(*job, "--prompt", "newer {text}", "--run-folder", "x", code=None)
    kept, here = outputs(Path("x")), Path.cwd()
    said = f"the output of old is gone: {here}/x/output belongs to {here}/x. Bring it back, or name it with --output."
    for word in ("repair", "verify", "show"):
        assert command(word, "old", code=2).error == f"error: {said}"
    assert "x/output belongs to " in command("repair", "old", "--output", "x/output", code=2).error
    assert outputs(Path("x")) == kept
    command("verify", "old", "--output", "results")
    next(Path("results").iterdir()).unlink()
    command("repair", "old", "--output", "results")
    assert outputs(Path("x")) == kept


def test_the_command_to_resume_does_not_start_over_again(
    server: FakeServer, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(executor: LocalPipelineExecutor) -> None:
        raise KeyboardInterrupt

    short_job(server)
    command("run", "job.yaml")
    monkeypatch.setattr(LocalPipelineExecutor, "run_ranks", interrupted)
    said = command("run", "job.yaml", "--start-over", code=130).err
    assert said.endswith("To resume: datatrove-ckpt run job.yaml\n")


def test_a_run_folder_that_is_a_link_stays(server: FakeServer, command: Command) -> None:
    short_job(server)
    command("run", "job.yaml")
    Path("runs/cur").symlink_to("x")
    before, here = outputs(Path()), Path.cwd()
    said = command("run", "job.yaml", "--run-folder=runs/cur", "--start-over", code=2).error
    assert f" {here}/runs/cur is a link to {here}/runs/x: give {here}/runs/x." in said
    assert outputs(Path()) == before


def _nothing() -> None:
    pass


def _input_in_the_run_folder() -> None:
    shutil.move("input", "runs/x/input")


OUTPUT = "--pipeline.1.output_writer.output_folder"


@pytest.mark.parametrize(
    ("prepare", "options", "said"),
    [
        (_nothing, [f"{OUTPUT}=memory://out"], "memory:///out is not on this machine, "),
        (_nothing, ["--executor.logging_dir=memory://logs"], "memory:///logs is not on this machine, "),
        (_nothing, [f"{OUTPUT}=other"], "moves a run_folder. Move these away yourself: "),
        (_input_in_the_run_folder, ["--input=runs/x/input"], "/runs/x/input, which is not the run's."),
        (_nothing, ["--retry-dead-letters"], "which needs the run that is there."),
    ],
    ids=["remote output", "remote logs", "output elsewhere", "input", "retry"],
)
def test_what_cannot_be_renamed_stays(
    server: FakeServer, command: Command, prepare: Callable[[], None], options: list[str], said: str
) -> None:
    short_job(server)
    command("run", "job.yaml")
    prepare()
    before = outputs(Path())
    error = command("run", "job.yaml", "--start-over", *options, code=2).error
    assert error.startswith("error: --start-over: ")
    assert said in error
    assert outputs(Path()) == before


def test_the_folders_of_the_long_form_stay(here: Path, server: FakeServer, command: Command) -> None:
    Path("job.yaml").write_text(job_yaml(ENDPOINT.replace("URL", server.url)))
    command("run", "job.yaml")
    before = outputs(here)
    error = command("run", "job.yaml", "--start-over", code=2).error
    assert f"Move these away yourself: {here}/logs, {here}/output, {here}/checkpoints." in error
    changed = command("run", "job.yaml", "--pipeline.1.rollout_fn.prompt=New: {text}", code=1).err
    assert "--start-over" not in changed
    assert outputs(here) == before


def test_a_run_that_is_active_stays(server: FakeServer, command: Command) -> None:
    short_job(server)
    command("run", "job.yaml")
    lock = files.Lock(Path("runs/x/checkpoints/00000/lock"))
    before = outputs(Path())
    said = command("run", "job.yaml", "--start-over", code=1).error
    lock.release()
    assert f" works on rank 0 in {Path('runs/x/checkpoints').absolute()}. Stop that run, " in said
    assert outputs(Path()) == before
