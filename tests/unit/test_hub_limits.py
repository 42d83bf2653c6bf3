"""What the hub's rules mean for a job, in numbers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datatrove.io import get_datafolder
from datatrove.pipeline.writers import ParquetWriter

from datatrove_ckpt.output.hub_pace import CommitPace
from datatrove_ckpt.preflight import hub_limits
from datatrove_ckpt.preflight.hub_limits import Rate, check_commits, check_files, check_refusals, observed_rate
from datatrove_ckpt.preflight.input_checks import Sample


def test_commits_within_the_rule() -> None:
    check = check_commits("output", 3, 9, CommitPace())
    assert check.state == "ok"
    assert check.message == (
        "about 48 per hour: 3 tasks at once, a commit of each at least every 5 min (hub_commit_seconds). All together "
        "keep to 112 (hub_commits_per_hour), and to 56 before they end."
    )


def test_more_commits_than_the_job_may_make_say_how_long_files_wait() -> None:
    check = check_commits("output", 100, 1000, CommitPace())
    assert check.state == "ok"
    assert "about 1600 per hour" in check.message
    assert "112 (hub_commits_per_hour), and to 56 before they end, so a file waits about 1.8 h for its" in check.message


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(
        hub_limits, "os", SimpleNamespace(statvfs=lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
    )


@pytest.mark.parametrize(("free", "state"), [(100 << 30, "ok"), (1 << 20, "warning")])
def test_room_while_the_hub_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, state: str) -> None:
    with_free(monkeypatch, free)
    sample = Sample(number=10, mean=2048)
    check = check_refusals("checkpoints", tmp_path, sample, 4096, ranks=2, rate=Rate(26.0, "as given"))
    assert check.state == state
    # journal and staged file: document and answer; request cache: answer
    need = (2 * (2048 + 4096) + 4096) * 2 * 26 * 3600
    assert f"an hour needs up to {hub_limits.byte_size(need)}" in check.message
    assert "26 documents per second and task, as given" in check.message
    assert ("It is full after" in check.message) == (state == "warning")


def test_without_a_rate_it_says_what_each_document_per_second_needs(tmp_path: Path) -> None:
    check = check_refusals("checkpoints", tmp_path, Sample(number=10, mean=1000), 0, ranks=1, rate=Rate(None))
    assert check.state == "ok"
    assert "an hour of 1 document per second and task needs 6.9 MB" in check.message
    assert "--documents-per-second" in check.message


def stats(folder: Path, name: str, inference: Any, documents: Any) -> None:
    (folder / "stats").mkdir(exist_ok=True)
    found = {"documents": documents} | ({} if inference is None else {"inference_time": inference})
    reader = {"name": "reader", "stats": {"documents": 5}}
    (folder / "stats" / name).write_text(json.dumps([reader, {"name": "Inference", "stats": found}]))


def test_the_rate_is_that_of_finished_tasks(tmp_path: Path) -> None:
    stats(tmp_path, "00000.json", {"total": 20.0}, {"total": 300})
    stats(tmp_path, "00001.json", 10, 300)
    stats(tmp_path, "00002.json", None, 7)
    (tmp_path / "stats" / "other.json").write_text("[1]")
    assert observed_rate(get_datafolder(str(tmp_path))) == Rate(20.0, "as the stats of 2 finished tasks say")


IN_A_FOLDER = "more than 10000 in a folder. Set records_per_chunk to 3400 or more"
IN_A_REPOSITORY = "more than 100000 files in a repository. Set records_per_chunk to 2500 or more."


@pytest.mark.parametrize(
    ("template", "chunks", "records_per_chunk", "state", "says"),
    [
        ("${rank}_${chunk_index}.parquet", 3400, 100, "ok", "about 3400 files, up to 3400 in a folder."),
        ("${rank}/${chunk_index}.parquet", 34_000, 100, "ok", "about 34000 files, up to 340 in a folder."),
        ("${lang}/${rank}_${chunk_index}.parquet", 34_000, 100, "ok", "about 34000 files."),
        ("${rank}_${chunk_index}.parquet", 34_000, 1000, "warning", IN_A_FOLDER),
        ("${rank}_${chunk_index}.parquet", 34_000, 1000, "warning", "begin output_filename with ${rank}/."),
        ("${rank}/${chunk_index}.parquet", 250_000, 1000, "warning", IN_A_REPOSITORY),
    ],
)
def test_numbers_of_files(
    tmp_path: Path, template: str, chunks: int, records_per_chunk: int, state: str, says: str
) -> None:
    check = check_files("output", ParquetWriter(str(tmp_path), template), chunks, 100, records_per_chunk)
    assert check.state == state
    assert check.message == says if state == "ok" else says in check.message
