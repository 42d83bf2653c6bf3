"""The clock of promises stands still while the machine is busy, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import patience
from tests.patience import Patience


def test_the_clock_stands_still_only_while_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    now = stalled = late = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now, stalled, late
        now, stalled, late = now + seconds, stalled + late, 0.0  # what the kernel tells late counts

    monkeypatch.setattr(patience.time, "monotonic", lambda: now)
    monkeypatch.setattr(patience.time, "sleep", sleep)
    monkeypatch.setattr(patience, "stalled", lambda: stalled)
    clock = Patience(5)
    now = 4.9
    assert not clock.over()
    now, late = 6.0, 2.0
    assert not clock.over()
    now, stalled = 100.0, 96.0
    assert not clock.over()
    now = 102.0
    assert clock.over()


@pytest.mark.skipif(not patience.PRESSURE.exists(), reason="a kernel without pressure stall information")
def test_the_kernel_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience.stalled() > 0
    for name, total in (("cpu", 3_500_000), ("io", 1_500_000)):
        (tmp_path / name).write_text(f"some avg10=0.00 avg60=8.47 avg300=47.01 total={total}\nfull total=9000000\n")
    monkeypatch.setattr(patience, "PRESSURE", tmp_path)
    assert patience.stalled() == 5
