"""Output files that match the template and belong to nobody are refused before anything is asked,
with the way out.
"""

from __future__ import annotations

import pytest

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import CheckpointMismatch, OutputMismatch
from datatrove_ckpt.testing import outputs
from tests.jobs import ask, config, documents, fails_at, runner, writer

STRANGER = "00000_chunk_0.jsonl"
"""As datatrove's own runner names the file of its first chunk."""


def put(folder, name=STRANGER):
    path = folder / "output" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"text": "text 0", "id": "id 0"}\n')
    return path


def refused(what, folder, server, number=5, **changes):
    """The message of a start that is refused before it asks anything."""
    asked = server.asked.total()
    with pytest.raises(OutputMismatch, match=what) as failed:
        runner(folder, server, **changes).run(documents(number))
    assert server.asked.total() == asked
    return str(failed.value)


def test_a_file_of_datatroves_beside_an_interrupted_run_is_refused_at_its_next_start(
    tmp_path, server
):
    with pytest.raises(Exception, match="cannot make sense of id 2"):
        runner(tmp_path, server, fails_at(["id 2"])).run(documents(5))
    path = put(tmp_path)
    said = refused(STRANGER, tmp_path, server, accept_changes=True)
    assert "delete" in said
    path.unlink()
    runner(tmp_path, server, accept_changes=True).run(documents(5))
    assert main(["verify", str(tmp_path / "checkpoints"), "--full"]) == 0


def test_with_a_mirror_a_first_start_refuses_it_too(tmp_path, server):
    path = put(tmp_path)
    refused(STRANGER, tmp_path, server, checkpoints_remote_dir=str(tmp_path / "mirror"))
    path.unlink()
    runner(tmp_path, server, checkpoints_remote_dir=str(tmp_path / "mirror")).run(documents(5))


def test_without_a_checkpoint_it_is_refused_and_files_that_are_overwritten_are_not(
    tmp_path, server
):
    def step():
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
def test_a_checkpoint_of_datatroves_is_refused_with_the_setting(tmp_path, server, name, content):
    """Between two chunks, and when a rank is finished, only last_chunk is left of it."""
    path = tmp_path / "checkpoints" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(CheckpointMismatch) as failed:
        runner(tmp_path, server).run(documents(5))
    assert f"finished_from: [{tmp_path / 'checkpoints'}, OUTPUT]" in str(failed.value)
    assert outputs(tmp_path / "checkpoints") == {name: content.encode()}
    assert not server.asked


# two jobs that start at one moment, with checkpoints of their own and the same output files ------


def job(folder, server, name):
    """A runner whose checkpoint is that of the job ``name``; all jobs have one output folder."""
    return runner(folder / name, server, output_writer=writer(folder))
