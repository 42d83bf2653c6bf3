"""A job of steps, killed at every effect, ends with the same bytes: queries, renames, records.

The effects of a rank are those of ``test_every_effect.py``; with ``-m full`` they are tried here, too.
"""

import shutil
from pathlib import Path

import pytest

import datatrove_ckpt
from datatrove_ckpt.checkpoint import open_checkpoint
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.testing import FakeServer
from tests.crashes import (
    EFFECTS,
    CopyingDisk,
    assert_same_output_after_crash,
    disk_in_place,
    path_of,
)
from tests.jobs import Budget
from tests.steps import STEPS, reply
from tests.yaml_jobs import write_rows

ROWS = [{"id": f"id {n}", "text": f"text {n}", "topic": f"topic {n % 2}"} for n in range(6)]

SETTINGS = {"max_concurrent_generations": 1, "records_per_chunk": 3}

pytestmark = pytest.mark.usefixtures("code_described_once")


@pytest.fixture(autouse=True)
def _one_after_the_other(monkeypatch):
    monkeypatch.setattr(open_checkpoint, "MAX_GROUP", 1)


class DiskOfSteps(CopyingDisk):
    """Keeps copies before the effects outside of the folders of ranks."""

    def before(self, name, args, label):
        if "checkpoints" not in path_of(args).parts:
            super().before(name, args, label)


@pytest.fixture
def attempt(ram, monkeypatch):
    """Runs the steps in a folder, and copies their rows to ``output``."""
    with FakeServer(reply) as server:

        def run(folder, redo=()):
            monkeypatch.chdir(folder)
            outputs = datatrove_ckpt.run(
                run_folder="qa",
                model="m",
                endpoint=server.url,
                steps=STEPS,
                redo=redo,
                **SETTINGS,
            )
            for name, output in outputs.items():
                for path in output.glob("*.parquet"):
                    (folder / "output" / name).mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, folder / "output" / name)

        yield run


@pytest.fixture
def job(ram):
    folder = ram / "job"
    folder.mkdir()
    write_rows(folder / "docs.jsonl", ROWS)
    return folder


@pytest.mark.matrix(
    "disk_type, step",
    [
        (DiskOfSteps, 35),
        (DiskOfSteps, 1),
        pytest.param(CopyingDisk, 1, marks=pytest.mark.full),
    ],
)
def test_steps_end_with_the_same_rows_after_a_crash_at_each_effect(job, attempt, disk_type, step):
    report = assert_same_output_after_crash(
        attempt, job, recoveries=0, counted=EFFECTS, disk_type=disk_type, step=step
    )
    print(report)
    assert report.points.count("rename input") == 2
    assert report.points.count("rename output") == 2


def restarts(attempt):
    """The same command again, or without its flag once it has begun."""

    def same(folder):
        attempt(folder, ["answers"])

    def plain(folder):
        has_begun = Path(folder, "qa/redo.json").exists() or Path(folder, "qa/answers.1").exists()
        attempt(folder, () if has_begun else ["answers"])

    return {"same": same, "plain": plain}


@pytest.mark.slow
@pytest.mark.parametrize(
    "again, disk_type, step",
    [
        ("plain", DiskOfSteps, 1),
        ("same", DiskOfSteps, 3),
        pytest.param("plain", CopyingDisk, 1, marks=pytest.mark.full),
        pytest.param("same", CopyingDisk, 1, marks=pytest.mark.full),
    ],
)
def test_redo_ends_with_the_same_rows_after_a_crash_at_each_effect(
    job, attempt, again, disk_type, step
):
    attempt(job)
    write_rows(job / "docs.jsonl", [*ROWS, {"id": "new", "text": "text 7", "topic": "topic 1"}])
    shutil.rmtree(job / "output")
    report = assert_same_output_after_crash(
        restarts(attempt)[again],
        job,
        recoveries=0,
        counted=EFFECTS,
        disk_type=disk_type,
        step=step,
    )
    print(report)
    assert {f"rename {name}.1" for name in STEPS} <= {*report.points}


class DiskOfRedo(CopyingDisk):
    """Keeps copies before the moves of a redo, and before the effects on its record."""

    def before(self, name, args, label):
        path = path_of(args)
        if path.parent.name == "qa" and "steps.json" not in path.name:
            super().before(name, args, label)


async def ask_twice(document, generate):
    for text in ("First", "Then"):
        await generate({"messages": [{"role": "user", "content": f"{text}: {document.text}"}]})
    return "good"


@pytest.mark.slow
def test_a_redo_killed_at_each_move_and_again_later_pays_no_half_document_twice(job, monkeypatch):
    monkeypatch.chdir(job)
    steps = {
        "texts": {"sql": "select id, text from read_json('docs.jsonl')"},
        "answers": {"input": "texts", "rollout": ask_twice},
    }

    def run(redo=()):
        datatrove_ckpt.run(
            run_folder="qa",
            model="m",
            endpoint=server.url,
            steps=steps,
            redo=redo,
            replay_check=False,
            **SETTINGS,
        )

    with FakeServer() as server:
        write_rows("docs.jsonl", ROWS[:1])
        run()
        write_rows("docs.jsonl", [{**ROWS[0], "text": "other"}])
        server._status = Budget(0)
        disk = DiskOfRedo(job, counted=("rename",))
        with disk_in_place(disk), pytest.raises(CkptError):
            run(["texts"])
        assert {"rename redo.json", "rename answers.1", "rename texts.1"} == {*disk.points}
        for _, crash in disk.left():
            monkeypatch.chdir(job)  # which is another folder each time
            server.asked.clear()
            server._status = Budget(1)
            has_begun = Path("qa/redo.json").exists() or Path("qa/answers.1").exists()
            with pytest.raises(CkptError):
                run(() if has_begun else ["texts"])
            shutil.rmtree("qa/answers.1")  # which makes the redo move nothing again
            server._status = Budget(9)
            run(["texts"])
            assert server.asked == {"First: other": 1, "Then: other": 2}, crash
            assert not [*Path("qa").glob("answers.*")], crash
            assert not Path("qa/redo.json").exists()
