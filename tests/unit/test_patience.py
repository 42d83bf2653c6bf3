"""The clock of promises stands still while the machine is busy, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import patience
from tests.patience import Patience


class Machine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.stalled = 0.0
        self.late = 0.0  # what the kernel has not told yet
        monkeypatch.setattr(patience.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(patience.time, "sleep", self._sleep)
        monkeypatch.setattr(patience, "stalled", lambda: self.stalled)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.stalled, self.late = self.stalled + self.late, 0.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_on_a_quiet_machine_seconds_are_seconds(machine: Machine) -> None:
    clock = Patience(5)
    machine.now = 4.9
    assert not clock.over()
    machine.now = 5.1
    assert clock.over()


def test_while_the_machine_is_busy_the_clock_stands_still(machine: Machine) -> None:
    clock = Patience(5)
    machine.now, machine.stalled = 100, 96
    assert not clock.over()
    machine.now = 102
    assert clock.over()


def test_what_the_kernel_tells_late_counts(machine: Machine) -> None:
    clock = Patience(5)
    machine.now, machine.late = 6, 2
    assert not clock.over()


@pytest.mark.skipif(not patience.PRESSURE.exists(), reason="a kernel without pressure stall information")
def test_the_kernel_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience.stalled() > 0
    (tmp_path / "cpu").write_text("some avg10=0.00 avg60=8.47 avg300=47.01 total=3500000\nfull total=9000000\n")
    (tmp_path / "io").write_text("some avg10=0.00 avg60=8.47 avg300=47.01 total=1500000\n")
    monkeypatch.setattr(patience, "PRESSURE", tmp_path)
    assert patience.stalled() == 5
