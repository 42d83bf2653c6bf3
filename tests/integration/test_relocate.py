"""``relocate``: a copy of checkpoint and output goes on where it is, once all of it proved to be there."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.layout import LOCK, RESHARD_PLAN
from datatrove_ckpt.checkpoint.resharding import ReshardPlan
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.maintenance.read_state import read_run_state
from datatrove_ckpt.maintenance.relocate import carry_out, plan_relocation
from datatrove_ckpt.maintenance.verify import verify
from datatrove_ckpt.maintenance.where import Place
from datatrove_ckpt.mirror.restore import restore_rank
from datatrove_ckpt.testing import FakeServer, outputs
from datatrove_ckpt.testing.disks import CrashingDisk, disk_in_place
from tests.commands import Command, Printed
from tests.hub import FakeHub
from tests.kept import edit
from tests.make_release import TEXTS, run
from tests.yaml_jobs import ENDPOINT, job_yaml

from .test_releases import NAMES, NEWEST, kept, restored

Relocate = Callable[..., Printed]
RANKS = ("00000", "00001", "retry-00001/00000")


def copied(folder: Path, name: str = NEWEST) -> Path:
    """A job of a release at one place, and a copy of it at another one, which is returned."""
    restored(name, folder / "old")
    shutil.copytree(folder / "old", folder / "new")
    return folder / "new"


@pytest.fixture
def relocate(command: Command) -> Relocate:
    """Runs it on a job, to the output folder beside its checkpoints."""
    return lambda folder, *more, code=0: command(
        "relocate", folder / "checkpoints", "--output", folder / "output", *more, code=code
    )


def named(folder: Path) -> set[str]:
    """The output folders that the checkpoint names."""
    paths = [folder / "checkpoints" / rank / "run.json" for rank in RANKS]
    paths += [path for path in [folder / "checkpoints" / "job.json"] if path.exists()]
    return {json.loads(path.read_bytes())["output_folder"] for path in paths}


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_job_of_each_release_goes_on_in_its_new_place(name: str, tmp_path: Path, relocate: Relocate) -> None:
    new = copied(tmp_path, name)
    before = outputs(tmp_path / "old")
    with FakeServer() as server:
        with pytest.raises(CheckpointMismatch, match=r"output_folder: .*/old/output.* -> .*/new/output") as refused:
            run(new, server.url, 1)
        assert "datatrove-ckpt relocate" in str(refused.value)
        said = relocate(new).out
        assert "5 files" in said
        assert "names, sizes and contents are those of the commits of 3 ranks" in said
        assert f"output_folder: {tmp_path}/old/output -> {new}/output" in said
        assert named(new) == {f"{new}/output"}
        for rank in range(3):
            run(new, server.url, rank)
        assert server.asked == {"Rewrite: stop": 1, "Rewrite: b4": 2, **{f"Rewrite: {text}": 2 for text in TEXTS[2]}}
    assert outputs(tmp_path / "old") == before
    report = verify(new / "checkpoints", full=True)
    assert (report.output, report.problems, report.unfinished) == (f"{new}/output", [], [])
    assert "names this folder already. There is nothing to do." in relocate(new).out


def starts(folder: Path) -> int:
    checkpoints = folder / "checkpoints"
    return read_run_state(Place(str(checkpoints), checkpoints, [])).together.attempts


def test_a_dry_run_changes_nothing_and_what_was_relocated_can_be_relocated_back(
    tmp_path: Path, relocate: Relocate
) -> None:
    new = copied(tmp_path)
    before, content = starts(new), outputs(new)
    assert relocate(new, "--dry-run").out.endswith("Nothing was done (--dry-run).\n")
    assert outputs(new) == content
    relocate(new)
    assert starts(new) == before, "a move is no attempt"
    shutil.rmtree(tmp_path / "old")
    shutil.copytree(new, tmp_path / "old")
    relocate(tmp_path / "old")
    report = verify(tmp_path / "old" / "checkpoints", full=True)
    assert (report.output, report.problems) == (f"{tmp_path}/old/output", [])


def alter(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"answer", b"ANSWER"))


@pytest.mark.parametrize("damage", [Path.unlink, alter])
def test_a_copy_that_is_not_complete_is_refused_and_nothing_is_changed(
    damage: object, tmp_path: Path, relocate: Relocate
) -> None:
    new = copied(tmp_path)
    damage(new / "output" / "00000_chunk_00001.jsonl")  # type: ignore[operator]
    before = outputs(new)
    said = relocate(new, code=1).out
    assert "rank 0, chunk 1: 00000_chunk_00001.jsonl is" in said
    assert "the copy is not complete, so nothing was changed" in said
    assert "Copy these files again, and relocate again. What is lost at the old place, too, can be made again:" in said
    assert f"datatrove-ckpt repair {new}/checkpoints --output {new}/output" in said
    assert outputs(new) == before
    (tmp_path / "old" / "output").rename(tmp_path / "gone")
    assert main(["repair", f"{new}/checkpoints", "--output", f"{new}/output", "--dry-run"]) == 0
    # Sizes alone do not show that a content is another one.
    relocate(new, "--sizes-only", code=0 if damage is alter else 1)


def test_ranks_that_run_are_refused(tmp_path: Path, relocate: Relocate) -> None:
    new = copied(tmp_path)
    lock = files.Lock(new / "checkpoints" / "00001" / LOCK)
    try:
        assert "process works on this rank" in relocate(new, code=1).err
    finally:
        lock.release()
    assert named(new) == {f"{tmp_path}/old/output"}
    assert not (new / "checkpoints" / "00000" / LOCK).exists()  # a finished rank stays finished
    relocate(new)
    assert not (new / "checkpoints" / "00000" / LOCK).exists()
    assert (new / "checkpoints" / "00001" / LOCK).exists()


def test_a_run_that_started_meanwhile_is_noticed(tmp_path: Path) -> None:
    new = copied(tmp_path)
    plan = plan_relocation(verify(new / "checkpoints", str(new / "output"), full=True))
    path = new / "checkpoints" / "00001" / "run.json"
    path.write_bytes(path.read_bytes().replace(b'"fence": 1', b'"fence": 2'))
    before = kept(new)
    with pytest.raises(CheckpointMismatch, match="was changed by a run while its output was read"):
        carry_out(plan)
    assert kept(new) == before


@pytest.mark.matrix
@pytest.mark.parametrize("step", [4, 1])
def test_killed_at_every_effect_the_same_command_continues(tmp_path: Path, relocate: Relocate, step: int) -> None:
    copied(tmp_path)
    for number in itertools.count(step=step):
        folder = tmp_path / "new"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder)
        disk = CrashingDisk(number, folder)
        with disk_in_place(disk):
            relocate(folder, code=None)
        if disk.crashed_at is None:
            break
        assert list(disk.survivors()) == ["killed"]
        # What is half done is no run of the one place or the other; job.json alone is made again by a run.
        content = json.loads((folder / "checkpoints" / "00001" / "run.json").read_bytes())
        if content["output_folder"] != f"{folder}/output":
            with FakeServer() as server, pytest.raises(CheckpointMismatch):
                run(folder, server.url, 1)
        relocate(folder)
        assert named(folder) == {f"{folder}/output"}
        report = verify(folder / "checkpoints", full=True)
        assert (report.output, report.problems) == (f"{folder}/output", []), disk.crashed_at
        assert {one.rank for one in report.unfinished} == {1, None}, disk.crashed_at
    assert number >= 8


def test_a_mirror_is_relocated_and_the_next_node_goes_on_from_it(tmp_path: Path, command: Command) -> None:
    new = copied(tmp_path)
    shutil.rmtree(new / "checkpoints")
    mirror = str(new / "mirror")
    said = command("relocate", mirror, "--output", new / "output").out
    assert f"checkpoints_remote_dir: {mirror}" in said
    assert "/tmp/datatrove-ckpt-" not in said
    restore_rank(mirror, new / "checkpoints", 1, retries=False)
    content = json.loads((new / "checkpoints" / "00001" / "run.json").read_bytes())
    assert content["output_folder"] == f"{new}/output"
    with FakeServer() as server:
        run(new, server.url, 1, checkpoints_remote_dir=mirror)
        assert server.asked == {"Rewrite: stop": 1, "Rewrite: b4": 2}
    assert "There is nothing to do." in command("relocate", mirror, "--output", new / "output").out


def test_the_new_yaml_file_tells_where_the_output_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = copied(tmp_path)
    monkeypatch.chdir(new)
    Path("job.yaml").write_text(job_yaml(ENDPOINT, tasks=3))
    assert main(["relocate", "job.yaml"]) == 0
    assert named(new) == {f"{new}/output"}


def test_without_an_output_folder_it_is_a_mistake(tmp_path: Path, command: Command) -> None:
    new = copied(tmp_path)
    assert "--output: name the folder" in command("relocate", new / "checkpoints", code=2).err


def test_output_that_went_to_the_hub_is_compared_by_hash_from_then_on(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    folder = restored(NEWEST, tmp_path / "job")
    there = {f"part/{path.name}": path.read_bytes() for path in (folder / "output").glob("*.jsonl")}
    hub.put("org/data", there)
    url = "hf://datasets/org/data/part"
    monkeypatch.setattr("datatrove_ckpt.output.hub_commits.LAG_LOOKS", (0.0, 0.01))
    command("relocate", folder / "checkpoints", "--output", url)
    assert named(folder) == {url}
    commits = read_commits(folder / "checkpoints" / "00000" / "commits.jsonl")
    assert all(file.hub_hash for commit in commits.values() for file in commit.files)
    name = next(iter(there))
    hub.put("org/data", {name: there[name].replace(b"answer", b"ANSWER")})
    assert "is altered: the hub lists another hash for it" in command("verify", folder / "checkpoints", code=1).out


# parts that were not copied ------------------------------------------------------------------------------------------


def test_a_task_that_was_not_copied_is_missed(tmp_path: Path, relocate: Relocate) -> None:
    new = copied(tmp_path)
    shutil.rmtree(new / "checkpoints" / "00001")
    for path in (new / "output").glob("00001*"):
        path.unlink()
    said = relocate(new, code=1).out
    assert f"rank 1: {new}/checkpoints/00001 is missing: its checkpoint was removed." in said
    assert "so nothing was changed. Finish what is half done at the old place, copy these files and folders" in said
    for name in ("checkpoints", "output"):
        shutil.copytree(tmp_path / "old" / name, new / name, dirs_exist_ok=True)
    relocate(new)
    assert named(new) == {f"{new}/output"}


def test_tasks_without_a_trace_are_named(tmp_path: Path, relocate: Relocate) -> None:
    new = copied(tmp_path)
    shutil.rmtree(new / "checkpoints" / "00001")
    (new / "checkpoints" / "last_chunk" / "00001.txt").unlink()
    for path in (new / "output").glob("00001*"):
        path.unlink()
    (new / "output" / "00000_chunk_00009.jsonl").write_text("")
    said = relocate(new).out
    assert "tasks 1, 2: nothing here shows a start. If there was one, copy what it saved, too" in said
    assert "00000_chunk_00009.jsonl is named by no commit." in said
    # The folder that was forgotten can still be added.
    for name in ("checkpoints/00001", "output"):
        shutil.copytree(tmp_path / "old" / name, new / name, dirs_exist_ok=True)
    relocate(new)
    assert named(new) == {f"{new}/output"}


def test_a_copy_from_the_middle_of_a_reshard_or_without_its_shares_is_refused(
    tmp_path: Path, relocate: Relocate
) -> None:
    new = copied(tmp_path)
    plan = new / "checkpoints" / RESHARD_PLAN
    plan.parent.mkdir()
    plan.write_bytes(ReshardPlan(3, 5, 1).to_json())
    said = relocate(new, code=1).out
    assert "reshard` was interrupted" in said
    assert "Finish what is half done at the old place, copy these files and folders again" in said
    shutil.rmtree(plan.parent)
    for rank in RANKS[:2]:
        edit(new / "checkpoints" / rank / "run.json", reshards=1)
    assert "shares.json is missing" in relocate(new, code=1)
    assert named(new) == {f"{tmp_path}/old/output"}
