"""What datatrove's own runner left and cannot be trusted is processed again and said; other settings are refused.

One folder is made by the real runner, which is killed while it waits for an answer. Each test gets a copy of it: eleven
documents in chunks of four, of which the first ten are finished. Document 3 and document 10 have two requests; that of
document 10 which waits is the second one. Document 5 was dropped.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import select
import shutil
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.cli.yaml_config import build, load
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.preflight.migrated_rank import LACKS, Theirs
from datatrove_ckpt.preflight.migration import Migration
from datatrove_ckpt.testing import FakeServer, crash_at, outputs
from tests.commands import Command
from tests.datatrove_job import TEMPLATE, Datatrove, text_of, write_input
from tests.integration.test_migrate import datatrove, expected, migrate, write_yaml, written
from tests.patience import until

__all__ = ["datatrove"]  # pytest finds this fixture here

NUMBER = 11
DROPPED = "--lacking-are-dropped"
CHUNK_FILE = Path("checkpoints/00000/chunk_00002.jsonl")
LAST_CHUNK = Path("checkpoints/last_chunk/00000.txt")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, datatrove: Datatrove) -> Path:
    """As datatrove left it."""
    folder = tmp_path_factory.mktemp("left")
    make(folder, datatrove)
    return folder


def make(folder: Path, datatrove: Datatrove, **settings: Any) -> None:
    write_input(folder, NUMBER)
    with FakeServer(hold_after=12) as server:
        pid = datatrove.start(folder, server.url, concurrent=1, **settings)
        until(lambda: is_left(folder))
        os.kill(pid, signal.SIGKILL)
        assert datatrove.end() == -signal.SIGKILL


def is_left(folder: Path) -> bool:
    """Whether all that the server has answered is on the disk."""
    lines, database = folder / CHUNK_FILE, folder / CHUNK_FILE.with_name("replay.sqlite3")
    if not lines.exists() or lines.read_bytes().count(b"\n") < 2 or not database.exists():
        return False
    if not (folder / LAST_CHUNK).exists() or (folder / LAST_CHUNK).read_text() != "1":
        return False
    connection = sqlite3.connect(database)
    try:
        return bool(connection.execute("SELECT count(*) FROM request_cache WHERE doc_id = 'id 10'").fetchone()[0])
    except sqlite3.Error:
        return False
    finally:
        connection.close()


@pytest.fixture
def job(here: Path, left: Path, server: FakeServer) -> Path:
    """A copy of it, and the YAML file of a job that goes on with it."""
    shutil.copytree(left, here, dirs_exist_ok=True)
    write_yaml(here, server.url)
    return here


class TextWriter(DiskWriter):
    """A format that migrate does not know."""

    def __init__(self, output_folder: str, output_filename: str, compression: None) -> None:
        super().__init__(output_folder, output_filename, compression, mode="wb")

    def _write(self, document: dict[str, Any], file_handler: Any, filename: str) -> None:
        file_handler.write(document["text"].encode())


def finish(command: Command, number: int = NUMBER) -> None:
    command("run", "job.yaml")
    assert written(Path()) == expected(number)
    command("verify", "job.yaml", "--full")


def chunks(found: dict[str, Any]) -> list[dict[str, Any]]:
    (rank,) = found["ranks"]
    return list(rank["chunks"])


def redone(found: dict[str, Any]) -> dict[str, str]:
    return {one["id"]: one["why"] for chunk in chunks(found) for one in chunk["redone"]}


def test_what_is_sure_stays_as_it_is(job: Path, command: Command, server: FakeServer) -> None:
    before = outputs(job / "output")
    found = migrate(command, DROPPED)
    assert [chunk["finished"] for chunk in chunks(found)] == [True, True, False]
    assert chunks(found)[1] | {"files": []} == {
        "chunk": 1,
        "finished": True,
        "documents": 4,
        "written": 3,
        "dropped": 1,
        "files": [],
        "problems": [],
        "redone": [],
        "not_finished": [],
    }
    assert chunks(found)[2]["written"] == 2
    assert chunks(found)[2]["not_finished"] == [{"document": 10, "id": "id 10"}]
    assert found["ranks"][0]["moved_aside"] == ["00000_chunk_2.jsonl"]
    finish(command)
    assert server.asked.keys() == {key for key in server.asked if "text 10 twice" in key}
    now = outputs(job / "output")
    assert now.keys() == {"00000_chunk_0.jsonl", "00000_chunk_1.jsonl", "00000_chunk_00002.jsonl"}
    assert all(before[name] == now[name] for name in ("00000_chunk_0.jsonl", "00000_chunk_1.jsonl"))
    aside = job / "ours" / "datatrove" / "output" / "00000_chunk_2.jsonl"
    assert aside.read_bytes() == before[aside.name]
    commits = read_commits(job / "ours" / "00000" / "commits.jsonl")
    assert [commits[index].position is not None for index in range(2)] == [True, True], "a resume seeks"


def test_documents_that_a_finished_chunk_lacks_are_processed_again_and_named(
    job: Path, command: Command, server: FakeServer
) -> None:
    out = command("migrate", "job.yaml", "--from", "checkpoints", "--dry-run").out
    assert "again: document 5 'id 5': datatrove calls its chunk finished, but the chunk's output lacks it" in out
    assert f"{DROPPED} counts them as dropped" in out
    assert not (job / "ours").exists()
    migrate(command)
    finish(command)
    assert server.asked.total() == 3
    assert server.asked["first text 5 dropped"] == 1


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.slow
def test_torn_and_glued_lines_are_processed_again(job: Path, command: Command, server: FakeServer) -> None:
    first, second = (job / CHUNK_FILE).read_bytes().splitlines()
    (job / CHUNK_FILE).write_bytes(first[:-20] + second + b"\n")
    found = migrate(command, DROPPED)
    assert chunks(found)[2]["problems"] == ["chunk_00002.jsonl, line 1 is torn"]
    assert [one["id"] for one in chunks(found)[2]["not_finished"]] == ["id 8", "id 9", "id 10"]
    finish(command)
    assert server.asked.total() == 4, "of documents 8 and 9, and both of document 10"


@pytest.mark.matrix
@pytest.mark.parametrize("content", ["x", "0"])
def test_a_last_chunk_that_is_damaged_or_too_old_costs_nothing(
    job: Path, command: Command, server: FakeServer, content: str
) -> None:
    """datatrove removes a chunk's file and its answers, and only then says that the chunk is finished."""
    (job / LAST_CHUNK).write_text(content)
    found = migrate(command)
    assert [chunk["finished"] for chunk in chunks(found)] == [True, False, False]
    finish(command)
    assert server.asked["first text 5 dropped"] == 1, "nothing says that it was dropped"
    assert server.asked.total() == 3


def test_a_finished_file_that_is_cut_off_is_made_again(job: Path, command: Command, server: FakeServer) -> None:
    path = job / "output" / "00000_chunk_0.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    found = migrate(command, DROPPED)
    assert chunks(found)[0]["problems"] == ["00000_chunk_0.jsonl, line 4 is torn"]
    assert redone(found) == {"id 3": LACKS}
    finish(command)
    assert len(server.asked) == 4, "both of document 3, both of document 10"


def test_rows_that_are_there_twice_or_of_another_chunk_are_not_kept(
    job: Path, command: Command, server: FakeServer
) -> None:
    """As datatrove leaves them if records_per_chunk was changed, or two processes had one rank."""
    path = job / "output" / "00000_chunk_0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    other = (job / "output" / "00000_chunk_1.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[0], other[0]]))
    found = migrate(command, DROPPED)
    assert chunks(found)[0]["problems"] == ["rows of its output of no document of this chunk, or there twice: 2"]
    assert chunks(found)[0]["written"] == 4
    finish(command)
    assert server.asked.total() == 2


@pytest.mark.slow
def test_repeated_ids_are_told_apart_by_their_texts_and_otherwise_processed_again(
    job: Path, command: Command, server: FakeServer
) -> None:
    rows = [json.loads(line) for line in (job / "input" / "0.jsonl").read_text().splitlines()]
    rows[9]["id"] = "id 8"
    rows[10] |= {"id": "id 8", "text": "text 8"}
    (job / "input" / "0.jsonl").write_text("\n".join(map(json.dumps, rows)))
    edit(job / CHUNK_FILE, '"id":"id 9"', '"id":"id 8"')
    found = migrate(command, DROPPED)
    assert chunks(found)[2]["written"] == 2
    assert chunks(found)[2]["not_finished"] == [{"document": 10, "id": "id 8"}]
    command("run", "job.yaml")
    assert written(job)["id 8"] == 3
    assert server.asked == {"first text 8": 1}


@pytest.mark.slow
def test_a_document_whose_text_is_another_one_now_is_processed_again(
    job: Path, command: Command, server: FakeServer
) -> None:
    edit(job / "input" / "0.jsonl", '"text": "text 8"', '"text": "text 8, corrected"')
    assert redone(migrate(command, DROPPED, "--dry-run")) == {
        "id 8": "what datatrove has kept under its id has another text"
    }
    assert not redone(migrate(command, DROPPED, "--dry-run", "--any-text"))
    migrate(command, DROPPED)
    finish(command)
    assert server.asked["first text 8, corrected"] == 1


def test_another_input_is_refused_and_nothing_is_changed(job: Path, command: Command) -> None:
    before = outputs(job)
    for what, says in {
        "--pipeline.1.records_per_chunk=2": "Rank 0: only 2 of the 9 rows that datatrove's run has kept are of",
        "--pipeline.1.records_per_chunk=20": "would begin beyond its end",
        "--executor.tasks=0": "tasks",
        "--pipeline.0.limit=3": "the input has 3 documents, but datatrove's run has kept documents of chunk 2",
        "--pipeline.1.output_writer.output_folder=elsewhere": "holds none of their files, named as",
    }.items():
        refused = command("migrate", "job.yaml", "--from", "checkpoints", what, code=None)
        assert refused.code in (1, 2), what
        assert says in refused.err
    assert outputs(job) == before
    (job / LAST_CHUNK).with_name("00003.txt").write_text("0")
    error = command("migrate", "job.yaml", "--from", "checkpoints", code=1).err
    assert "holds rank 3: datatrove's run had more. Set tasks" in error
    for place, says in {"nowhere": "is not a folder", "input": "holds no checkpoint of datatrove's own"}.items():
        error = command("migrate", "job.yaml", "--from", place, code=2).err
        assert says in error


# answers -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damaged_database_costs_nothing(job: Path, command: Command) -> None:
    (job / CHUNK_FILE.with_name("replay.sqlite3")).write_bytes(b"no database" * 100)
    migrate(command, DROPPED)
    finish(command)


# other output --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
def test_compressed_output_stays_or_is_read_back(
    here: Path, command: Command, datatrove: Datatrove, server: FakeServer, cut: bool
) -> None:
    make(here, datatrove, template=f"{TEMPLATE}.gz", compression="gzip")
    write_yaml(here, server.url, TEMPLATE=f"{TEMPLATE}.gz", COMPRESSION="gzip")
    path = here / "output" / "00000_chunk_0.jsonl.gz"
    if cut:
        path.write_bytes(path.read_bytes()[:-6])
    found = migrate(command, DROPPED)
    assert [chunk["finished"] for chunk in chunks(found)] == [not cut, True, False]
    assert chunks(found)[0]["written"] == 4, "all its rows lie before the damage"
    command("run", "job.yaml")
    assert server.asked.total() == 2
    rows = [line for one in outputs(here / "output").values() for line in gzip.decompress(one).splitlines()]
    assert len(rows) == NUMBER - 1


@pytest.mark.slow
def test_parquet_files_stay_where_they_are_whole(
    here: Path, command: Command, datatrove: Datatrove, server: FakeServer
) -> None:
    template = TEMPLATE.replace(".jsonl", ".parquet")
    make(here, datatrove, template=template)
    write_yaml(here, server.url, TEMPLATE=template)
    edit(here / "job.yaml", "JsonlWriter", "ParquetWriter")
    edit(here / "job.yaml", ", compression: null", "")
    damaged = here / "output" / "000_00000_chunk_0.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-10])
    found = migrate(command, DROPPED)
    assert [chunk["finished"] for chunk in chunks(found)] == [False, True, False]
    assert "cannot be read to its end" in chunks(found)[0]["problems"][0]
    command("run", "job.yaml")
    command("verify", "job.yaml", "--full")
    assert server.asked.total() == 4 + 1 + 2, "the chunk that is damaged, with its second request, and document 10"
    tables = [pq.read_table(path).to_pylist() for path in (here / "output").glob("*.parquet")]
    assert Counter(row["id"] for table in tables for row in table) == expected(NUMBER)


# crashes -------------------------------------------------------------------------------------------------------------


def state(job: Path) -> dict[str, Any]:
    """What a migration has made, without times and owners."""
    rank = job / "checkpoints" / "00000"
    commits = [
        (one.chunk_index, one.counts, one.files, one.position) for one in read_commits(rank / "commits.jsonl").values()
    ]
    journals = {path.name: path.read_bytes() for path in rank.glob("chunk_*")}
    aside = outputs(job / "checkpoints" / "datatrove")
    return {"output": outputs(job / "output"), "commits": commits, "journals": journals, "aside": aside}


@pytest.mark.matrix
@pytest.mark.parametrize("step", [10, 1])
def test_a_migration_that_crashes_at_any_effect_is_finished_by_the_same_command(
    job: Path, left: Path, step: int
) -> None:
    write_yaml(job, "http://127.0.0.1:1", "checkpoints")
    executor = build(load("job.yaml"))
    migration = Migration(executor, job / "checkpoints")

    def fresh() -> None:
        for name in ("checkpoints", "output"):
            shutil.rmtree(job / name)
            shutil.copytree(left / name, job / name)

    migration.run()
    wanted = state(job)
    refused: list[bool] = []
    for number in itertools.count(step=step):
        fresh()
        with crash_at(number, job) as disk:
            migration.run()
        if disk.crashed_at is None:
            break
        os.chdir(job)  # it was made anew, as it was at the crash
        refused.append(is_refused(job, executor))
        migration.run()
        assert state(job) == wanted, disk.crashed_at
    assert number > 20
    assert all(refused[: -max(1, 6 // step)]), "at the last effects, which note that all is done, a run may go on"


def is_refused(job: Path, executor: Any) -> bool:
    """Whether a run that starts now is told to wait for migrate. It gets no input, so it would end at once."""
    before = outputs(job / "output")
    with pytest.raises(CkptError) as failed:
        executor.pipeline[1].run(iter(()), 0, 1)
    assert outputs(job / "output") == before
    return "migrate" in str(failed.value)


# datatrove's run as a whole: still on, or not that of CONFIG ----------------------------------------------------------

COMMAND = ("migrate", "job.yaml", "--from", "checkpoints")


@pytest.mark.matrix
@pytest.mark.parametrize("checkpoints", ["ours", "checkpoints"])
def test_a_run_of_this_host_that_waits_for_an_answer_is_refused(
    here: Path, command: Command, datatrove: Datatrove, checkpoints: str
) -> None:
    write_input(here, 11)
    with FakeServer(hold_after=12) as held:
        pid = datatrove.start(here, held.url, concurrent=1)
        pidfd = os.pidfd_open(pid)
        try:
            while not is_left(here):
                assert not select.select([pidfd], [], [], 0.01)[0], "datatrove's run has ended"
            write_yaml(here, held.url, checkpoints)
            before = outputs(here / "output")
            for dry in ((), ("--dry-run",)):
                error = command(*COMMAND, *dry, code=1).err
                assert f"Process {pid} has {here / CHUNK_FILE.with_name('replay.sqlite3')} open" in error
            assert outputs(here / "output") == before
            assert not (here / checkpoints / "00000" / "run.json").exists()
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            datatrove.end()
        command(*COMMAND)


@contextmanager
def opened(path: Path, how: str) -> Iterator[int]:
    """A process has the file open."""
    command = ["sh", "-c", f'exec 3{how}"$0"; echo; read line', str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid
        process.communicate()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["output/00000_chunk_2.jsonl", CHUNK_FILE, "logs/logs/task_00000.log"])
def test_who_writes_to_a_file_of_the_run_is_named_and_who_reads_is_not(
    job: Path, command: Command, name: str | Path
) -> None:
    (job / name).parent.mkdir(parents=True, exist_ok=True)
    (job / name).touch()
    with opened(job / name, "<"):
        command(*COMMAND, "--dry-run")
    with opened(job / name, ">>") as pid:
        error = command(*COMMAND, code=1).err
        assert f"Process {pid} has {job / name} open: datatrove's run is still on" in error
    assert not (job / "ours" / "00000").exists()


def test_all_ranks_are_looked_at_again_before_the_first_is_changed(
    job: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job / LAST_CHUNK).with_name("00001.txt").write_text("")
    last = Theirs.last

    def goes_on(theirs: Theirs) -> int:
        """The second task ends a chunk while the first one is read."""
        (job / LAST_CHUNK).with_name("00001.txt").write_text("?")
        return last(theirs)

    monkeypatch.setattr(Theirs, "last", goes_on)
    error = command(*COMMAND, "--executor.tasks=2", code=1).err
    assert "datatrove's run is still on. Stop it first" in error
    assert not (job / "ours" / "00000").exists()


def test_young_files_are_a_warning(job: Path, command: Command) -> None:
    for path in (*job.rglob("*.jsonl"), *job.rglob("*.sqlite3*"), *job.rglob("*.txt")):
        os.utime(path, (1.7e9, 1.7e9))
    assert "warning" not in command(*COMMAND, "--dry-run").out
    os.utime(job / "output" / "00000_chunk_1.jsonl")
    out = command(*COMMAND, "--dry-run").out
    assert "warning: the newest file is " in out
    assert "make sure that datatrove's run is stopped on all nodes" in out


# another run than CONFIG says ----------------------------------------------------------------------------------------


def edit_rows(path: Path, key: str, number: int) -> None:
    """Gives each document so many results under another key."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if results := row["metadata"].pop("rollout_results", None):
            row["metadata"][key] = results * number
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_kept_documents_tell_the_key_and_the_most_results(job: Path, command: Command) -> None:
    two = "--pipeline.1.config.rollouts_per_document=2"
    out = command(*COMMAND, "--dry-run", two).out
    assert "warning: rollouts_per_document is 2, but no kept document has more than 1 result" in out
    error = command(*COMMAND, "--pipeline.1.metadata_key=other", code=1).err
    assert "metadata_key: 'other', rollouts_per_document: 1, but the document 'id 0' in" in error
    assert "has no results under that key. Set both to those of datatrove's run" in error
    for path in (*(job / "output").iterdir(), job / CHUNK_FILE):
        edit_rows(path, "rollout_results", 2)
    error = command(*COMMAND, code=1).err
    assert "has 2 results under that key" in error
    assert not (job / "ours" / "00000").exists()
    assert "warning: rollouts_per_document" not in command(*COMMAND, "--dry-run", two).out


def test_output_that_cannot_be_compared_is_refused(job: Path, command: Command) -> None:
    path = job / "output" / "00000_chunk_0.jsonl"
    path.write_text("".join(json.dumps({"text": text_of(number)}) + "\n" for number in range(4)))
    assert "00000_chunk_0.jsonl holds rows without ids" in command(*COMMAND, code=1).err
    edit(job / "job.yaml", "JsonlWriter", "tests.integration.test_migrate_doubts.TextWriter")
    assert "cannot read files of TextWriter" in command(*COMMAND, code=1).err
    assert not list((job / "ours").rglob("*.json*"))


def test_ranks_without_a_trace_are_named(job: Path, command: Command) -> None:
    out = command(*COMMAND, "--dry-run", "--executor.tasks=4", DROPPED).out
    assert "no trace of 3 ranks of 4 (the first one is rank 1): the next run begins with the first document" in out
