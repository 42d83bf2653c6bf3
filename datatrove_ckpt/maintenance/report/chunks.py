"""The chunks of a rank as runs of neighbours in one state, read from its files without keeping what they hold."""

from __future__ import annotations

import math
import re
from itertools import groupby
from pathlib import Path

from datatrove_ckpt.checkpoint.layout import COMMITS, journal_indices
from datatrove_ckpt.errors import CheckpointError
from datatrove_ckpt.maintenance.report.content import ChunkState

# A commit's line is long, and a report needs two numbers of it; 1,000 ranks have many of them. Whether lines are whole
# is for ``status`` to say.
_COMMIT = re.compile(rb'^[^\n]{0,40}"chunk_index":(\d{1,18}),[^\n]{0,200}?"dead":(\d{1,18}),[^\n]*\n', re.MULTILINE)


def chunk_runs(folder: Path) -> list[tuple[int, int, ChunkState]]:
    """(first, end, state) in ascending order; chunks without a file are left out."""
    states: dict[int, ChunkState] = {}
    try:
        states |= dict.fromkeys(journal_indices(folder), "open")
        states |= _committed(folder / COMMITS)
    except (CheckpointError, OSError):
        pass  # ``status`` says what is damaged; the report draws the rest
    runs: list[tuple[int, int, ChunkState]] = []
    for (state, _), run in groupby(enumerate(sorted(states)), key=lambda item: (states[item[1]], item[1] - item[0])):
        indices = [index for _, index in run]
        runs.append((indices[0], indices[-1] + 1, state))
    return runs


def _committed(path: Path) -> dict[int, ChunkState]:
    found = _COMMIT.findall(path.read_bytes()) if path.is_file() else []
    return {int(index): "dead" if int(dead) else "done" for index, dead in found}


def expected_chunks(documents: int, share: float | None, records_per_chunk: int) -> int | None:
    """How many chunks a rank will have, if its documents go on as they came; None if that is not known."""
    if not share or not documents or not records_per_chunk:
        return None
    return math.ceil(documents / share / records_per_chunk)
