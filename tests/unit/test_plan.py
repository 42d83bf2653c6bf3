"""The model behind ``plan``: the formulas against their papers, against a simulation, and on the
command line.
"""

import json
from pathlib import Path

import pytest

from datatrove_ckpt import daly, efficiency, young
from datatrove_ckpt.cli.main import parse_time

HOUR = 3600.0


def test_the_formulas_give_what_a_calculator_gives():
    assert young(60, 24 * HOUR) == pytest.approx(3219.94, abs=0.01)
    assert daly(60, 24 * HOUR) == pytest.approx(3180.06, abs=0.01)
    assert daly(3 * HOUR, HOUR) == HOUR
    assert efficiency(100, 10, 1e12) == pytest.approx(100 / 110)
    assert efficiency(1e6, 1, 60) == 0.0


@pytest.mark.parametrize("cost", [1.0, 140.0, 0.2 * HOUR])
def test_dalys_interval_is_the_most_efficient(cost):
    best = daly(cost, 6 * HOUR)
    scanned = [best * 1.001**step for step in range(-700, 700)]
    most = max(scanned, key=lambda each: efficiency(each, cost, 6 * HOUR))
    assert most == pytest.approx(best, rel=0.01)


@pytest.mark.parametrize(
    "text, seconds",
    [("6h", 21600), ("90m", 5400), ("90min", 5400), ("1.5d", 129600), ("30 s", 30), ("140", 140)],
)
def test_times_have_units(text, seconds):
    assert parse_time(text) == seconds


# training ----------------------------------------------------------------------------------------


def test_a_history_tells_what_a_training_costs_and_flags_go_before_it(
    tmp_path, monkeypatch, command
):
    """Three saves, four restarts an hour apart, and a line that a crash has cut."""
    monkeypatch.chdir(tmp_path)
    lines = [{"event": "saved", "at": 0, "pause_seconds": pause} for pause in (1.2, 1.2, 9.0)]
    lines += [{"event": "restored", "at": 1.7e9 + number * HOUR} for number in range(4)]
    lines.append({"event": "ended", "at": 0})  # others are skipped
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path("history.jsonl").write_text(f'{text}{{"event": "sav')
    measured = {"save_cost": 1.2, "mtbf": HOUR}
    assert command.json("plan", ".").items() >= measured.items()
    given = command.json("plan", tmp_path, "--mtbf", "2h", "--save-cost", "7s")
    assert (given["save_cost"], given["daly"]) == (7.0, daly(7, 2 * HOUR))


@pytest.mark.parametrize(
    "words, says",
    [
        ("", "--save-cost is missing"),
        ("--save-cost 5s", "--mtbf is missing"),
        ("job.yaml --mtbf 6h", "job.yaml/history.jsonl: there is no such file"),
        (". --mtbf 6h", "history.jsonl: there is no such file"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_one_message(
    tmp_path, monkeypatch, command, words, says
):
    monkeypatch.chdir(tmp_path)
    said = command("plan", *words.split(), code=2).err
    assert says in said
    assert said.count("\n") == 1
