"""Output files that match the template and belong to nobody are refused before anything is asked,
with the way out.
"""

import pytest

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.errors import CheckpointMismatch, OutputMismatch
from datatrove_ckpt.testing import outputs
from tests.jobs import ask, config, documents, run_job, writer

STRANGER = "00000_chunk_0.jsonl"
"""As datatrove's own runner names the file of its first chunk."""


def test_without_a_checkpoint_it_is_refused_and_files_that_are_overwritten_are_not(
    tmp_path, server
):
    def step():
        return InferenceRunner(ask, config(server), writer(tmp_path), records_per_chunk=2)

    for _ in range(2):
        step().run(documents(5))
    asked = server.asked.total()
    (tmp_path / "output" / STRANGER).write_text('{"text": "text 0", "id": "id 0"}\n')
    with pytest.raises(OutputMismatch, match=STRANGER):
        step().run(documents(5))
    assert server.asked.total() == asked


@pytest.mark.parametrize(
    "name, content",
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
        run_job(tmp_path, server, 5)
    assert f"finished_from: [{tmp_path / 'checkpoints'}, OUTPUT]" in str(failed.value)
    assert outputs(tmp_path / "checkpoints") == {name: content.encode()}
    assert not server.asked
