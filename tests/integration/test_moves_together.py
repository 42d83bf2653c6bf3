"""``reshard`` and moves one after the other, and what other commands say of the result."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.layout import COMMITS, RESHARD_PLAN, RUN, SHARES, last_chunk_file, rank_folder
from datatrove_ckpt.checkpoint.resharding import ReshardPlan
from datatrove_ckpt.errors import CheckpointCorrupt, CkptError
from datatrove_ckpt.maintenance import verify
from datatrove_ckpt.preflight.before_run import check_before_run, check_job
from datatrove_ckpt.preflight.run_plan import RunPlan
from tests.commands import Command
from tests.kept import edit

from .test_reshard import Job, answers, job, mirrored, server, some

__all__ = ["answers", "job", "server"]  # fixtures


def elsewhere(job: Job, *parts: str) -> Job:
    """The same job in other folders, with these parts of this one."""
    other = Job(job.folder.with_name("elsewhere"), job.server, job.answers, job.kind)
    other.ids, other.input = job.ids, job.input
    for part in parts:
        shutil.copytree(job.folder / part, other.folder / part)
    return other


@pytest.mark.slow
def test_status_says_how_a_half_done_reshard_goes_on(job: Job, command: Command) -> None:
    job.stop_in_the_middle(4, some(job, 10))
    plan = job.checkpoints / RESHARD_PLAN
    plan.parent.mkdir()
    plan.write_bytes(ReshardPlan(4, 2, 1).to_json())
    printed = command("status", job.checkpoints).out
    assert f"was interrupted while it changed {job.checkpoints} from 4 to 2 tasks. Run it again (--tasks 2)" in printed
    assert "To resume" not in printed


# what people do to the folders of a run between a move and the next start --------------------------------------------


def dealt_out_anew(job: Job, before: int, tasks: int, seed: int = 3) -> None:
    """Stopped in the middle, saved beside its folder, and dealt out anew."""
    job.stop_in_the_middle(before, some(job, seed))
    shutil.copytree(job.checkpoints, job.folder / "backup")
    job.reshard(before, tasks)


def restore(job: Job, *ranks: int) -> None:
    for rank in ranks:
        shutil.rmtree(rank_folder(job.checkpoints, rank))
        shutil.copytree(rank_folder(job.folder / "backup", rank), rank_folder(job.checkpoints, rank))


def output_of(job: Job, rank: int) -> list[Path]:
    return sorted((job.folder / "output").glob(f"{rank:05d}_*"))


def move_away(job: Job, rank: int) -> None:
    """As the message says: the folder of a task, and its output files."""
    shutil.rmtree(rank_folder(job.checkpoints, rank), ignore_errors=True)
    for path in output_of(job, rank):
        path.unlink()


def problems(job: Job) -> list[str]:
    return [str(one) for one in verify.verify(job.checkpoints, None, True, str(job.checkpoints)).problems]


def run_rank(job: Job, rank: int, tasks: int) -> None:
    """As a task on Slurm: nobody looks at the other tasks."""
    reader, step = job.executor(tasks).pipeline
    step(reader(None, rank, tasks), rank, tasks)


@pytest.mark.matrix
@pytest.mark.parametrize(("numbers", "rank"), [((4, 2), 3), ((1, 4), 0)], ids=str)
def test_a_folder_of_before_reshard_is_refused_and_can_be_made_again(
    job: Job, numbers: tuple[int, int], rank: int
) -> None:
    """What it had not committed may be another task's since."""
    before, tasks = numbers
    dealt_out_anew(job, before, tasks)
    restore(job, rank)
    said = f"{rank:05d} is of before `datatrove-ckpt reshard` dealt the input out anew"
    for number in {before, tasks}:
        with pytest.raises(CkptError, match=said):
            job.executor(number).run()
    assert any(said in problem for problem in problems(job))
    with pytest.raises(CkptError, match=said):
        job.reshard(tasks, tasks + 1)
    if rank < tasks:
        with pytest.raises(CkptError, match=said):
            run_rank(job, rank, before)
    move_away(job, rank)
    if rank >= tasks:
        job.reshard(tasks, tasks)
    job.executor(tasks).run()
    job.check_finished()


@pytest.mark.slow
@pytest.mark.parametrize("older", [False, True], ids=["missing", "older"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_shares_that_are_not_those_of_the_ranks_are_refused_whoever_starts(job: Job, when: str, older: bool) -> None:
    """Also where all tasks are complete, so that none of them reads its share."""
    dealt_out_anew(job, 4, 2)
    path = job.checkpoints / SHARES
    old = path.read_bytes()
    job.stop_in_the_middle(2, some(job, 5))
    job.reshard(2, 3)
    if when == "after":
        job.finish(3)
    now = path.read_bytes()
    path.unlink()
    if older:
        path.write_bytes(old)
    said = r"shares\.json is (missing|older \(number 1\)), so it is not known what each rank reads"
    starts: list[Callable[[], object]] = [
        lambda: job.executor(3).run(),
        lambda: job.executor(2).run(),
        lambda: check_job(RunPlan(job.executor(3))),
        lambda: job.reshard(3, 4),
    ]
    for start in starts:
        with pytest.raises(CkptError, match=said):
            start()
    [problem] = problems(job)
    assert re.search(said, problem)
    path.write_bytes(now)
    job.finish(3)


@pytest.mark.matrix
@pytest.mark.parametrize("output", [False, True], ids=["", "with its output"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_task_that_runs_no_more_is_missed(job: Job, when: str, output: bool) -> None:
    """Nobody reads its documents again, so without its commits nothing shows that they are in the output."""
    dealt_out_anew(job, 4, 2)
    if when == "after":
        job.finish(2)
    gone = [path.rename(job.folder / path.name) for path in output_of(job, 3) if output]
    assert output_of(job, 3) or output
    rank_folder(job.checkpoints, 3).rename(job.folder / "00003")
    last_chunk_file(job.checkpoints, 3).unlink()
    with pytest.raises(CkptError, match=r"00003 is missing: it holds the commits of task 3"):
        job.executor(2).run()
    assert any("00003 is missing" in problem for problem in problems(job))
    if not output:
        with pytest.raises(CkptError, match="00003 is missing"):
            job.reshard(2, 3)
    for path in gone:
        path.rename(job.folder / "output" / path.name)
    (job.folder / "00003").rename(rank_folder(job.checkpoints, 3))
    job.executor(2).run()
    job.check_finished()


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [1, 4])
def test_a_task_that_is_gone_for_good_is_dealt_out_again(job: Job, tasks: int) -> None:
    dealt_out_anew(job, 4, 2)
    move_away(job, 3)
    last_chunk_file(job.checkpoints, 3).unlink()
    job.reshard(2, tasks)
    job.executor(tasks).run()
    job.check_finished()


@pytest.mark.slow
def test_a_copy_that_lacks_a_task_that_runs_no_more_is_refused(job: Job) -> None:
    dealt_out_anew(job, 4, 2)
    other = elsewhere(job, "checkpoints", "output")
    move_away(other, 3)
    last_chunk_file(other.checkpoints, 3).unlink()
    with pytest.raises(CkptError, match="00003 is missing"):
        other.executor(2).run()
    for part in ("checkpoints", "output"):
        shutil.copytree(job.folder / part, other.folder / part, dirs_exist_ok=True)
    shutil.rmtree(job.checkpoints)
    shutil.rmtree(job.folder / "output")
    other.executor(2).run()
    other.check_finished()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("when", "part"), [("middle", ""), ("middle", SHARES), ("after", "00000"), ("after", "00003")], ids=str
)
def test_what_a_node_has_of_before_reshard_is_replaced_by_what_the_mirror_has(job: Job, when: str, part: str) -> None:
    dealt_out_anew(job, 4, 2)
    shutil.rmtree(job.folder / "backup")
    job.stop_in_the_middle(2, some(job, 5))
    shutil.copytree(job.checkpoints, job.folder / "backup")
    job.reshard(2, 3)
    job.changes = mirrored(job)
    check_before_run(job.executor(3))  # uploads what runs no more
    job.stop_in_the_middle(3, some(job, 7))
    if when == "after":
        job.finish(3)
    path, old = job.checkpoints / part, job.folder / "backup" / part
    if path.is_dir():
        shutil.rmtree(path)
        shutil.copytree(old, path)
    else:
        shutil.copy(old, path)
    with pytest.raises(CkptError, match="tasks: 3 -> 2"):
        job.executor(2).run()
    job.executor(3).run()
    job.check_finished()


@pytest.mark.slow
@pytest.mark.parametrize("name", [RUN, COMMITS])
def test_damage_that_is_found_before_the_ranks_start_names_the_mirror(job: Job, name: str) -> None:
    job.changes = mirrored(job)
    job.stop_in_the_middle(2, some(job, 3))
    path = job.checkpoints / "00001" / name
    path.write_bytes(b"x\n" + path.read_bytes())
    with pytest.raises(CheckpointCorrupt, match=rf"The mirror \S+/00001 has this task .*\(mv {path.parent} "):
        check_before_run(job.executor(2))


@pytest.mark.slow
def test_what_was_finished_before_there_was_a_mirror_outlives_the_node(job: Job) -> None:
    """Also if the first upload of a task was killed after its empty first version."""
    job.write_input((3, 2, 4))
    executor = job.executor(3)
    for rank in (0, 1):
        executor._run_for_rank(rank)
    job.changes = mirrored(job)
    check_before_run(job.executor(3))
    first, *others = sorted((job.folder / "mirror/00001").glob("generation-*"))
    for path in others:
        path.unlink()
    assert first.name.startswith("generation-00000001-")
    check_before_run(job.executor(3))
    asked = job.server.asked.copy()
    job.stop_in_the_middle(3, {"text 2-3"}, ranks=[2])
    shutil.rmtree(job.checkpoints)
    job.executor(3).run()
    assert {question: job.server.asked[question] for question in asked} == asked
    job.check_finished()


@pytest.mark.slow
def test_edited_shares_are_a_problem_of_verify(job: Job) -> None:
    dealt_out_anew(job, 4, 2)
    edit(job.checkpoints / SHARES, ranks={})
    assert any("the shares hold 0 files, not the 5 of the input" in problem for problem in problems(job))
