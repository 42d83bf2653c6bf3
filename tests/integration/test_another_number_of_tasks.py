"""A run whose number of tasks an earlier build changed is refused: see ``finished_from``."""

import pytest

from datatrove_ckpt.errors import CheckpointMismatch
from tests.jobs import run_job
from tests.kept import edit


def test_a_task_of_a_run_with_another_number_of_tasks_is_refused(tmp_path, server):
    """Its ``run.json`` says it.

    It would read other documents than it has read.
    """
    run_job(tmp_path, server, 3)
    edit(tmp_path / "checkpoints/00000/run.json", reshards=1)
    server.asked.clear()
    with pytest.raises(CheckpointMismatch, match=r"reshards: 1 -> \(not set\)"):
        run_job(tmp_path, server, 4, accept_changes=True)
    assert not server.asked
