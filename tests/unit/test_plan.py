"""Daly's interval between two saves, against his paper, and durations with units."""

import math

import pytest

from datatrove_ckpt.torch.policies import daly

HOUR = 3600.0


def efficiency(interval, cost, mtbf):
    """Useful time divided by all time, as in Daly 2006: saves may also be interrupted."""
    return interval / (mtbf * math.expm1((interval + cost) / mtbf))


def test_the_formula_gives_what_a_calculator_gives():
    assert daly(60, 24 * HOUR) == pytest.approx(3180.06, abs=0.01)
    assert daly(3 * HOUR, HOUR) == HOUR


@pytest.mark.parametrize("cost", [1.0, 140.0, 0.2 * HOUR])
def test_dalys_interval_is_the_most_efficient(cost):
    best = daly(cost, 6 * HOUR)
    scanned = [best * 1.001**step for step in range(-700, 700)]
    most = max(scanned, key=lambda each: efficiency(each, cost, 6 * HOUR))
    assert most == pytest.approx(best, rel=0.01)
