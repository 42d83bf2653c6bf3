"""What ``status`` prints: figures, bars, frames that fit a terminal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_records import InputPosition
from datatrove_ckpt.cli.status import Style, cut, describe, frame
from datatrove_ckpt.maintenance.read_state import add_up
from datatrove_ckpt.maintenance.run_state import RankState, RunState

PLAIN = Style()


def run_of(number: int, troubled: int = 0) -> RunState:
    now = 1000.0
    ranks = [
        RankState("", index, Path(), "running", position=InputPosition(50, 100, "rows"), last_word=now - 5)
        for index in range(number)
    ]
    for rank in ranks[number - troubled :]:
        rank.trouble, rank.reason = "slow", "0.1 documents/s; the median of 9 ranks is 1"
    return RunState("c", False, now, newest=now - 5, ranks=ranks, totals=add_up(ranks, now))


def test_a_line_is_cut_to_the_width_of_the_terminal_but_not_in_an_escape_sequence() -> None:
    assert cut("abcdef", 3) == "abc"
    assert cut("\x1b[31mabcdef\x1b[0m", 3) == "\x1b[31mabc\x1b[0m"
    assert cut("\x1b[31mab\x1b[0m", 3) == "\x1b[31mab\x1b[0m"


def test_dead_letters_of_unfinished_chunks_count_and_each_document_is_in_one_place() -> None:
    rank = RankState("", 0, Path(), "running", counts=DocumentCounts(10, 8, 0, 2), chunks=1)
    rank.unfinished, rank.unfinished_chunks = DocumentCounts(4, 2, 1, 1), 1
    rank.dead_letters = Counter({"ValueError: no": 2})
    lines = list(describe(RunState("c", False, 1000.0, ranks=[rank], totals=add_up([rank], 1000.0))))
    assert "  documents  14 done: 8 written in 1 chunk, 1 dropped, 3 dead, 2 in 1 unfinished chunk" in lines
    assert "  dead       3: 2 ValueError: no, 1 in unfinished chunks" in lines


@pytest.mark.parametrize("height", [4, 24, 100])
@pytest.mark.parametrize("number", [1, 100])
def test_a_frame_fits_the_terminal(number: int, height: int) -> None:
    state = run_of(number, troubled=number // 2)
    lines = frame(state, 80, height, PLAIN)
    assert len(lines) == height
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1].startswith("read at ")
    if height == 24 and number == 100:
        assert any("more; --all without --watch" in line for line in lines)


def test_ranks_in_trouble_are_at_the_top_of_a_long_table_and_a_disk_that_cannot_be_read_is_said() -> None:
    assert "could not be read again: no network" in "\n".join(frame(run_of(1), 80, 24, PLAIN, "no network"))
    text = "\n".join(frame(run_of(100, troubled=1), 100, 24, PLAIN))
    assert text.index("   99  slow") < text.index("    0  running")
    assert "  rank 99: slow: 0.1 documents/s; the median of 9 ranks is 1\n" in text, "the table may have cut it"
