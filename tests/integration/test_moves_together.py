"""``migrate``, ``reshard``, ``fork``, ``relocate`` one after the other, and what other commands say of the result."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.layout import RESHARD_PLAN, SHARES
from datatrove_ckpt.checkpoint.resharding import ReshardPlan
from datatrove_ckpt.checkpoint.versions import FORMAT
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.testing import FakeServer
from tests.datatrove_job import Datatrove
from tests.kept import content_of
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

from .test_migrate import Call, call, datatrove, expected, folder, migrate, written
from .test_migrate_doubts import NUMBER, left, make
from .test_migrate_doubts import job as left_job
from .test_reshard import Job, answers, job, server, some

__all__ = ["answers", "call", "datatrove", "folder", "job", "left", "left_job", "make", "server"]  # fixtures


def elsewhere(job: Job, *parts: str) -> Job:
    """The same job in other folders, with these parts of this one."""
    other = Job(job.folder.with_name("elsewhere"), job.server, job.answers, job.kind)
    other.ids, other.input = job.ids, job.input
    for part in parts:
        shutil.copytree(job.folder / part, other.folder / part)
    return other


def fork(job: Job, new: Job) -> int:
    return main(["fork", str(job.checkpoints), str(new.checkpoints)])


@pytest.mark.slow
def test_a_fork_that_was_killed_once_it_was_made_may_be_typed_again(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.stop_in_the_middle(2, some(job, 3))
    new = elsewhere(job)
    assert fork(job, new) == 0
    assert fork(job, new) == 0
    assert "is this fork already, and has not started" in capsys.readouterr().out
    other = Job(job.folder.with_name("other"), job.server, job.answers)
    assert main(["fork", str(job.checkpoints), str(other.checkpoints)]) == 0
    assert main(["fork", str(other.checkpoints), str(new.checkpoints)]) == 2, "it is another run's"
    new.finish(2)
    assert fork(job, new) == 2


@pytest.mark.slow
def test_a_fork_never_loses_the_documents_of_tasks_that_there_are_no_more(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.stop_in_the_middle(4, some(job, 4))
    job.reshard(4, 2)
    new = elsewhere(job)
    assert fork(job, new) == 2
    assert "reshard ... --tasks 4), then fork it" in capsys.readouterr().err
    job.stop_in_the_middle(2, some(job, 5))
    job.reshard(2, 4)
    assert fork(job, new) == 0
    new.finish(4)


@pytest.mark.slow
def test_a_fork_lacks_nothing_of_tasks_that_never_started(job: Job) -> None:
    job.stop_in_the_middle(4, some(job, 4), ranks=[0, 1])
    job.reshard(4, 2)
    new = elsewhere(job)
    assert fork(job, new) == 0
    new.finish(2)


@pytest.mark.slow
def test_a_forks_shares_reach_other_nodes_through_its_mirror(job: Job) -> None:
    job.stop_in_the_middle(2, some(job, 8))
    job.reshard(2, 3)
    new = elsewhere(job)
    assert fork(job, new) == 0
    from datatrove_ckpt.maintenance.fork import upload

    upload(new.checkpoints, str(new.folder / "mirror"))
    shutil.rmtree(new.checkpoints)
    new.changes = {"checkpoints_remote_dir": str(new.folder / "mirror"), "mirror_seconds": 1000}
    new.executor(3).run()
    new.check_finished()


@pytest.mark.slow
def test_a_mirror_of_a_run_with_other_tasks_is_forked_with_its_shares(job: Job) -> None:
    job.stop_in_the_middle(2, some(job, 8))
    job.reshard(2, 3)
    job.changes = {"checkpoints_remote_dir": str(job.folder / "mirror"), "mirror_seconds": 1000}
    job.stop_in_the_middle(3, some(job, 9))
    new = elsewhere(job)
    assert main(["fork", str(job.folder / "mirror"), str(new.checkpoints)]) == 0
    assert (new.checkpoints / SHARES).read_bytes() == (job.checkpoints / SHARES).read_bytes()
    new.finish(3)


@pytest.mark.slow
def test_status_says_how_a_half_done_reshard_goes_on(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.stop_in_the_middle(4, some(job, 10))
    plan = job.checkpoints / RESHARD_PLAN
    plan.parent.mkdir()
    plan.write_bytes(ReshardPlan(4, 2, 1).to_json())
    assert main(["status", str(job.checkpoints)]) == 0
    printed = capsys.readouterr().out
    assert f"was interrupted while it changed {job.checkpoints} from 4 to 2 tasks. Run it again (--tasks 2)" in printed
    assert "Run the command that started it again" not in printed


@pytest.mark.slow
def test_status_tells_a_fork_that_has_not_started(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.stop_in_the_middle(2, some(job, 10))
    new = elsewhere(job)
    assert fork(job, new) == 0
    capsys.readouterr()
    assert main(["status", str(new.checkpoints)]) == 0
    printed = capsys.readouterr().out
    assert f"{new.checkpoints} is a fork that has not started. Start it with `datatrove-ckpt run`." in printed
    assert "started it again" not in printed
    new.stop_in_the_middle(2, some(job, 10), ranks=[1])
    assert main(["status", str(new.checkpoints)]) == 0
    assert "Run the command that started it again" in capsys.readouterr().out


def test_verify_compares_the_new_number_of_tasks_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = {"c"}
    with FakeServer(
        status=lambda payload, times: 403 if payload["messages"][-1]["content"][-1] in refused else None
    ) as server:
        write_job(tmp_path, job_yaml(ENDPOINT.replace("URL", server.url), tasks=2), ["a", "b"], ["c"])
        assert main(["run", "job.yaml"]) == 1
        assert main(["reshard", "job.yaml", "--tasks", "3"]) == 0
        assert "--executor.tasks=3" in capsys.readouterr().out
        refused.clear()
        assert main(["run", "job.yaml", "--executor.tasks=3"]) == 0
    assert main(["verify", "job.yaml", "--executor.tasks=3", "--full"]) == 0
    capsys.readouterr()
    main(["verify", "job.yaml"])
    printed = capsys.readouterr()
    assert "tasks: 3 -> 2" in printed.out + printed.err


@pytest.mark.slow
def test_a_run_of_datatroves_is_taken_over_and_dealt_out_anew(left_job: Path, call: Call, datatrove: Datatrove) -> None:
    migrate(call)
    for path in Path("ours").glob("0*/run.json"):
        assert (content_of(path)["format"], content_of(path)["written_by"]) == (FORMAT, __version__)
    assert call("status", "job.yaml")[0] == 0
    code, _, error = call("reshard", "job.yaml", "--tasks", "3")
    assert code == 0, error
    code, _, error = call("run", "job.yaml", "--executor.tasks=3")
    assert code == 0, error
    assert written(Path()) == expected(NUMBER)
    assert call("verify", "job.yaml", "--executor.tasks=3", "--full")[0] == 0
