"""Two jobs that start at one moment, with checkpoints of their own and the same output files: none overwrites."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.checkpoint.layout import NOTHING_PUBLISHED, OTHERS_FILES
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import OutputMismatch, StorageFailed
from datatrove_ckpt.output.chunk_output import ChunkOutput
from datatrove_ckpt.testing import FakeServer, outputs
from tests.crash.test_every_effect import answered
from tests.jobs import documents, runner, writer


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


def test_the_slower_job_overwrites_nothing_however_often_it_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(answer=lambda path, text: "a") as one, both(tmp_path, one) as other:
        for _ in range(2):
            with pytest.raises(OutputMismatch, match=r"jsonl is there with other content, which this rank has not"):
                job(tmp_path, other, "b").run(documents(5))
            assert main(["verify", str(tmp_path / "b" / "checkpoints")]) == 1
            assert ".jsonl is named by no commit. Another job has written it" in capsys.readouterr().out
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
    assert not list(tmp_path.rglob(OTHERS_FILES))


def killed(output: ChunkOutput, chunk_index: int, documents: Any) -> Any:
    raise StorageFailed("as asked")


def test_a_job_that_was_killed_before_its_first_file_overwrites_no_files_of_one_that_came_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeServer(answer=lambda path, text: "a") as one, FakeServer(answer=lambda path, text: "b") as other:
        with monkeypatch.context() as patch:
            patch.setattr(ChunkOutput, "write_chunk", killed)
            with pytest.raises(StorageFailed):
                job(tmp_path, one, "a").run(documents(5))
        job(tmp_path, other, "b").run(documents(5))
        published = {path.name: path.read_bytes() for path in (tmp_path / "output").glob("*.jsonl")}
        for _ in range(2):
            with pytest.raises(OutputMismatch, match=r"has written no file yet\. Another run wrote them"):
                job(tmp_path, one, "a").run(documents(5))
            assert {path.name: path.read_bytes() for path in (tmp_path / "output").glob("*.jsonl")} == published
        job(tmp_path, other, "b").run(documents(5))
        shutil.rmtree(tmp_path / "output")
        job(tmp_path, one, "a").run(documents(5))
    assert len(outputs(tmp_path / "output")) == 3
    assert not list((tmp_path / "a").rglob(NOTHING_PUBLISHED))
