"""``run --start-over`` renames what a run has made and deletes nothing; no crash mixes an old run with a new one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.layout import is_ours
from datatrove_ckpt.cli.short_form import make_executor
from datatrove_ckpt.executor import LocalPipelineExecutor
from datatrove_ckpt.preflight.run_plan import RunPlan
from datatrove_ckpt.preflight.start_over import start_over
from datatrove_ckpt.testing import FakeServer, crash_at, outputs
from datatrove_ckpt.testing.disks import copy_tree
from tests.commands import Command
from tests.jobs import STOPS_SOON, Budget, rows
from tests.yaml_jobs import ENDPOINT, job_yaml, write_input

NEW = "--pipeline.1.rollout_fn.prompt=New: {text}"
PATIENCE = f"server_patience_seconds: {STOPS_SOON['server_patience_seconds']}"


def short_job(server: FakeServer) -> None:
    """job.yaml in the short form, for the run folder runs/x."""
    settings = {"run_folder": "runs/x", "input": "input", "prompt": "Old: {text}", "model": "fake"}
    Path("job.yaml").write_text(json.dumps({**settings, "endpoint": server.url, "records_per_chunk": 2}))


def long_job(server: FakeServer) -> None:
    text = job_yaml(f"{ENDPOINT.replace('URL', server.url)}, {PATIENCE}")
    Path("job.yaml").write_text(f"{text}          records_per_chunk: 2\n")


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


def test_a_run_folder_that_holds_more_stays_with_the_rest(server: FakeServer, command: Command) -> None:
    short_job(server)
    command("run", "job.yaml")
    Path("runs/x/notes.txt").write_text("mine")
    command("run", "job.yaml", "--start-over")
    names = [f"{name}{end}" for name in ("checkpoints", "logs", "output") for end in ("", ".1")]
    here = [path for path in Path("runs/x").iterdir() if not is_ours(path.name)]
    assert sorted(path.name for path in here) == sorted([*names, "notes.txt"])


def test_the_folders_of_the_long_form_are_renamed_each(server: FakeServer, command: Command) -> None:
    long_job(server)
    command("run", "job.yaml", "--start-over")  # nothing is there yet
    Path("logs.1").mkdir()
    old, before = answers(Path()), outputs(Path())
    command("run", "job.yaml", "--start-over", NEW)
    moved = {path.replace(".2/", "/"): content for path, content in outputs(Path()).items() if ".2/" in path}
    for path, content in moved.items():
        if not path.endswith(("run.json", "job.json")):  # they name the output's new place
            assert content == before[path], path
    stay = {"job.yaml", "input/0.jsonl", *(path for path in before if is_ours(path))}
    assert moved.keys() == before.keys() - stay
    assert answers(Path()) != old
    command("verify", "checkpoints.2", "--full")


def test_with_another_output_folder_the_old_output_stays_where_it_is(server: FakeServer, command: Command) -> None:
    long_job(server)
    command("run", "job.yaml")
    before = outputs(Path("output"))
    elsewhere = "--pipeline.1.output_writer.output_folder=elsewhere"
    refused = command("run", "job.yaml", elsewhere, code=1).err
    assert "Set output_folder back to it; or copy all its files to the new folder" in refused
    said = command("run", "job.yaml", elsewhere, "--start-over")
    assert "damaged" not in said
    assert outputs(Path("output")) == before
    command("verify", "checkpoints.1", "--full")
    command("verify", "checkpoints", "--full")


def test_a_run_that_lacks_a_file_names_its_own_output_once_it_is_moved(server: FakeServer, command: Command) -> None:
    long_job(server)
    command("run", "job.yaml")
    next(Path("output").iterdir()).unlink()
    command("run", "job.yaml", "--start-over")
    command("repair", "checkpoints.1")
    command("verify", "checkpoints", "--full")


def test_a_damaged_run_is_moved_and_said_to_be(server: FakeServer, command: Command) -> None:
    long_job(server)
    command("run", "job.yaml")
    Path("checkpoints/job.json").write_text("{")
    said = command("run", "job.yaml", "--start-over").out
    place = Path("output.1").absolute()
    assert f"checkpoints.1 is damaged, so it still names the old output folder, which is now {place}." in said
    command("verify", "checkpoints", "--full")


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

    long_job(server)
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


def test_output_that_two_jobs_share_stays(here: Path, server: FakeServer, command: Command) -> None:
    second = ["--pipeline.1.checkpoints_local_dir=second", "--executor.logging_dir=logs2"]
    second += ["--pipeline.1.output_writer.output_filename=second_${rank}_${chunk_index}.jsonl"]
    long_job(server)
    command("run", "job.yaml")
    command("run", "job.yaml", *second)
    before = outputs(here)
    for options, other in (([], "second_00000_00000.jsonl"), (second, "00000_00000.jsonl")):
        said = command("run", "job.yaml", *options, "--start-over", code=2).error
        assert f"{here}/output holds {here}/output/{other}, which is not the run's. " in said
        assert said.endswith("(or checkpoints_local_dir, output_folder and logging_dir) of this job alone.")
    assert outputs(here) == before
    command("run", "job.yaml", *second, "--pipeline.1.output_writer.output_folder=own", "--start-over")
    command("run", "job.yaml")


def _nothing() -> None:
    pass


def _no_checkpoint() -> None:
    shutil.rmtree("checkpoints")


def _datatroves() -> None:
    Path("checkpoints/00000/run.json").unlink()


def _input_in_the_logs() -> None:
    shutil.move("input", "logs/input")


def _of_another_run() -> None:
    Path("other").mkdir()
    Path("other/mine.txt").write_text("mine")


@pytest.mark.parametrize(
    ("prepare", "options", "said"),
    [
        (_nothing, ["--pipeline.1.output_writer.output_folder=memory://out"], "memory:///out is not on this machine, "),
        (_nothing, ["--executor.logging_dir=memory://logs"], "memory:///logs is not on this machine, "),
        (_nothing, ["--pipeline.1.checkpoints_remote_dir=mirror"], "a new start would go on from the mirror mirror."),
        (_no_checkpoint, [], "/output is this run's. Move it away yourself."),
        (_datatroves, [], "/output is this run's. Move it away yourself."),
        (_input_in_the_logs, ["--pipeline.0.data_folder=logs/input"], "/logs/input, which is not the run's."),
        (_of_another_run, ["--pipeline.1.output_writer.output_folder=other"], "/output."),
        (_nothing, ["--retry-dead-letters"], "which needs the run that is there."),
    ],
    ids=[
        "remote output",
        "remote logs",
        "mirror",
        "no checkpoint",
        "a strange checkpoint",
        "input",
        "other output",
        "retry",
    ],
)
def test_what_is_not_known_to_be_the_runs_stays(
    server: FakeServer, command: Command, prepare: Callable[[], None], options: list[str], said: str
) -> None:
    long_job(server)
    command("run", "job.yaml")
    prepare()
    before = outputs(Path())
    error = command("run", "job.yaml", "--start-over", *options, code=2).error
    assert error.startswith("error: --start-over: ")
    assert said in error
    assert outputs(Path()) == before


def test_a_run_that_is_active_stays(server: FakeServer, command: Command) -> None:
    long_job(server)
    command("run", "job.yaml")
    lock = files.Lock(Path("checkpoints/00000/lock"))
    before = outputs(Path())
    said = command("run", "job.yaml", "--start-over", code=1).error
    lock.release()
    assert f" works on rank 0 in {Path('checkpoints').absolute()}. Stop that run, " in said
    assert outputs(Path()) == before


@pytest.mark.matrix
@pytest.mark.parametrize("answered", [5, 1, 100])
def test_no_crash_on_the_way_mixes_two_runs(
    here: Path, ram: Path, command: Command, monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    """The next start begins anew, goes on with the old run, or is refused; and the same command moves the rest."""
    job, kept = ram / "job", ram / "kept"
    shutil.copytree(here, job)
    monkeypatch.chdir(job)
    budget = Budget()
    with FakeServer(status=budget) as server:
        long_job(server)
        budget.left = answered
        command("run", "job.yaml", code=None)
        budget.left = 10**6
        copy_tree(job, kept)
        command("run", "job.yaml")
        old = answers(job)
        ends: dict[tuple[str, ...], list[str]] = {(): [], (NEW,): [], (NEW, "--start-over"): []}
        crashes = 0
        while crashes >= 0:
            for options, found in ends.items():
                copy_tree(kept, job)
                monkeypatch.chdir(job)
                with crash_at(crashes, job) as disk:
                    start_over(RunPlan(make_executor("job.yaml", [])), "job.yaml", as_one=False)
                monkeypatch.chdir(job)
                code = command("run", "job.yaml", *options, code=None).code
                mixed = {text in old for text in answers(job)}
                assert len(mixed) == 1 or (code == 1 and not mixed), (crashes, options)
                found.append("refused" if code else "old" if mixed == {True} else "new")
            crashes = crashes + 1 if disk.crashed_at is not None else -1
    assert {*ends[NEW, "--start-over"]} == {"new"}
    assert ends[NEW,][-1] == "new"
    assert {*ends[NEW,][:-2]} == {"refused"}, "as long as a checkpoint is there"
    possible = {1: {"old"}, 5: {"old", "refused"}, 100: {"refused"}}  # once its committed files are gone
    assert {*ends[()][2:-2]} <= possible[answered]
