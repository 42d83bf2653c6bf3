"""What a job of many ranks must not do for each of them; docs/internals/scale.md has the figures of 10,000."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.maintenance.verify import verify
from datatrove_ckpt.preflight.before_run import check_output_of_run
from datatrove_ckpt.preflight.run_plan import RunPlan
from datatrove_ckpt.testing import FakeServer
from tests.bench.ranks import make, measure
from tests.jobs import documents, runner, writer

RANKS = 6
LISTINGS = 4  # at most, whatever the number of ranks


@pytest.mark.slow
def test_the_folder_of_all_ranks_is_not_listed_for_each_rank(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(RANKS):
        runner(tmp_path, server).run(documents(3), rank, RANKS)
    checkpoints = tmp_path / "checkpoints"
    listed: list[str] = []
    scandir, listdir = os.scandir, os.listdir

    def note(path: str | Path) -> bool:
        listed.extend(["it"] * (Path(path) == checkpoints))
        return True

    monkeypatch.setattr(os, "scandir", lambda path=".": note(path) and scandir(path))
    monkeypatch.setattr(os, "listdir", lambda path=".": note(path) and listdir(path))
    assert verify(checkpoints).problems == []
    assert 0 < len(listed) <= LISTINGS
    listed.clear()
    plan = RunPlan(LocalPipelineExecutor([], RANKS, logging_dir=str(tmp_path / "logs")))
    check_output_of_run(plan, writer(tmp_path), checkpoints)
    assert 0 < len(listed) <= LISTINGS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.real_process
def test_ten_thousand_ranks_take_ten_times_as_long_as_a_thousand_and_little_memory(tmp_path: Path) -> None:
    """Four chunks each, of the 83 in docs/internals/scale.md. Quadratic work would take a hundred times as long."""
    costs = {}
    for ranks in (1_000, 10_000):
        (folder := tmp_path / str(ranks)).mkdir()
        make(folder, ranks, 4)
        costs[ranks] = {tool: measure(folder, tool, ranks) for tool in ("status", "status --json", "run")}
        shutil.rmtree(folder)
    for tool, memory in (("status", 80), ("status --json", 150), ("run", 180)):
        assert costs[10_000][tool].memory < memory, costs
        assert costs[10_000][tool].cpu < 25 * costs[1_000][tool].cpu, costs
