"""``relocate`` of a copy that lacks whole parts of the checkpoint, or that was made in the middle of ``reshard``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.layout import RESHARD_PLAN, SHARES
from datatrove_ckpt.checkpoint.resharding import ReshardPlan
from datatrove_ckpt.cli.main import main

from .test_moves_together import elsewhere
from .test_relocate import copied, named, relocate
from .test_reshard import Job, answers, job, server, some

__all__ = ["answers", "job", "server"]  # fixtures


def last_chunk(new: Path, rank: int) -> Path:
    return new / "checkpoints" / "last_chunk" / f"{rank:05d}.txt"


def keep_only_last_chunk(new: Path) -> None:
    for path in (new / "output").glob("00001*"):
        path.unlink()


def keep_only_output(new: Path) -> None:
    last_chunk(new, 1).unlink()


@pytest.mark.parametrize(
    ("left", "evidence"),
    [
        (keep_only_last_chunk, "checkpoints/last_chunk/00001.txt names its last chunk"),
        (keep_only_output, "00001_chunk_00000.jsonl is of it"),
    ],
)
def test_a_task_that_was_not_copied_is_missed(
    left: object, evidence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = copied(tmp_path)
    shutil.rmtree(new / "checkpoints" / "00001")
    left(new)  # type: ignore[operator]
    assert relocate(new) == 1
    said = capsys.readouterr().out
    assert f"rank 1: {new}/checkpoints/00001 is missing, and " in said
    assert evidence in said
    assert "so nothing was changed. Copy these files and folders again, and relocate again." in said
    assert "repair" not in said
    assert named_by(new, 0) == f"{tmp_path}/old/output"
    shutil.copytree(tmp_path / "old" / "checkpoints", new / "checkpoints", dirs_exist_ok=True)
    shutil.copytree(tmp_path / "old" / "output", new / "output", dirs_exist_ok=True)
    assert relocate(new) == 0
    assert named(new) == {f"{new}/output"}


def named_by(folder: Path, rank: int) -> str:
    return str(json.loads((folder / "checkpoints" / f"{rank:05d}" / "run.json").read_bytes())["output_folder"])


def test_a_copy_from_the_middle_of_a_reshard_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = copied(tmp_path)
    plan = new / "checkpoints" / RESHARD_PLAN
    plan.parent.mkdir()
    plan.write_bytes(ReshardPlan(3, 5, 1).to_json())
    assert relocate(new) == 1
    said = capsys.readouterr().err
    assert "reshard` was interrupted" in said
    assert "at the old place, then copy it again" in said
    assert named(new) == {f"{tmp_path}/old/output"}


@pytest.mark.matrix
@pytest.mark.parametrize("lost", ["shares", "half"])
def test_a_copy_of_parts_of_a_resharded_run_is_refused(lost: str, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.stop_in_the_middle(2, some(job, 1))
    before = job.folder.with_name("before")
    shutil.copytree(job.checkpoints, before)
    job.reshard(2, 3)
    other = elsewhere(job, "checkpoints", "output")
    shutil.rmtree(job.folder / "output")
    if lost == "shares":
        (other.checkpoints / SHARES).unlink()
    else:
        shutil.rmtree(other.checkpoints / "00001")
        shutil.copytree(before / "00001", other.checkpoints / "00001")
    assert main(["relocate", str(other.checkpoints), "--output", str(other.folder / "output")]) == 1
    said = capsys.readouterr()
    assert ("shares.json is missing" if lost == "shares" else "rank 1: is of a run with 2 tasks") in said.out + said.err
    assert named_by(other.folder, 0) == str(job.folder / "output")
