"""Output files that match the template and belong to nobody are refused before anything is asked, with the way out."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.checkpoint.layout import NOTHING_PUBLISHED
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import CheckpointMismatch, OutputMismatch, StorageFailed
from datatrove_ckpt.output.chunk_output import ChunkOutput
from datatrove_ckpt.output.targets import LocalTarget
from datatrove_ckpt.testing import FakeServer, outputs
from tests.commands import Command
from tests.crash.test_every_effect import answered
from tests.jobs import ask, config, documents, fails_at, runner, writer

STRANGER = "00000_chunk_0.jsonl"
"""As datatrove's own runner names the file of its first chunk."""


def put(folder: Path, name: str = STRANGER) -> Path:
    path = folder / "output" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"text": "text 0", "id": "id 0"}\n')
    return path


def refused(what: str, folder: Path, server: FakeServer, number: int = 5, **changes: Any) -> str:
    """The message of a start that is refused before it asks anything."""
    asked = server.asked.total()
    with pytest.raises(OutputMismatch, match=what) as failed:
        runner(folder, server, **changes).run(documents(number))
    assert server.asked.total() == asked
    return str(failed.value)


def test_a_file_of_datatroves_beside_an_interrupted_run_is_refused_at_its_next_start(
    tmp_path: Path, server: FakeServer
) -> None:
    with pytest.raises(Exception, match="cannot make sense of id 2"):
        runner(tmp_path, server, fails_at(["id 2"])).run(documents(5))
    path = put(tmp_path)
    said = refused(STRANGER, tmp_path, server, accept_changes=True)
    assert "delete" in said
    path.unlink()
    runner(tmp_path, server, accept_changes=True).run(documents(5))
    assert main(["verify", str(tmp_path / "checkpoints"), "--full"]) == 0


def test_with_a_mirror_a_first_start_refuses_it_too(tmp_path: Path, server: FakeServer) -> None:
    path = put(tmp_path)
    refused(STRANGER, tmp_path, server, checkpoints_remote_dir=str(tmp_path / "mirror"))
    path.unlink()
    runner(tmp_path, server, checkpoints_remote_dir=str(tmp_path / "mirror")).run(documents(5))


def test_without_a_checkpoint_it_is_refused_and_files_that_are_overwritten_are_not(
    tmp_path: Path, server: FakeServer
) -> None:
    def step() -> InferenceRunner:
        return InferenceRunner(ask, config(server), writer(tmp_path), records_per_chunk=2)

    for _ in range(2):
        step().run(documents(5))
    asked = server.asked.total()
    put(tmp_path)
    with pytest.raises(OutputMismatch, match=STRANGER):
        step().run(documents(5))
    assert server.asked.total() == asked


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("last_chunk/00000.txt", "3"),
        ("last_chunk/00000.txt", ""),
        ("00000/chunk_00000.jsonl", '{"text": "t", "id": "i", "media": [], "metadata": {}}\n'),
    ],
)
def test_a_checkpoint_of_datatroves_is_refused_with_the_command(
    tmp_path: Path, server: FakeServer, name: str, content: str
) -> None:
    """Between two chunks, and when a rank is finished, only last_chunk is left of it."""
    path = tmp_path / "checkpoints" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(CheckpointMismatch) as failed:
        runner(tmp_path, server).run(documents(5))
    assert f"datatrove-ckpt migrate CONFIG --from {tmp_path / 'checkpoints'} take it over" in str(failed.value)
    assert outputs(tmp_path / "checkpoints") == {name: content.encode()}
    assert not server.asked


# two jobs that start at one moment, with checkpoints of their own and the same output files --------------------------


def job(folder: Path, server: FakeServer, name: str) -> Any:
    """A runner whose checkpoint is that of the job ``name``; all jobs have one output folder."""
    return runner(folder / name, server, output_writer=writer(folder))


def both(folder: Path, one: FakeServer) -> FakeServer:
    """The server of job "b": the whole job "a" happens when it is asked first, after "b" found the folder empty."""
    happened: list[str] = []

    def answer(path: str, text: str) -> str:
        if not happened:
            happened.append(text)
            thread = threading.Thread(target=lambda: job(folder, one, "a").run(documents(5)))
            thread.start()  # in this one, an event loop runs
            thread.join()
        return "b"

    return FakeServer(answer=answer)


def test_the_slower_job_overwrites_nothing_however_often_it_is_started(tmp_path: Path, command: Command) -> None:
    with FakeServer(answer=lambda path, text: "a") as one, both(tmp_path, one) as other:
        for said in ("jsonl is there with other content, which this rank has not", "Another run wrote them"):
            with pytest.raises(OutputMismatch, match=said):
                job(tmp_path, other, "b").run(documents(5))
            printed = command("verify", tmp_path / "b" / "checkpoints", code=1).out
            assert ".jsonl is named by no commit. Another job has written it" in printed
        asked = dict(other.asked)
        mine = [path.read_text() for path in (tmp_path / "output").glob("*.jsonl")]
        assert len(mine) == 3
        assert not [content for content in mine if '"text":"b"' in content]
        job(tmp_path, one, "a").run(documents(5))  # still what it has committed
        shutil.rmtree(tmp_path / "output")
        kept = answered(tmp_path / "b")  # what was in flight at a refusal was cut off
        assert len(kept) >= 2
        job(tmp_path, other, "b").run(documents(5))  # as the message says
        assert {text: other.asked[text] for text in kept} == {text: asked[text] for text in kept}, "paid twice"
    assert len(outputs(tmp_path / "output")) == 3


@pytest.mark.parametrize("mirror", [None, "mirror"])
def test_of_two_jobs_that_publish_their_first_file_at_one_moment_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: str | None
) -> None:
    looks = LocalTarget.others_files
    remote = mirror and str(tmp_path / mirror)

    def looks_first(target: LocalTarget, staged: Mapping[str, Path]) -> list[str]:
        found = looks(target, staged)
        if not one.asked:
            job(tmp_path, one, "a").run(documents(5))
        return found

    with FakeServer(answer=lambda path, text: "a") as one, FakeServer(answer=lambda path, text: "b") as other:
        monkeypatch.setattr(LocalTarget, "others_files", looks_first)
        for said in ("jsonl is there with other content, which this rank has not", "Another run wrote them"):
            second = runner(tmp_path / "b", other, output_writer=writer(tmp_path), checkpoints_remote_dir=remote)
            with pytest.raises(OutputMismatch, match=said):
                second.run(documents(5))
        job(tmp_path, one, "a").run(documents(5))  # still what it has committed
    written = [path.read_text() for path in (tmp_path / "output").glob("*.jsonl")]
    assert len(written) == 3
    assert not [content for content in written if '"text":"b"' in content]


def test_a_job_that_was_killed_before_its_first_file_overwrites_no_files_of_one_that_came_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer(answer=lambda path, text: "a") as one, FakeServer(answer=lambda path, text: "b") as other:
        with monkeypatch.context() as patch:
            patch.setattr(ChunkOutput, "write_chunk", Mock(side_effect=StorageFailed("as asked")))
            with pytest.raises(StorageFailed):
                job(tmp_path, one, "a").run(documents(5))
        path = put(tmp_path, "00000_chunk_00002.jsonl")  # any file of its template
        with pytest.raises(OutputMismatch, match=path.name):
            job(tmp_path, one, "a").run(documents(5))
        path.unlink()
        job(tmp_path, other, "b").run(documents(5))
        published = outputs(tmp_path / "output")
        for _ in range(2):
            with pytest.raises(OutputMismatch, match=r"has written no file yet\. Another run wrote them"):
                job(tmp_path, one, "a").run(documents(5))
            assert outputs(tmp_path / "output") == published
        job(tmp_path, other, "b").run(documents(5))
        shutil.rmtree(tmp_path / "output")
        job(tmp_path, one, "a").run(documents(5))
    assert len(outputs(tmp_path / "output")) == 3
    assert not list((tmp_path / "a").rglob(NOTHING_PUBLISHED))
