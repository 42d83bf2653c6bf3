"""A crash at every effect of a job, and at every effect of every recovery, ends in the same bytes."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from datatrove.pipeline.writers import ParquetWriter

from datatrove_ckpt.checkpoint import storage
from datatrove_ckpt.checkpoint.commits import CommitLog
from datatrove_ckpt.checkpoint.journal import ChunkJournal
from datatrove_ckpt.testing import FakeServer, assert_same_output_after_crash
from tests.jobs import documents, runner, writer


@pytest.fixture(autouse=True)
def _every_write_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage thread takes items one by one, so that there is a crash point between any two of them."""
    monkeypatch.setattr(storage, "MAX_GROUP", 1)


@pytest.fixture
def folder(ram: Path) -> Path:
    (ram / "job").mkdir()
    return ram / "job"


def slow_start(payload: dict, times: int) -> float:
    """The first document comes last, so later chunks are committed before the first one."""
    return 0.003 if payload["messages"][-1]["content"] == "text 0" else 0.0


def answered(folder: Path) -> Counter[str]:
    """What is on disk as answered: cache, journals and commits of documents whose text is their ordinal."""
    rank = folder / "checkpoints" / "00000"
    found: set[int] = set()
    if (rank / "commits.jsonl").exists():
        for commit in CommitLog(rank / "commits.jsonl").commits.values():
            found.update(range(commit.first_ordinal, commit.next_ordinal))
    for path in rank.glob("chunk_*.jsonl"):
        found.update(ChunkJournal(path, 0).recovered)
    if (rank / "replay.sqlite3").exists():
        with sqlite3.connect(rank / "replay.sqlite3") as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'request_cache'").fetchall()
            if tables:
                found.update(row[0] for row in connection.execute("SELECT ordinal FROM request_cache"))
        connection.close()
    return Counter(f"text {ordinal}" for ordinal in found)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
@pytest.mark.parametrize("number", [3, pytest.param(5, marks=pytest.mark.full)])
def test_output_is_the_same_after_a_crash_at_every_effect_of_every_recovery(
    folder: Path, number: int, torn: bool
) -> None:
    with FakeServer(delay=slow_start) as server:

        def life(folder: Path) -> None:
            runner(folder, server).run(documents(number))

        report = assert_same_output_after_crash(life, folder, torn=torn)
    print(f"{len(report.points)} crash points, {len(report.states)} states, {report.lives} lives")
    # The proof is worth what it covers: each step of the commit order must have been crashed at.
    for step in (
        "sync chunk_",
        "write 00000_chunk_",
        "rename 00000_chunk_",
        "write commits",
        "remove chunk_",
        "commit",
    ):
        assert any(point.startswith(step) for point in report.points), step


@pytest.mark.timeout(200)
def test_what_was_on_disk_as_answered_is_never_asked_for_again(folder: Path) -> None:
    with FakeServer(delay=slow_start) as server:
        kept: Counter[str] = Counter()

        def life(folder: Path) -> None:
            server.asked.clear()
            runner(folder, server).run(documents(5))
            assert not kept & server.asked, "asked again for what was on disk"
            kept.clear()

        def after_crash(folder: Path) -> None:
            kept.update(answered(folder))

        assert_same_output_after_crash(life, folder, recoveries=False, after_crash=after_crash)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["gzip", "zstd", "parquet"])
def test_compressed_and_columnar_output_is_the_same_after_a_crash_at_every_effect(folder: Path, kind: str) -> None:
    with FakeServer(delay=slow_start) as server:

        def life(folder: Path) -> None:
            output = (
                ParquetWriter(str(folder / "output"), "${rank}_chunk_${chunk_index}.parquet")
                if kind == "parquet"
                else writer(folder, compression=kind)
            )
            runner(folder, server, output_writer=output).run(documents(5))

        assert_same_output_after_crash(life, folder, recoveries=False, torn=True)
