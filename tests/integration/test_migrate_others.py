"""What ``migrate`` sees and says of datatrove's run as a whole: it is still on, or not that of CONFIG."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.preflight import file_systems
from datatrove_ckpt.preflight.migration import theirs
from datatrove_ckpt.testing import FakeServer, outputs
from tests.datatrove_job import Datatrove, write_input
from tests.integration.test_migrate import Call, call, datatrove, folder, migrate, write_yaml
from tests.integration.test_migrate_doubts import (
    CHUNK_FILE,
    DROPPED,
    LAST_CHUNK,
    chunks,
    executor_json,
    finish,
    is_left,
    job,
    left,
    redone,
    server,
)

__all__ = ["call", "datatrove", "folder", "job", "left", "server"]  # pytest finds these fixtures here

COMMAND = ("migrate", "job.yaml", "--from", "checkpoints")


# a run that is still on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoints", ["ours", "checkpoints"])
def test_a_run_of_this_host_that_waits_for_an_answer_is_refused(
    folder: Path, call: Call, datatrove: Datatrove, checkpoints: str
) -> None:
    write_input(folder, 11)
    with FakeServer(hold_after=12) as held:
        pid = datatrove.start(folder, held.url, concurrent=1)
        pidfd = os.pidfd_open(pid)
        try:
            while not is_left(folder):
                assert not select.select([pidfd], [], [], 0.01)[0], "datatrove's run has ended"
            write_yaml(folder, held.url, checkpoints)
            before = outputs(folder / "output")
            for dry in ((), ("--dry-run",)):
                code, _, error = call(*COMMAND, *dry)
                assert code == 1
                assert f"Process {pid} (python" in error
                assert f"has {folder / CHUNK_FILE.with_name('replay.sqlite3')} open" in error
            assert outputs(folder / "output") == before
            assert not (folder / checkpoints / "00000" / "run.json").exists()
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            datatrove.end()
        assert call(*COMMAND)[0] == 0


@contextmanager
def opened(path: Path, how: str) -> Iterator[int]:
    """A process has the file open."""
    command = ["sh", "-c", f'exec 3{how}"$0"; echo; read line', str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()


@pytest.mark.parametrize("name", ["output/00000_chunk_2.jsonl", CHUNK_FILE, "logs/logs/task_00000.log"])
def test_who_writes_to_a_file_of_the_run_is_named_and_who_reads_is_not(job: Path, call: Call, name: str | Path) -> None:
    (job / name).parent.mkdir(parents=True, exist_ok=True)
    (job / name).touch()
    with opened(job / name, "<"):
        assert call(*COMMAND, "--dry-run")[0] == 0
    with opened(job / name, ">>") as pid:
        code, _, error = call(*COMMAND)
        assert code == 1
        assert f"Process {pid} (sh) has {job / name} open: datatrove's run is still on" in error
    assert not (job / "ours" / "00000").exists()


def test_all_ranks_are_looked_at_again_before_the_first_is_changed(
    job: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job / LAST_CHUNK).with_name("00001.txt").write_text("")
    times = iter(range(9))
    stamp = theirs.TheirRank.stamp
    monkeypatch.setattr(theirs.TheirRank, "stamp", lambda self: next(times) if self.rank else stamp(self))
    code, _, error = call(*COMMAND, "--executor.tasks=2")
    assert (code, "datatrove's run is still on. Stop it first" in error) == (1, True)
    assert not (job / "ours" / "00000").exists()


def test_young_files_on_a_shared_file_system_are_a_warning(
    job: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "warning" not in call(*COMMAND, "--dry-run")[1]
    mounts = job / "mounts"
    mounts.write_text("server:/export / nfs4 rw,vers=4.2 0 0\n")
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)
    os.utime(job / "output" / "00000_chunk_1.jsonl")
    code, out, _ = call(*COMMAND, "--dry-run")
    assert code == 0
    assert "warning: the newest file, " in out
    assert "make sure that datatrove's run is stopped on all nodes" in out
    for path in (*job.rglob("*.jsonl"), *job.rglob("*.sqlite3*"), *job.rglob("*.txt")):
        os.utime(path, (1.7e9, 1.7e9))
    assert "warning" not in call(*COMMAND, "--dry-run")[1]


# another run than CONFIG says ----------------------------------------------------------------------------------------


def their_executor_json(job: Path, **config: Any) -> None:
    executor_json(job, rollouts_per_document=1, **config)
    path = job / "theirs" / "executor.json"
    content = json.loads(path.read_text())
    content["pipeline"][1]["metadata_key"] = "rollout_results"
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("--pipeline.1.metadata_key=other", "metadata_key: 'other', but datatrove's run had 'rollout_results'"),
        ("--pipeline.1.config.rollouts_per_document=2", "rollouts_per_document: 2, but datatrove's run had 1"),
    ],
)
def test_another_key_or_number_of_rollouts_than_executor_json_says_is_refused(
    job: Path, call: Call, change: str, says: str
) -> None:
    their_executor_json(job)
    code, _, error = call(*COMMAND, "--logging-dir", "theirs", change)
    assert (code, says in error) == (1, True)
    assert not (job / "ours" / "00000").exists()
    assert call(*COMMAND, "--logging-dir", "theirs")[0] == 0


def edit_rows(path: Path, key: str, number: int) -> None:
    """Gives each document so many results under another key."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if results := row["metadata"].pop("rollout_results", None):
            row["metadata"][key] = results * number
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_without_executor_json_the_kept_documents_tell_the_key_and_the_number_of_rollouts(
    job: Path, call: Call
) -> None:
    code, _, error = call(*COMMAND, "--pipeline.1.metadata_key=other")
    assert code == 1
    assert "metadata_key: 'other', but none of the 9 documents that datatrove's run has kept has it" in error
    for path in (*(job / "output").iterdir(), job / CHUNK_FILE):
        edit_rows(path, "rollout_results", 2)
    code, _, error = call(*COMMAND)
    assert code == 1
    assert "rollouts_per_document: 1, but datatrove's run has kept a document with 2 results" in error
    assert not (job / "ours" / "00000").exists()
    two = "--pipeline.1.config.rollouts_per_document=2"
    assert call(*COMMAND, "--dry-run", two)[0] == 0
    edit_rows(job / "output" / "00000_chunk_1.jsonl", "other", 1)
    code, out, _ = call(*COMMAND, "--dry-run", two)
    assert code == 0
    assert "warning: 3 of 9 kept documents have no 'rollout_results' in their metadata" in out


def test_it_says_what_the_kept_documents_were_made_with(job: Path, call: Call) -> None:
    code, out, _ = call(*COMMAND, "--dry-run")
    assert (code, "No file says with which model and parameters 9 kept documents were made." in out) == (0, True)
    their_executor_json(job)
    code, out, _ = call(*COMMAND, "--dry-run", "--logging-dir", "theirs")
    assert "9 kept documents were made with the model and parameters of CONFIG." in out
    secret = {"api_key": "sk-abcdefgh12345678"}
    their_executor_json(job, model_name_or_path="old", default_generation_params=secret)
    code, out, _ = call(*COMMAND, "--dry-run", "--logging-dir", "theirs")
    assert "9 kept documents were made with model_name_or_path 'old'; CONFIG has 'fake'." in out
    code, out, _ = call(*COMMAND, "--json", "--logging-dir", "theirs")
    made_with = json.loads(out)["made_with"]
    assert (made_with["documents"], made_with["same_settings"]) == (9, False)
    assert made_with["other"]["model_name_or_path"] == {"datatrove": "old", "config": "fake"}
    assert json.loads((job / "ours" / "00000" / "migrated.json").read_text())["made_with"] == made_with
    assert secret["api_key"] not in out


def test_executor_json_of_our_own_run_is_not_taken_for_datatroves(job: Path, call: Call) -> None:
    migrate(call, DROPPED)
    finish(call)
    assert (job / "logs" / "executor.json").exists()
    changes = ("--executor.tasks=2", "--pipeline.1.checkpoints_local_dir=other", "--dry-run", "--json", DROPPED)
    executor = json.loads((job / "logs" / "executor.json").read_text())
    assert executor["world_size"] == 1
    (job / "output").rename(job / "done")
    (job / "output").mkdir()
    aside = job / "ours" / "datatrove" / "output"
    for path in (job / "done" / "00000_chunk_0.jsonl", job / "done" / "00000_chunk_1.jsonl", *aside.iterdir()):
        path.rename(job / "output" / path.name)
    code, out, error = call(*COMMAND, *changes)
    assert code == 0, error
    assert "executor.json in the logging_dir is of a run of this program" in json.loads(out)["made_with"]["why"]


# what it says --------------------------------------------------------------------------------------------------------


def test_ranks_without_a_trace_are_named_with_their_output(job: Path, call: Call) -> None:
    (job / "output" / "00001_chunk_0.jsonl").write_text("{}\n")
    code, out, _ = call(*COMMAND, "--dry-run", "--executor.tasks=4", DROPPED)
    assert code == 0
    assert "no trace of ranks 1, 2, 3 (tasks=4): the next run begins with their first document" in out
    assert "but rank 1 has 1 output file, and run will refuse to write beside them: 00001_chunk_0.jsonl" in out
    code, out, _ = call(*COMMAND, "--dry-run", "--executor.tasks=4", "--json")
    assert json.loads(out)["missing_ranks"][0] == {"rank": 1, "output": ["00001_chunk_0.jsonl"]}


def test_one_rank_without_a_trace_has_its_first_document(job: Path, call: Call) -> None:
    code, out, _ = call(*COMMAND, "--dry-run", "--executor.tasks=2", DROPPED)
    assert code == 0
    assert "no trace of rank 1 (tasks=2): the next run begins with its first document" in out


def test_a_second_migrate_says_that_there_is_nothing_to_do(job: Path, call: Call) -> None:
    assert call(*COMMAND, DROPPED)[0] == 0
    code, out, _ = call(*COMMAND)
    assert code == 0
    assert out == (
        "rank 0: taken over before, or started here\n"
        "Every rank was taken over before: there is nothing to do.\n"
        "To continue: datatrove-ckpt run job.yaml\n"
    )


def test_a_document_in_a_file_of_another_chunk_is_processed_again_and_named(
    job: Path, call: Call, server: FakeServer
) -> None:
    """Its answer was paid, so it is not merely "not finished"."""
    first, second = (job / "output" / name for name in ("00000_chunk_1.jsonl", "00000_chunk_2.jsonl"))
    lines = first.read_text().splitlines(keepends=True)
    first.write_text("".join(lines[1:]))
    with second.open("a") as file:
        file.write(lines[0])
    (job / LAST_CHUNK).write_text("0")
    found = migrate(call, "--dry-run")
    why = "what datatrove has kept of it is in a file of another chunk, where it does not belong"
    assert redone(found) == {"id 4": why}
    assert chunks(found)[2]["problems"] == ["1 row of its output is of no document of this chunk, or there twice"]
    code, out, _ = call(*COMMAND)
    assert code == 0
    assert "rank 0: 1 finished chunk with 4 documents (4 written, 0 dropped) stays as it is" in out
    finish(call)
    assert server.asked["first text 4"] == 1
