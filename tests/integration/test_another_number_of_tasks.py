"""A half-done run goes on with another number of tasks: a run in new folders, with
``finished_from`` of the old one.
"""

import pytest

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.testing import FakeServer
from tests.datatrove_job import write_input
from tests.jobs import documents, run_job, runner
from tests.kept import edit

from .test_finished_from import write_yaml


def test_a_run_that_an_earlier_build_has_resharded_is_refused_by_all_with_the_commit_that_can_finish_it(
    here, command
):
    write_input(here, 2, 2)
    with FakeServer() as server:
        write_yaml(here, server.url, "null", TASKS="2")
        command("run", "job.yaml")
        server.asked.clear()
        (here / "new/checkpoints/shares.json").touch()
        for words in ("run job.yaml", "status new", "report new -o -", "verify new", "repair new"):
            said = command(*words.split(), code=None).err
            assert said.count("\n") == 1
            assert (
                "new/checkpoints: `datatrove-ckpt reshard` changed this run's number of tasks. "
                "Finish it with commit d3ddc9c6." in said
            )
        assert not server.asked


@pytest.mark.parametrize(
    "left", ["checkpoints/shares.json", "checkpoints/reshard/plan.json", "mirror/shares.json"]
)
def test_a_task_alone_refuses_it_too(tmp_path, server, left):
    """As datatrove's executors start it, which compare nothing before; and on a node that has only
    the mirror.
    """
    path = tmp_path / left
    path.parent.mkdir(parents=True)
    path.touch()
    mirror = str(tmp_path / "mirror")
    step = runner(tmp_path, server, checkpoints_remote_dir=mirror, mirror_seconds=1000)
    with pytest.raises(CheckpointMismatch, match="d3ddc9c6"):
        step.run(documents(3), 1, 2)
    assert not server.asked
    assert not (tmp_path / "checkpoints/00001/run.json").exists()


def test_a_task_of_such_a_run_is_refused_without_the_file_too(tmp_path, server):
    """Its ``run.json`` says it.

    Without the file, it would read other documents than it has read.
    """
    run_job(tmp_path, server, 3)
    edit(tmp_path / "checkpoints/00000/run.json", reshards=1)
    server.asked.clear()
    with pytest.raises(CheckpointMismatch, match=r"reshards: 1 -> \(not set\)"):
        run_job(tmp_path, server, 4, accept_changes=True)
    assert not server.asked
