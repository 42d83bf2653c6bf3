"""``reshard``: another number of tasks in the middle of a run. Every document once, and nothing that is saved again."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from datatrove.data import Document
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.intents import Intents
from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.checkpoint.layout import LOCK, RESHARD_PLAN, SHARES
from datatrove_ckpt.checkpoint.lines import read_lines
from datatrove_ckpt.errors import CheckpointLocked, CheckpointMismatch, CkptError, ConfigError
from datatrove_ckpt.maintenance import verify
from datatrove_ckpt.maintenance.repair import carry_out, make_plan
from datatrove_ckpt.preflight.before_run import check_before_run, check_job
from datatrove_ckpt.preflight.input_checks import check_inputs_unchanged
from datatrove_ckpt.preflight.reshard.run import Resharded, reshard
from datatrove_ckpt.preflight.run_plan import RunPlan
from datatrove_ckpt.readers import IpcReader, JsonlReader, ParquetReader
from datatrove_ckpt.testing import FakeServer
from datatrove_ckpt.testing.disks import CrashingDisk, SimulatedCrash, copy_tree, disk_in_place
from tests.jobs import STOPS_SOON, runner
from tests.jobs import ids as found_ids
from tests.kept import content_of
from tests.mirrors import ask_twice

SIZES = (9, 1, 0, 14, 5)
READERS: dict[str, Any] = {"jsonl": JsonlReader, "parquet": ParquetReader, "arrow": IpcReader}


class Answering:
    """What the server says to a question: nothing that counts, if it is refused; a 400, if it is bad."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.bad: set[str] = set()
        self.ready: Callable[[str], bool] | None = None
        """When a refused question ends its rank; None: when the rank's patience ends."""

    def status(self, payload: dict[str, Any], times: int) -> int | None:
        question = payload["messages"][-1]["content"]
        if question in self.refused:
            return 403 if self.ready is not None and self.ready(question) else 500
        return 400 if question in self.bad else None


class Job:
    """Files of several sizes, chunks of two documents, two requests each. Rank by rank, so that each can be stopped."""

    def __init__(self, folder: Path, server: FakeServer, answers: Answering, kind: str = "jsonl") -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.input = folder / "input"
        self.server = server
        self.kind = kind
        self.steps: list[Any] = []
        self.changes: dict[str, Any] = {}
        self.answers, self.bad, self._refused = answers, answers.bad, answers.refused

    def write_input(self, sizes: tuple[int, ...] = SIZES) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "input").mkdir(parents=True)
        self.ids = [f"{file}-{number}" for file, size in enumerate(sizes) for number in range(size)]
        for file, size in enumerate(sizes):
            rows = [{"id": f"{file}-{n}", "text": f"text {file}-{n}"} for n in range(size)]
            path = self.folder / "input" / f"{file}.{self.kind}"
            if self.kind == "jsonl":
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
                continue
            table = pa.Table.from_pylist(rows, pa.schema([("id", pa.string()), ("text", pa.string())]))
            if self.kind == "parquet":
                pq.write_table(table, path, row_group_size=4)
            else:
                with pa.ipc.new_file(path, table.schema) as writer:
                    writer.write_table(table, max_chunksize=4)

    def executor(self, tasks: int, **config: Any) -> LocalPipelineExecutor:
        settings = {"max_concurrent_documents": 5, "max_concurrent_generations": 5, **config}
        step = runner(self.folder, self.server, ask_twice, config=settings, **self.changes)
        reader = READERS[self.kind](str(self.input))
        logs = str(self.folder / "logs")
        return LocalPipelineExecutor([reader, *self.steps, step], tasks=tasks, workers=1, logging_dir=logs)

    def stop_in_the_middle(self, tasks: int, refused: set[str], ranks: Any = None) -> None:
        """Each rank runs until one of these documents fails."""
        self._refused.update(refused)
        for rank in range(tasks) if ranks is None else ranks:
            executor = self.executor(tasks, **({} if self.answers.ready else STOPS_SOON))
            documents: Any = None
            with suppress(Exception):
                for step in executor.pipeline:
                    documents = step(documents, rank, tasks)
        self._refused.clear()

    def reshard(self, before: int, tasks: int, dry_run: bool = False) -> Resharded:
        return reshard(self.executor(before), tasks, dry_run)

    def finish(self, tasks: int) -> None:
        """Runs to the end. Nothing that is saved may be requested again, and every document comes out once."""
        known = self.saved()
        self.server.asked.clear()
        self.executor(tasks).run()
        again = known & Counter(dict.fromkeys(self.server.asked, 1))
        assert not again, f"requested again: {sorted(again)}"
        self.check_finished()

    def check_finished(self, ids: list[str] | None = None) -> None:
        assert sorted(found_ids(self.folder)) == sorted(self.ids if ids is None else ids)
        report = verify.verify(self.checkpoints, None, True, str(self.checkpoints))
        assert [str(problem) for problem in report.problems] == []
        assert not report.unfinished

    def saved(self) -> Counter[str]:
        """The questions whose answers are on the disk, as far as a run may use them."""
        found: set[str] = set()
        for folder in self.checkpoints.glob("[0-9]*"):
            if not folder.is_dir():
                continue
            finished = [
                Finished.from_body(line.body).document for p in folder.glob("chunk_*") for line in read_lines(p)
            ]
            if (folder / "commits.jsonl").exists():
                names = [file.path for one in read_commits(folder / "commits.jsonl").values() for file in one.files]
                for name in names:
                    finished += (self.folder / "output" / name).read_bytes().splitlines()
            for text in (json.loads(document)["text"] for document in finished):
                found |= {text, f"{text} again"}
            if (folder / "replay.sqlite3").exists():
                with sqlite3.connect(folder / "replay.sqlite3") as connection:
                    rows = Counter(row[0] for row in connection.execute("SELECT doc_id FROM request_cache"))
                connection.close()
                found |= {f"text {name}" for name in rows}
                found |= {f"text {name} again" for name, number in rows.items() if number == 2}
        return Counter(found)


@pytest.fixture(scope="module")
def answers() -> Answering:
    return Answering()


@pytest.fixture(scope="module")
def server(answers: Answering) -> Iterator[FakeServer]:
    with FakeServer(status=answers.status) as server:
        yield server


@pytest.fixture
def job(ram: Path, server: FakeServer, answers: Answering) -> Iterator[Job]:
    job = Job(ram / "job", server, answers)
    job.write_input()
    yield job
    answers.refused.clear()
    answers.bad.clear()
    answers.ready = None


def some(job: Job, seed: int) -> set[str]:
    """Questions at which ranks stop: a first or a second one, in each file."""
    chance = random.Random(seed)
    found = set()
    for _, ids in itertools.groupby(job.ids, key=lambda name: name.split("-")[0]):
        name = chance.choice(list(ids))
        found.add(f"text {name}{chance.choice(['', ' again'])}")
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("jsonl", (1, 7, 3, 3)),
        ("parquet", (2, 5, 1)),
        ("arrow", (2, 5, 1)),
    ],
    ids=str,
)
def test_every_document_once_whatever_the_numbers_of_tasks(job: Job, kind: str, numbers: tuple[int, ...]) -> None:
    job.kind = kind
    job.write_input()
    for number, (before, after) in enumerate(itertools.pairwise(numbers)):
        job.stop_in_the_middle(before, {*some(job, number), min(some(job, 0))})  # so that none is finished
        saved = job.saved()
        found = job.reshard(before, after)
        assert (found.before, found.after) == (before, after)
        assert job.saved() == saved
    job.finish(numbers[-1])


@pytest.mark.slow
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_every_document_once_whatever_happens_in_between(job: Job, seed: int) -> None:
    """Some ranks run, none, or all; files of all sizes, empty ones too; up and down, and the same number again."""
    chance = random.Random(seed)
    job.kind = chance.choice(sorted(READERS))
    sizes = [chance.choice([0, 1, 3, 9, 14]) for _ in range(chance.randrange(1, 5))]
    job.write_input((*sizes, 4))
    job.changes["records_per_chunk"] = chance.choice([1, 2, 5])
    tasks = chance.randrange(1, 5)
    job.stop_in_the_middle(tasks, some(job, seed), ranks=[chance.randrange(tasks)])
    for number in range(3):
        saved, after = job.saved(), chance.choice([1, 2, 3, 7, tasks])
        try:
            expected = job.reshard(tasks, after, dry_run=True)
        except ConfigError as done:
            assert "nothing is left to deal out" in str(done)
            break
        assert (job.saved(), (job.checkpoints / RESHARD_PLAN).exists()) == (saved, False)
        assert job.reshard(tasks, after) == expected
        assert job.saved() == saved
        tasks = after
        ranks = chance.sample(range(tasks), chance.choice([0, 1, 1, tasks]) if tasks < 4 else chance.randrange(3))
        job.stop_in_the_middle(tasks, some(job, 10 * seed + number), ranks=ranks)
    job.finish(tasks)


@pytest.mark.slow
def test_the_input_of_tasks_that_there_are_no_more_is_compared(job: Job) -> None:
    """Of a task that was finished, of the files that a task had read to their end, and of one that did not start."""
    job.write_input((3, 3, 4, 3, 3, 4, 3, 3, 4))
    job.stop_in_the_middle(8, {"text 0-2", "text 8-3"}, ranks=[*range(7)])
    job.reshard(8, 4)
    for numbers in ((4, 5, 6), range(9)):
        for number in numbers:
            path = job.input / f"{number}.jsonl"
            kept = path.read_bytes()
            path.write_bytes(kept + b'{"id": "new", "text": "text new"}\n')
            with pytest.raises(CheckpointMismatch, match=rf"changed: '{number}\.jsonl'"):
                check_before_run(job.executor(4))
            path.write_bytes(kept)
        job.executor(4).run()
        assert check_inputs_unchanged(RunPlan(job.executor(4))) == 9
    job.check_finished()


@pytest.mark.slow
def test_the_input_is_listed_once_and_not_once_for_each_task(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.stop_in_the_middle(5, some(job, 14))
    listed: list[int] = []
    original = JsonlReader._list_files

    def counted(reader: JsonlReader, rank: int, world_size: int) -> list[str] | None:
        listed.append(rank)
        return original(reader, rank, world_size)

    monkeypatch.setattr(JsonlReader, "_list_files", counted)
    job.reshard(5, 6)
    assert len(listed) == 1
    monkeypatch.undo()
    job.finish(6)


def test_a_running_rank_is_refused(job: Job) -> None:
    job.stop_in_the_middle(2, some(job, 4))
    lock = files.Lock(job.checkpoints / "00001" / LOCK)
    with pytest.raises(CheckpointLocked, match="00001"):
        job.reshard(2, 3)
    lock.release()


def test_afterwards_only_the_new_number_of_tasks_runs_on_the_same_files_with_its_shares(job: Job) -> None:
    job.stop_in_the_middle(2, some(job, 5))
    job.reshard(2, 3)
    with pytest.raises(CheckpointMismatch, match="tasks: 3 -> 2"):
        job.executor(2).run()
    late = job.input / "9.jsonl"
    late.write_text('{"id": "late", "text": "late"}\n')
    with pytest.raises(CheckpointMismatch, match="files were added, removed or renamed since"):
        job.executor(3).run()
    late.unlink()
    shares = (job.checkpoints / "shares.json").rename(job.folder / "shares.json")
    with pytest.raises(CheckpointMismatch, match=r"shares\.json is missing, so it is not known what each rank reads"):
        job.executor(3).run()
    shares.rename(job.checkpoints / "shares.json")
    job.finish(3)


def without_threes(documents: Iterator[Document], rank: int, world_size: int) -> Iterator[Document]:
    for document in documents:
        if not document.id.endswith("-3"):
            yield document


@pytest.mark.slow
def test_steps_may_stand_between_if_their_documents_stand_for_themselves(job: Job) -> None:
    job.steps = [without_threes]
    job.stop_in_the_middle(3, some(job, 7))
    with pytest.raises(ConfigError, match="without_threes may keep something from one document to the next"):
        job.reshard(3, 2)
    job.changes = {"seek": True}
    limited = job.executor(3)
    limited.pipeline[0].limit = 5
    with pytest.raises(ConfigError, match="limit and skip of the reader count documents of each task"):
        reshard(limited, 2)
    job.reshard(3, 2)
    job.executor(2).run()
    job.check_finished([name for name in job.ids if not name.endswith("-3")])


def mirrored(job: Job, name: str = "mirror") -> dict[str, Any]:
    return {"checkpoints_remote_dir": str(job.folder / name), "mirror_seconds": 1000}


@pytest.mark.matrix
@pytest.mark.parametrize("lost", ["", SHARES], ids=["the folder", "the shares"])
def test_a_node_without_the_shares_gets_them_from_the_mirror(job: Job, lost: str) -> None:
    job.stop_in_the_middle(2, some(job, 10))
    job.reshard(2, 3)
    job.changes = mirrored(job)
    check_before_run(job.executor(3))
    job.stop_in_the_middle(3, set(), ranks=[0, 1])
    if lost:
        (job.checkpoints / lost).unlink()
    else:
        shutil.rmtree(job.checkpoints)
    job.finish(3)


@pytest.mark.matrix
@pytest.mark.parametrize("ours", [True, False], ids=["run", "datatroves executor"])
def test_the_mirror_of_before_is_refused_and_another_is_the_way_out(job: Job, ours: bool) -> None:
    job.changes = mirrored(job)
    job.stop_in_the_middle(2, some(job, 12))
    with pytest.raises(ConfigError, match="the mirror would still hold the old number of tasks"):
        job.reshard(2, 3)
    job.changes = {}
    job.reshard(2, 3)
    job.changes = mirrored(job)
    kept = state(job)
    executor = job.executor(3)
    reader, step = executor.pipeline
    with pytest.raises(CheckpointMismatch, match="mirror holds this run as it was before `datatrove-ckpt reshard`"):
        check_job(RunPlan(executor)) if ours else step(reader(None, 0, 3), 0, 3)
    assert state(job)["shares.json"] == kept["shares.json"]
    job.changes = mirrored(job, "other")
    job.stop_in_the_middle(3, some(job, 13), ranks=[1])
    job.finish(3)
    job.finish(3)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["in the middle", "at the end"])
def test_a_new_mirror_gets_what_runs_no_more_too(job: Job, lost: str) -> None:
    """Rank 0 is finished, and ranks 2 and 3 are of the number of before."""
    job.write_input((3, 8, 8, 8))
    job.stop_in_the_middle(4, {"text 1-5", "text 2-5"}, ranks=[0, 1, 2])
    job.reshard(4, 2)
    job.changes = mirrored(job)
    check_before_run(job.executor(2))  # what `run` does first
    if lost == "in the middle":
        job.stop_in_the_middle(2, {"text 3-6"})
    else:
        job.finish(2)
    done = state(job)
    shutil.rmtree(job.checkpoints)
    check_before_run(job.executor(2))
    job.executor(2).run()
    job.check_finished()
    assert state(job)["00002/commits.jsonl"] == done["00002/commits.jsonl"]
    assert lost == "in the middle" or "00000/commits.jsonl" in state(job)


@pytest.mark.slow
def test_a_chunk_of_before_that_is_lost_is_made_again(job: Job) -> None:
    job.stop_in_the_middle(2, {"text 0-5", "text 3-11"})
    job.reshard(2, 3)
    lose_a_chunk(job, "00001_chunk_00000.jsonl")
    job.executor(3).run()
    job.check_finished()


def lose_a_chunk(job: Job, name: str) -> None:
    """As people do: a file is lost, and ``repair`` has it made again."""
    (job.folder / "output" / name).unlink()
    report = verify.verify(job.checkpoints, None, True, str(job.checkpoints))
    carry_out(make_plan(report, str(job.folder / "logs")), report, str(job.folder / "logs"))


@pytest.mark.slow
def test_a_chunk_that_is_lost_of_a_task_that_there_is_no_more_is_dealt_out(job: Job) -> None:
    job.stop_in_the_middle(4, some(job, 3))
    job.reshard(4, 2)
    lost = min(path.name for path in (job.folder / "output").glob("00003_*"))
    lose_a_chunk(job, lost)
    with pytest.raises(CheckpointMismatch, match=r"task 3 are to be made again.*reshard CONFIG --tasks 2, then run"):
        check_before_run(job.executor(2))
    with pytest.raises(CheckpointMismatch, match="task 3 are to be made again"):
        job.executor(2).run()
    job.reshard(2, 2)
    job.executor(2).run()
    job.check_finished()


def test_a_document_that_a_retry_has_delivered_never_moves_to_another_task(job: Job) -> None:
    job.changes = {"on_document_error": "dead_letter"}
    job.write_input((4, 6))
    job.bad.add("text 1-1")
    job.executor(2).run()
    job.bad.clear()
    job.changes["retry_dead_letters"] = True
    job.executor(2).run()
    del job.changes["retry_dead_letters"]
    job.check_finished()
    lose_a_chunk(job, "00001_chunk_00000.jsonl")
    with pytest.raises(CheckpointMismatch, match=r"retry-00001 has delivered dead letters.*First run to the end"):
        job.reshard(2, 1)
    job.executor(2).run()
    job.check_finished()


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["output", "last_chunk"])
def test_a_task_whose_folder_is_elsewhere_is_not_dealt_out_again(job: Job, trace: str) -> None:
    job.stop_in_the_middle(4, some(job, 3))
    assert list((job.folder / "output").glob("00003_*"))
    shutil.move(job.checkpoints / "00003", job.folder / "elsewhere")
    if trace == "output":
        (job.checkpoints / "last_chunk/00003.txt").unlink()
    before = state(job)
    with pytest.raises(CkptError, match="00003" if trace == "output" else "task 3"):
        job.reshard(4, 2)
    assert state(job) == before
    shutil.move(job.folder / "elsewhere", job.checkpoints / "00003")
    job.reshard(4, 2)
    job.executor(2).run()
    job.check_finished()


@pytest.mark.matrix
@pytest.mark.parametrize("killed", [True, False], ids=["killed after the plan", ""])
def test_a_file_of_a_chunk_that_was_published_and_not_committed_goes_with_its_rank(job: Job, killed: bool) -> None:
    """A kill between the two steps of a commit. Its documents are another rank's now, which writes them."""
    job.write_input((6, 9))
    job.stop_in_the_middle(2, {"text 0-5", "text 1-7"})
    journal = min((job.checkpoints / "00001").glob("chunk_*.jsonl"))
    lines = [Finished.from_body(line.body).document for line in read_lines(journal)]
    name = f"00001_{journal.name}"
    content = b"".join(line + b"\n" for line in lines)
    (job.folder / "output" / name).write_bytes(content)
    Intents(job.checkpoints / "00001").add({name: xxhash.xxh3_128_hexdigest(content)})
    job.reshard(2, 1, dry_run=True)
    assert (job.folder / "output" / name).exists()
    if killed:
        files_before = dict(state(job))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("datatrove_ckpt.preflight.reshard.run.carry_out", lambda *_: None)
            job.reshard(2, 1)
        assert state(job).keys() > files_before.keys()
        assert (job.folder / "output" / name).exists()
    job.reshard(2, 1)
    assert not (job.folder / "output" / name).exists()
    job.finish(1)


@pytest.mark.slow
def test_a_rank_that_had_read_its_input_to_the_end_may_go(job: Job) -> None:
    job.write_input((6, 5))
    job.stop_in_the_middle(2, {"text 0-5", "text 1-3"})
    # As a kill leaves it between the last document and its commit. It tells how many documents a finished rank has.
    (job.checkpoints / "00001" / "shard.json").write_text('{"version": 1, "documents": 5}')
    job.reshard(2, 1)
    job.finish(1)


@pytest.mark.slow
def test_chunks_that_were_committed_out_of_order_keep_their_place(job: Job) -> None:
    """Rank 1 has committed later chunks, and not its first: its commits are written anew without the gap."""
    job.write_input((6, 9, 4))
    log = job.checkpoints / "00001" / "commits.jsonl"
    job.answers.ready = lambda question: "text 1" not in question or (log.exists() and bool(read_commits(log)))
    job.stop_in_the_middle(3, {"text 0-5", "text 1-0 again", "text 2-1"})
    assert 0 not in read_commits(log)
    job.reshard(3, 1)
    commits = read_commits(log)
    assert commits[0].counts.read == 0
    assert sum(commit.counts.read for commit in commits.values()) == commits[max(commits)].next_ordinal
    job.answers.ready = None
    job.stop_in_the_middle(1, {"text 2-1"})
    job.reshard(1, 3)
    job.finish(3)


def test_dead_letters_go_along_and_can_be_retried(job: Job) -> None:
    job.changes = {"on_document_error": "dead_letter", "records_per_chunk": 4}
    job.write_input((6, 7))
    refused = {f"text 0-{number}" for number in range(3, 6)} | {f"text 1-{number}" for number in range(6, 7)}
    job.bad.update({"text 0-1", "text 1-1"})
    job.stop_in_the_middle(2, refused)
    job.reshard(2, 1)
    job.executor(1).run()
    job.check_finished([name for name in job.ids if name not in ("0-1", "1-1")])
    job.bad.clear()
    job.changes["retry_dead_letters"] = True
    job.executor(1).run()
    job.check_finished()


@pytest.mark.slow
def test_dead_letters_are_retried_though_a_task_of_before_never_started(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.changes = {"on_document_error": "dead_letter"}
    job.bad.update({"text 0-1", "text 3-1"})
    job.stop_in_the_middle(4, {"text 0-7"}, ranks=[0])
    job.reshard(4, 1)
    job.executor(1).run()
    job.bad.clear()
    job.changes["retry_dead_letters"] = True
    capsys.readouterr()
    job.executor(1).run()
    job.check_finished()
    assert "there are no dead letters" not in (said := capsys.readouterr().err)
    assert "stats of the steps" not in said


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "after"), [([1, 2], 1), ([2], 2)], ids=str)
def test_a_rank_that_is_to_start_is_not_missing(job: Job, ranks: list[int], after: int) -> None:
    job.write_input((3, 2, 2))
    job.stop_in_the_middle(3, set(), ranks=ranks)
    job.reshard(3, after)
    report = verify.verify(job.checkpoints, None, True, str(job.checkpoints))
    assert [str(problem) for problem in report.problems] == []
    assert any(" not started (task" in str(one) for one in report.unfinished)
    job.finish(after)


@pytest.mark.slow
def test_a_rank_that_is_gone_is_missing_after_a_change_of_the_number_of_tasks_too(job: Job) -> None:
    job.stop_in_the_middle(2, some(job, 11))
    job.reshard(2, 3)
    job.finish(3)
    shutil.rmtree(job.checkpoints / "00002")
    report = verify.verify(job.checkpoints, None, False, str(job.checkpoints))
    assert any("is missing: its checkpoint was removed" in str(problem) for problem in report.problems)


# crashes -------------------------------------------------------------------------------------------------------------


def state(job: Job) -> dict[str, Any]:
    """What decides what ranks do next: everything but the numbers of owners."""
    found: dict[str, Any] = {}
    for path in sorted(job.checkpoints.rglob("*")):
        name = str(path.relative_to(job.checkpoints))
        if path.is_dir() or path.name in (LOCK, "history.jsonl") or "sqlite3-" in name:
            continue
        if name.startswith("reshard/") and not (job.checkpoints / RESHARD_PLAN).exists():
            continue  # what a kill has left of the folder
        if path.name == "run.json":
            found[name] = {key: value for key, value in content_of(path).items() if key != "owner"}
        elif path.name == "replay.sqlite3":
            with sqlite3.connect(path) as connection:
                columns = "chunk_index, ordinal, doc_id, rollout_idx, payload_hash, occurrence, result"
                found[name] = sorted(connection.execute(f"SELECT {columns} FROM request_cache"))
            connection.close()
        else:
            found[name] = path.read_bytes()
    return found


# Those that change what a file holds or is called. A kill before a sync leaves what one before the next effect leaves.
OF_FILES = ("create", "write", "rename", "truncate", "remove", "commit")


@pytest.mark.matrix
@pytest.mark.parametrize(("after", "step"), [(1, 6), (1, 1), (4, 1)])
def test_killed_at_each_of_its_effects_the_same_command_goes_on(job: Job, after: int, step: int) -> None:
    job.write_input((3, 1, 5))
    job.stop_in_the_middle(3, {"text 0-1 again", "text 2-3"})
    start = job.folder.with_name("start")
    copy_tree(job.folder, start)
    job.reshard(3, after)
    expected, planned = state(job), 0
    for number in itertools.count(step=step):
        copy_tree(start, job.folder)
        disk = CrashingDisk(number, job.folder, False, OF_FILES)
        with disk_in_place(disk), suppress(SimulatedCrash):
            job.reshard(3, after)
        if disk.crashed_at is None:
            break
        if (job.checkpoints / RESHARD_PLAN).exists():
            planned += 1
            if planned == 1:
                found = verify.verify(job.checkpoints, None, False, str(job.checkpoints)).problems
                assert any("was interrupted while it changed" in str(problem) for problem in found)
            with pytest.raises(CheckpointMismatch, match="was interrupted while it changed"):
                check_job(RunPlan(job.executor(after)))
        if state(job) != expected:
            job.reshard(3, after)
        assert state(job) == expected, disk.crashed_at
    assert number > 20
    assert planned * step > 5
    job.finish(after)
