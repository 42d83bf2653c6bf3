"""What people change between two runs of a command: exit code 0 means that every document is in the output."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datatrove.io import DataFolder
from loguru import logger

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.testing import FakeServer

JOB = """
executor:
  class_path: LocalPipelineExecutor
  init_args:
    tasks: 3
    workers: 1
    logging_dir: logs
    pipeline:
      - {{class_path: JsonlReader, init_args: {{data_folder: input}}}}
      - class_path: InferenceRunner
        init_args:
          rollout_fn: {{class_path: PromptRollout, init_args: {{prompt: "Say {{text}}"}}}}
          config: {{server_type: endpoint, endpoint_url: "{url}", model_name_or_path: fake}}
          output_writer:
            class_path: JsonlWriter
            init_args: {{output_folder: output, output_filename: "${{rank}}_${{chunk_index}}.jsonl", compression: null}}
          checkpoints_local_dir: checkpoints
          records_per_chunk: 2
"""


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


class Command:
    """``datatrove-ckpt run job.yaml ...`` in this process, with the exit code and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
        self._capsys = capsys
        self.server = server

    def __call__(self, *arguments: str, code: int = 0) -> str:
        self.server.asked.clear()
        self._capsys.readouterr()
        assert main(["run", "job.yaml", *arguments]) == code
        printed = self._capsys.readouterr()
        return printed.out if code == 0 else printed.err


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: FakeServer
) -> Iterator[Command]:
    """A job of three tasks with four documents each, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    DataFolder.clear_instance_cache()  # fsspec would hand out the folder of this name in another working directory
    Path("input").mkdir()
    for task in range(3):
        rows = [json.dumps({"id": f"id {n}", "text": f"text {n}"}) for n in range(task * 4, task * 4 + 4)]
        Path(f"input/{task}.jsonl").write_text("\n".join(rows))
    Path("job.yaml").write_text(JOB.format(url=server.url))
    yield Command(capsys, server)
    logger.configure(patcher=lambda record: None)
    DataFolder.clear_instance_cache()


def written() -> list[str]:
    lines = [line for path in Path("output").glob("*") for line in path.read_text().splitlines()]
    return sorted(json.loads(line)["id"] for line in lines)


@pytest.mark.parametrize(
    "loss", [lambda: shutil.rmtree("checkpoints"), lambda: shutil.rmtree("checkpoints/00001")], ids=["all", "a rank"]
)
def test_markers_without_checkpoints_are_refused(run: Command, loss: Callable[[], None]) -> None:
    run()
    loss()
    error = run(code=1)
    assert "completions marks task" in error
    assert f"{Path('checkpoints').absolute()} holds no checkpoint" in error
    assert "bring them back" in error
    assert not run.server.asked


def test_the_markers_of_another_job_are_refused(run: Command) -> None:
    run()
    error = run("--pipeline.1.checkpoints_local_dir=others", "--pipeline.1.output_writer.output_folder=others", code=1)
    assert re.search(r"logs/completions marks task 0, 1, 2 as complete, but .*/others holds no checkpoint", error)
    assert "choose another logging_dir" in error


def test_a_marked_task_whose_checkpoint_is_not_finished_runs(run: Command) -> None:
    run("--executor.tasks=1", "--pipeline.0.limit=4")
    before = written()
    shutil.copytree("checkpoints", "saved")
    # An old copy of the folder: the second chunk is not committed yet.
    log = Path("checkpoints/00000/commits.jsonl")
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    Path("checkpoints/00000/lock").touch()
    Path("output/00000_00001.jsonl").unlink()
    line = run("--executor.tasks=1", "--pipeline.0.limit=4")
    assert "4 of 4 documents are in 2 files" in line
    assert written() == before
    assert len(run.server.asked) == 2
