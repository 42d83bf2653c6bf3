"""The benchmark of 100 ranks, with four: every file is on the hub once, whatever the hub does, within its limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.hub import COMMITS_PER_HOUR, Plan, Tally, simulate, table

SMALL = Plan(ranks=4, chunks=5, chunk_seconds=6.0, commit_seconds=30.0, faults=3)


@pytest.mark.timeout(1800)  # eight seconds on a quiet machine; its pauses are real
def test_four_ranks_at_once(tmp_path: Path) -> None:
    tally = simulate("ours", SMALL, tmp_path)
    assert tally.errors == ()
    assert (tally.files, tally.complete, tally.missing, tally.twice) == (20, 4, 0, 0)
    assert (tally.failed, tally.leftovers, tally.committed_twice) == (0, 0, 0)
    assert 4 <= tally.commits <= 20
    assert tally.commits_of_worst_hour < COMMITS_PER_HOUR
    assert tally.requests_of_worst_5_minutes < 1000


def test_the_table_of_two_systems() -> None:
    one = Tally(20, 4, 0, 0, 0, 6, 5, 130, 1, 0, (), 0, 12.3, 0.25)
    other = replace(one, files=0, complete=0, missing=1080, failed=4)
    assert table({"ours": one, "datatrove": other}, SMALL).splitlines()[:8] == [
        "| | ours | datatrove |",
        "|---|---|---|",
        "| files in the repository | 20 of 20 | 0 of 20 |",
        "| documents missing | 0 | 1,080 |",
        "| documents there twice | 0 | 0 |",
        "| files committed again | 0 | 0 |",
        "| ranks whose documents are all there | 4 of 4 | 0 of 4 |",
        "| ranks that failed or ran out of time | 0 of 4 | 4 of 4 |",
    ]
