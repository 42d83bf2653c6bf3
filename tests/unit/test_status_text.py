"""What ``status`` prints: figures, bars."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_records import InputPosition
from datatrove_ckpt.cli.status import describe
from datatrove_ckpt.maintenance.read_state import add_up
from datatrove_ckpt.maintenance.run_state import RankState, RunState


def uneven(left: list[int], time_left: float | None = None) -> list[str]:
    ranks = [
        RankState(
            "",
            index,
            Path(),
            "running" if rest else "finished",
            position=InputPosition(1000 - rest, 1000, "bytes"),
            time_left=time_left if rest else None,
        )
        for index, rest in enumerate(left)
    ]
    state = RunState("c", False, 1000.0, tasks=len(left), ranks=ranks, totals=add_up(ranks, 1000.0))
    return [line for line in describe(state) if "reshard" in line]


def test_few_ranks_that_hold_most_of_what_is_left_are_said() -> None:
    (line,) = uneven([0] * 37 + [900, 800, 20], time_left=3600.0)
    assert "2 of 40 ranks hold 98.8 % of what is left; dealt out to all, it would take about 1/21 of the time" in line
    assert uneven([900, 800, 700, 600]) == []
    assert uneven([900]) == []
    assert uneven([0] * 39 + [900], time_left=60.0) == [], "it ends soon anyway"
    assert uneven([0, 0]) == []


def test_dead_letters_of_unfinished_chunks_count_and_each_document_is_in_one_place() -> None:
    rank = RankState("", 0, Path(), "running", counts=DocumentCounts(10, 8, 0, 2), chunks=1)
    rank.unfinished, rank.unfinished_chunks = DocumentCounts(4, 2, 1, 1), 1
    rank.dead_letters = Counter({"ValueError: no": 2})
    lines = list(describe(RunState("c", False, 1000.0, ranks=[rank], totals=add_up([rank], 1000.0))))
    assert "  documents  14 done: 8 written in 1 chunk, 1 dropped, 3 dead, 2 in 1 unfinished chunk" in lines
    assert "  dead       3: 2 ValueError: no, 1 in unfinished chunks" in lines
