"""``migrate``, ``reshard``, ``fork``, ``relocate`` one after the other, and what other commands say of the result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.layout import RESHARD_PLAN, SHARES
from datatrove_ckpt.checkpoint.resharding import ReshardPlan
from datatrove_ckpt.checkpoint.versions import FORMAT
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.maintenance.read_state import read_run_state
from datatrove_ckpt.maintenance.run_state import RunState
from datatrove_ckpt.maintenance.where import open_place
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


def test_what_reshard_writes_has_its_format_and_version(job: Job) -> None:
    job.stop_in_the_middle(2, some(job, 1))
    for path in (
        *job.checkpoints.glob("0*/run.json"),
        job.checkpoints / "job.json",
    ):  # as 0.1.0 wrote them
        content = content_of(path) | {"format": 1}
        del content["written_by"]
        path.write_text(json.dumps(content))
    job.reshard(2, 3)
    written = [content_of(path) for path in (*job.checkpoints.glob("0*/run.json"), job.checkpoints / "job.json")]
    assert {(content["format"], content["written_by"]) for content in written} == {(FORMAT, __version__)}
    job.finish(3)


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


def test_a_fork_lacks_nothing_of_tasks_that_never_started(job: Job) -> None:
    job.stop_in_the_middle(4, some(job, 4), ranks=[0, 1])
    job.reshard(4, 2)
    new = elsewhere(job)
    assert fork(job, new) == 0
    new.finish(2)


def test_a_fork_gets_other_tasks_once_each_has_started(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.stop_in_the_middle(2, some(job, 6))
    new = elsewhere(job)
    assert fork(job, new) == 0
    new.stop_in_the_middle(2, some(job, 7), ranks=[0])
    with pytest.raises(Exception, match="task 1 of it never started"):
        new.reshard(2, 3)
    new.stop_in_the_middle(2, some(job, 7), ranks=[1])
    new.reshard(2, 3)
    assert not any("forked" in content_of(path) for path in new.checkpoints.glob("0*/run.json"))
    new.finish(3)


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


def test_a_mirror_of_a_run_with_other_tasks_is_forked_with_its_shares(job: Job) -> None:
    job.stop_in_the_middle(2, some(job, 8))
    job.reshard(2, 3)
    job.changes = {"checkpoints_remote_dir": str(job.folder / "mirror"), "mirror_seconds": 1000}
    job.stop_in_the_middle(3, some(job, 9))
    new = elsewhere(job)
    assert main(["fork", str(job.folder / "mirror"), str(new.checkpoints)]) == 0
    assert (new.checkpoints / SHARES).read_bytes() == (job.checkpoints / SHARES).read_bytes()
    new.finish(3)


def state_of(job: Job, what: str | None = None) -> RunState:
    with open_place(what or str(job.checkpoints)) as place:
        return read_run_state(place)


def test_what_is_said_of_a_mirror_counts_the_tasks_that_there_are_no_more(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.stop_in_the_middle(4, some(job, 9))
    job.reshard(4, 2)
    mirror = str(job.folder / "mirror")
    job.changes = {"checkpoints_remote_dir": mirror, "mirror_seconds": 1000}
    job.finish(2)
    state = state_of(job, mirror)
    assert (state.tasks, state.foreign, state.missing, state.is_finished) == (2, [], [], True)
    assert state.totals.documents == len(job.ids)
    assert main(["verify", mirror, "--full"]) == 0
    assert main(["report", mirror, "--output", str(job.folder / "report.html")]) == 0
    printed = capsys.readouterr().out
    assert "one too many" not in printed
    assert "do not belong" not in printed
    shutil.rmtree(job.checkpoints)
    assert main(["fork", mirror, str(elsewhere(job).checkpoints)]) == 2
    assert "reshard has left" in capsys.readouterr().err


def test_status_counts_documents_that_have_moved_to_a_task_with_a_history(job: Job) -> None:
    """A task says at its end how many documents it has. Afterwards, ``reshard`` adds those of others."""
    job.write_input((7, 7, 7))
    job.stop_in_the_middle(3, {"text 0-5", "text 1-5", "text 2-5"})
    before = state_of(job).totals
    assert before.unfinished.read
    job.reshard(3, 1)
    after = state_of(job).totals
    assert (after.documents, after.exact) == (before.documents, True)
    job.finish(1)


def test_status_says_how_a_half_done_reshard_goes_on(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.stop_in_the_middle(4, some(job, 10))
    plan = job.checkpoints / RESHARD_PLAN
    plan.parent.mkdir()
    plan.write_bytes(ReshardPlan(4, 2, 1).to_json())
    assert main(["status", str(job.checkpoints)]) == 0
    printed = capsys.readouterr().out
    assert f"was interrupted while it changed {job.checkpoints} from 4 to 2 tasks. Run it again (--tasks 2)" in printed
    assert "Run the command that started it again" not in printed


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
