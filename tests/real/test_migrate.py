"""Runs of datatrove's own runner that were killed at fifty random moments go on with ours.

    pytest tests/real/test_migrate.py -s

prints what became of each of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.datatrove_job import Datatrove
from tests.integration.test_migrate import Call, call, datatrove, folder, kill_and_go_on

__all__ = ["call", "datatrove", "folder"]  # pytest finds these fixtures here


@pytest.mark.parametrize("seed", [100, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(101, 150))])
def test_a_run_that_was_killed_goes_on(
    folder: Path, call: Call, datatrove: Datatrove, capfd: pytest.CaptureFixture[str], seed: int
) -> None:
    move = kill_and_go_on(folder, call, datatrove, seed)
    with capfd.disabled():
        print(f"seed {seed}:", ", ".join(f"{name} {value}" for name, value in move._asdict().items()))
