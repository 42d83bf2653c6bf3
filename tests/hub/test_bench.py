"""The benchmark of 100 ranks, with four: every file is on the hub once, whatever the hub does, within its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.hub import COMMITS_PER_HOUR, Plan, simulate

SMALL = Plan(ranks=4, chunks=5, chunk_seconds=6.0, commit_seconds=30.0, faults=3)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # eight seconds on a quiet machine; its pauses are real
def test_four_ranks_at_once(tmp_path: Path) -> None:
    tally = simulate("ours", SMALL, tmp_path)
    assert tally.errors == ()
    assert (tally.files, tally.complete, tally.missing, tally.twice) == (20, 4, 0, 0)
    assert (tally.failed, tally.leftovers, tally.committed_twice) == (0, 0, 0)
    assert 4 <= tally.commits <= 20
    assert tally.commits_of_worst_hour < COMMITS_PER_HOUR
    assert tally.requests_of_worst_5_minutes < 1000
