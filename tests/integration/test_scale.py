"""``python -m tests.bench.scale``, small: the folders that it makes are those of a run, and its figures are tables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt.maintenance.run_check import check_output_of_run
from datatrove_ckpt.maintenance.verify import verify
from tests.bench.scale import measure, sizes
from tests.bench.scale_folders import Plan, make

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("scale")]
PLAN = Plan(ranks=4, documents=4 * 40, records_per_chunk=5, in_journal=2)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale") / "job"
    make(folder, PLAN)
    return folder


def test_the_ranks_are_in_the_middle_of_their_run_and_nothing_is_wrong_with_them(job: Path) -> None:
    report = verify(job / "checkpoints")
    assert report.problems == []
    assert [summary.state for summary in report.summaries] == ["unfinished"] * 4
    assert [summary.chunks for summary in report.summaries] == [4] * 4
    assert [summary.counts.written for summary in report.summaries] == [20] * 4
    assert [summary.journals for summary in report.summaries] == [{4: 2}] * 4
    found = {size.kind: size.files for size in sizes(job)}
    assert (found["RANK/commits.jsonl"], found["output/RANK_chunk_N.jsonl"]) == (4, 16)


def test_tools_are_measured_and_a_rank_resumes_where_it_was(job: Path) -> None:
    before = {path: path.read_bytes() for path in job.glob("checkpoints/0000[12]/*")}
    tools = ["verify", "one rank resumes, to its first request"]
    costs = measure(job, PLAN, tools)
    assert [(cost.tool, cost.code) for cost in costs] == list(zip(tools, (3, None), strict=True))
    assert all(cost.seconds > 0 and cost.cpu_seconds > 0 and cost.memory_mb > 10 for cost in costs)
    assert "Skipped 20 finished documents by seeking" in (job / "tool.log").read_text()
    assert {path: path.read_bytes() for path in job.glob("checkpoints/0000[12]/*")} == before


def test_the_folder_of_all_ranks_is_not_listed_for_each_rank(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    scandir, listdir = os.scandir, os.listdir

    def note(path: str | Path) -> bool:
        listed.extend(["it"] * (Path(path) == job / "checkpoints"))
        return True

    monkeypatch.setattr(os, "scandir", lambda path=".": note(path) and scandir(path))
    monkeypatch.setattr(os, "listdir", lambda path=".": note(path) and listdir(path))
    verify(job / "checkpoints")
    assert len(listed) <= PLAN.ranks
    listed.clear()
    writer = JsonlWriter(str(job / "output"), "${rank}_chunk_${chunk_index}.jsonl", compression=None)
    check_output_of_run(writer, job / "checkpoints", str(job / "logs"), PLAN.ranks)
    assert len(listed) <= PLAN.ranks
