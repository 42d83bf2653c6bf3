"""What ``status`` prints: figures, bars."""

from collections import Counter
from pathlib import Path

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.cli.status import describe
from datatrove_ckpt.maintenance.run_state import RankState, RunState
from datatrove_ckpt.maintenance.sums import add_up


def test_dead_letters_of_unfinished_chunks_count_and_each_document_is_in_one_place():
    rank = RankState("", 0, Path(), "running", counts=DocumentCounts(10, 8, 0, 2), chunks=1)
    rank.unfinished, rank.unfinished_chunks = DocumentCounts(4, 2, 1, 1), 1
    rank.dead_letters = Counter({"ValueError: no": 2})
    lines = list(
        describe(RunState("c", False, 1000.0, ranks=[rank], totals=add_up([rank], 1000.0)))
    )
    assert (
        "  documents  14 done: 8 written in 1 chunk, 1 dropped, 3 dead, 2 in 1 unfinished chunk"
        in lines
    )
    assert "  dead       3: 2 ValueError: no; 1 in unfinished chunks" in lines
