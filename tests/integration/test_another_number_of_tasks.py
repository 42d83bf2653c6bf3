"""A run whose number of tasks an earlier build of 0.2.0 has changed (``reshard``)."""

import pytest

from datatrove_ckpt.errors import CheckpointMismatch
from tests.jobs import documents, runner
from tests.kept import edit


def test_a_task_that_an_earlier_build_has_resharded_is_refused(tmp_path, server):
    """It would read other documents than it has read."""
    runner(tmp_path, server).run(documents(3))
    edit(tmp_path / "checkpoints/00000/run.json", reshards=1)
    server.asked.clear()
    with pytest.raises(CheckpointMismatch, match=r"reshards: 1 -> \(not set\)"):
        runner(tmp_path, server, accept_changes=True).run(documents(4))
    assert not server.asked
