"""How often a training should save: the formulas against their papers, and against a simulation."""

from __future__ import annotations

import numpy as np
import pytest

from datatrove_ckpt import daly, efficiency, young

HOUR = 3600.0


def test_the_formulas_give_what_a_calculator_gives() -> None:
    assert young(60, 24 * HOUR) == pytest.approx(3219.94, abs=0.01)
    assert daly(60, 24 * HOUR) == pytest.approx(3180.06, abs=0.01)
    assert daly(3 * HOUR, HOUR) == HOUR
    assert efficiency(100, 10, 1e12) == pytest.approx(100 / 110)
    assert efficiency(1e6, 1, 60) == 0.0


def simulated(interval: float, cost: float, mtbf: float, restart: float) -> float:
    """Useful time divided by all time, over many failures. After each, what was not saved is done again."""
    gaps = np.random.default_rng(0).exponential(mtbf, 300_000)
    saves = np.maximum(gaps - restart, 0) // (interval + cost)
    return float((saves * interval).sum() / gaps.sum())


@pytest.mark.parametrize("cost", [1.0, 140.0, 0.2 * HOUR])
@pytest.mark.parametrize("restart", [0.0, 300.0])
def test_the_efficiency_is_that_of_a_simulation_and_dalys_interval_the_best_of_a_scan(
    cost: float, restart: float
) -> None:
    mtbf = 6 * HOUR
    best = daly(cost, mtbf)
    for times in (1, 0.2, 3):
        expected = efficiency(times * best, cost, mtbf, restart)
        assert simulated(times * best, cost, mtbf, restart) == pytest.approx(expected, rel=0.02)
        assert expected <= efficiency(best, cost, mtbf, restart)
    scanned = [best * 1.001**step for step in range(-700, 700)]
    assert max(scanned, key=lambda each: efficiency(each, cost, mtbf, restart)) == pytest.approx(best, rel=0.01)
