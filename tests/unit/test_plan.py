"""The model behind ``plan``: the formulas against their papers, against a simulation, and as a table."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from datatrove_ckpt import daly, efficiency, young
from datatrove_ckpt.checkpoint.interval import SYNC_TUNING
from datatrove_ckpt.cli.main import parse_time
from datatrove_ckpt.preflight.plan import make_table
from datatrove_ckpt.preflight.probes import Quantiles

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


COST = Quantiles(0.01, 0.008, 0.02, 25)


def test_the_table_has_the_best_interval_between_others_and_what_is_set_now() -> None:
    table = make_table("sync_seconds", COST, 6 * HOUR, 1.0, SYNC_TUNING)
    assert (round(table.young, 1), table.best, table.best_low, table.best_high) == (20.8, 21.0, 19.0, 29.0)
    notes = {row.notes: row for row in table.rows if row.notes}
    assert notes[("best",)].interval == 21.0
    assert notes[("auto",)].interval == pytest.approx(0.5)
    assert notes[("set now",)].interval == 1.0
    assert [row.interval for row in table.rows] == sorted(row.interval for row in table.rows)
    assert max(table.rows, key=lambda row: row.efficiency).notes == ("best",)
    now = notes[("set now",)]
    assert (now.overhead, now.lost_mean, now.lost_most) == pytest.approx((0.01, 0.51, 1.01))


@pytest.mark.parametrize(
    ("text", "seconds"), [("6h", 21600), ("90m", 5400), ("90min", 5400), ("1.5d", 129600), ("30 s", 30)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["6", "0h", "-1h", "6 weeks"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match="is not a duration; give a number with s, m, h or d, such as 6h"
    ):
        parse_time(text)
