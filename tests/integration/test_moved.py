"""Output and checkpoints that lie elsewhere now: the run goes on there once every committed file
proved to be there.
"""

import itertools
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint import job_file
from datatrove_ckpt.checkpoint.job_file import record_output_folder
from datatrove_ckpt.checkpoint.layout import LOCK, RUN
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.errors import CheckpointMismatch, OutputMismatch
from datatrove_ckpt.run_folder.verify import verify
from datatrove_ckpt.testing import FakeServer, outputs
from tests.crashes import CopyingDisk, disk_in_place
from tests.kept import content_of, edit
from tests.make_release import TEXTS, run
from tests.rank_folders import place_at
from tests.releases import NAMES, NEWEST, kept, restored
from tests.yaml_jobs import endpoint, job_yaml, write_job

REST = {"Rewrite: stop": 1, "Rewrite: b4": 2}
"""What task 1 of a release asks that goes on."""


def copied(folder, name=NEWEST):
    """A job of a release at one place, and a copy of it at another one, which is returned."""
    restored(name, folder / "old")
    shutil.copytree(folder / "old", folder / "new")
    return folder / "new"


def recorded(folder):
    """The output folder that the whole job has."""
    return str(json.loads((folder / "checkpoints/job.json").read_bytes())["output_folder"])


def assert_whole(folder):
    report = verify(place_at(folder / "checkpoints"), full=True)
    assert (report.output, report.problems, report.unfinished) == (f"{folder}/output", [], [])


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_job_of_each_release_goes_on_in_its_new_place(name, tmp_path, server):
    new = copied(tmp_path, name)
    before = outputs(tmp_path / "old")
    for rank in range(3):
        run(new, server.url, rank)
    assert server.asked == {**REST, **{f"Rewrite: {text}": 2 for text in TEXTS[2]}}
    assert outputs(tmp_path / "old") == before
    assert_whole(new)


@pytest.mark.parametrize("name", NAMES)
def test_output_alone_is_moved_and_moved_back(name, tmp_path, server):
    folder = restored(name, tmp_path / "job")
    elsewhere = tmp_path / "large"
    (folder / "output").rename(elsewhere)
    run(folder, server.url, 1, output=str(elsewhere))
    assert server.asked == REST
    assert recorded(folder) == str(elsewhere)
    assert verify(place_at(folder / "checkpoints"), full=True).output == str(elsewhere)
    elsewhere.rename(folder / "output")
    run(folder, server.url, 2)
    assert_whole(folder)


def test_a_file_that_is_missing_at_the_new_place_refuses_every_task_before_it_asks(
    tmp_path, server
):
    new = copied(tmp_path)
    lost = next((new / "output").glob("00000*"))
    lost.rename(tmp_path / "lost")
    before = kept(new)
    for _ in range(2):  # a refusal leaves nothing that hides it
        with pytest.raises(OutputMismatch) as refused:
            run(new, server.url, 1)
        said = f"{new}/output lacks committed files, such as {lost.name} (task 0, chunk "
        assert str(refused.value).startswith(said)
        assert f"which were written to {tmp_path}/old/output. Set" in str(refused.value)
    assert kept(new) == before
    (tmp_path / "old/output").rename(tmp_path / "old/gone")
    with pytest.raises(
        OutputMismatch,
        match=f"differ from their commits .*{lost.name} is missing.*Put them back",
    ):
        run(new, server.url, 1)
    assert not server.asked
    (tmp_path / "lost").rename(lost)
    run(new, server.url, 1)
    assert server.asked == REST


def test_a_task_that_runs_elsewhere_refuses_another_output_folder(tmp_path, server):
    new = copied(tmp_path)
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    path = new / "checkpoints/00001" / RUN
    owner = content_of(path)["owner"]
    edit(path, owner={**owner, **here}, output_folder=f"{tmp_path}/old/output")
    lock = Lock(path.with_name(LOCK))
    try:
        with pytest.raises(CheckpointMismatch) as refused:
            run(new, server.url, 2, accept_changes=True)
    finally:
        lock.release()
    assert f'output_folder: "{tmp_path}/old/output" -> "{new}/output"' in str(refused.value)
    assert "stop the run first" in str(refused.value)
    assert not server.asked
    run(new, server.url, 2)
    assert set(server.asked) == {f"Rewrite: {text}" for text in TEXTS[2]}


@pytest.mark.slow
def test_killed_at_each_third_effect_of_the_first_start_elsewhere_the_same_command_goes_on(
    tmp_path,
):
    folder = copied(tmp_path)
    disk = CopyingDisk(folder)
    with FakeServer() as server:
        with disk_in_place(disk):
            run(folder, server.url, 1)
        expected = outputs(folder / "output")
        assert len(disk.points) >= 9
        for _, crash in itertools.islice(disk.left(), 0, None, 3):
            run(folder, server.url, 1)
            report = verify(place_at(folder / "checkpoints"), full=True)
            assert (report.output, report.problems) == (f"{folder}/output", []), crash
            assert outputs(folder / "output") == expected


def test_what_a_rank_writes_into_the_job_while_its_new_place_is_noted_is_kept(
    tmp_path, monkeypatch
):
    root = copied(tmp_path) / "checkpoints"
    taken = Lock

    def lock(path):
        edit(root / "job.json", model="another task was first")
        return taken(path)

    monkeypatch.setattr(job_file, "Lock", lock)
    record_output_folder(root, "elsewhere")
    job = content_of(root / "job.json")
    assert (job["output_folder"], job["model"]) == ("elsewhere", "another task was first")


def test_a_mirror_that_was_copied_goes_on_with_the_copy_of_the_output(tmp_path, server, command):
    new = copied(tmp_path)
    shutil.rmtree(new / "checkpoints")
    mirror = str(new / "mirror")
    # The record is copied, too; nothing else knows the run.
    (record,) = new.glob(".output.datatrove-ckpt-owner-*")
    with pytest.raises(OutputMismatch, match="belongs to another run") as refused:
        run(new, server.url, 1, checkpoints_remote_dir=mirror)
    assert f"{record}; then run again" in str(refused.value)
    assert not server.asked
    record.unlink()
    run(new, server.url, 1, checkpoints_remote_dir=mirror)
    assert server.asked == REST
    shutil.rmtree(new / "checkpoints")
    assert str(new / "output") in command("verify", mirror, code=None)


def test_output_that_went_to_the_hub_is_compared_there(tmp_path, hub, server):
    folder = restored(NEWEST, tmp_path / "job")
    there = {f"part/{path.name}": path.read_bytes() for path in (folder / "output").glob("*.jsonl")}
    lost = next(iter(there))
    hub.put("org/data", {name: data for name, data in there.items() if name != lost})
    url = "hf://datasets/org/data/part"
    with pytest.raises(OutputMismatch, match=r"lacks committed files|is missing"):
        run(folder, server.url, 1, output=url)
    assert not server.asked
    hub.put("org/data", {lost: there[lost]})
    run(folder, server.url, 1, output=url)
    assert server.asked == REST
    assert recorded(folder) == url


# commands ----------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path, server, monkeypatch):
    """A job of two tasks, in its folder."""
    folder = tmp_path / "a"
    folder.mkdir()
    text = job_yaml(endpoint(server), tasks=2)
    write_job(folder, text, ["one", "two"], ["three", "four"])
    monkeypatch.chdir(folder)
    return folder


def alter(path):
    path.write_bytes(path.read_bytes().replace(b"answer", b"ANSWER"))


def at(folder):
    """The job with the folders of a copy."""
    step = f"--pipeline.1.checkpoints_local_dir={folder}/checkpoints"
    writer = f"--pipeline.1.output_writer.output_folder={folder}/output"
    return ["job.yaml", f"--executor.logging_dir={folder}/logs", step, writer]


@pytest.mark.matrix("damage", [alter, Path.unlink])
def test_a_finished_run_that_was_copied_is_compared_with_its_contents(
    damage, job, tmp_path, server, command
):
    command("run", "job.yaml")
    asked = server.asked.total()
    copy = tmp_path / "b"
    shutil.copytree(job, copy)
    file = next((copy / "output").glob("00001*"))
    damage(file)
    assert f"{copy}/output" in command("run", *at(copy), code=1).error
    shutil.copy(job / "output" / file.name, file)
    command("run", *at(copy))
    assert recorded(copy) == f"{copy}/output"
    shutil.rmtree(job / "output")
    command("verify", copy / "checkpoints", "--full")
    command("verify", *at(copy), "--full")
    assert server.asked.total() == asked


@pytest.mark.parametrize("is_owned", [True, False])
def test_the_folder_of_another_run_is_refused_in_place_of_a_moved_one(
    is_owned, job, server, command
):
    """The files have the same names, the same sizes and other contents."""
    command("run", "job.yaml")
    text = Path("job.yaml").read_text().replace("Say {", "Ask {").replace(": output,", ": other,")
    Path("other.yaml").write_text(
        text.replace(": checkpoints", ": others").replace("dir: logs", "dir: others_logs")
    )
    command("run", "other.yaml")
    asked, others = server.asked.total(), outputs(Path("other"))
    if not is_owned:
        for record in job.glob(".other.datatrove-ckpt-owner-*"):
            record.unlink()
    shutil.rmtree("output")
    said = command(
        "run", "job.yaml", "--pipeline.1.output_writer.output_folder=other", code=1
    ).error
    assert ("belongs to another run" in said) is is_owned
    assert ("differ from their commits" in said) is not is_owned
    assert outputs(Path("other")) == others
    assert server.asked.total() == asked
