"""Policies of a training: what each decides, alone and together."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.torch.policies import (
    Best,
    Every,
    EveryEpoch,
    EverySeconds,
    EverySteps,
    Last,
    Moment,
    Overhead,
    WhenFailing,
)
from datatrove_ckpt.torch.step_folder import StepName
from tests.patience import until

LOSSES_OF_TWO = {StepName(0, 3): {"loss": 3.0}, StepName(1, 2): {"loss": 1.0}}


@pytest.mark.parametrize(
    "policy, moment, due",
    [
        (EverySteps(500), Moment(1000), True),
        (EverySteps(500), Moment(1001, 1000), False),
        (EverySteps(500), Moment(1002, 999), True),  # the loop skips numbers
        (EverySteps(500), Moment(750, 250), True),
        (EverySteps(500), Moment(500, 500), False),
        (EverySeconds(60), Moment(1, seconds=60.0), True),
        (EverySeconds(60), Moment(1, seconds=59.9), False),
        (EverySeconds(0), Moment(1), False),  # between two looks of the ranks
        (EverySeconds("auto"), Moment(1, seconds=60.0), True),  # before a save was timed
        (
            EverySeconds("auto", 3600.0),
            Moment(1, 0, 119.0, 2.0, 30.0),
            True,
        ),  # sqrt(2 * 2 * 3600) - 2
        (EverySeconds("auto", 3600.0), Moment(1, 0, 118.0, 2.0, 30.0), False),
        (
            EverySeconds("auto", 3600.0),
            Moment(1, 0, 400.0, 2.0, 500.0),
            False,
        ),  # it is still written
        (EveryEpoch(), Moment(10, epoch_ended=True), True),
        (EveryEpoch(), Moment(10, seconds=1e6), False),
        (Overhead(0.1), Moment(1, seconds=0.0, run_seconds=0.1), True),  # before a save was timed
        (Overhead(0.1), Moment(1), False),
        (Overhead(0.1), Moment(9, 1, 8.9, 1.0, stopped_seconds=1.0, run_seconds=18.9), False),
        (Overhead(0.1), Moment(9, 1, 9.0, 1.0, stopped_seconds=1.0, run_seconds=19.0), True),
        (Best("loss"), Moment(9, metrics={"loss": 2.0}), True),
        (Best("loss"), Moment(9, metrics={"loss": 2.0}, saved=LOSSES_OF_TWO), False),
        (Best("loss"), Moment(9, metrics={"loss": 1.0}, saved=LOSSES_OF_TWO), False),
        (Best("loss"), Moment(9, metrics={"loss": 0.9}, saved=LOSSES_OF_TWO), True),
        (Best("loss", lowest=False), Moment(9, metrics={"loss": 3.1}, saved=LOSSES_OF_TWO), True),
        (Best("-loss"), Moment(9, metrics={"loss": 3.0}, saved=LOSSES_OF_TWO), False),
        (Best("loss"), Moment(9, metrics={"loss": math.nan}), False),
        (Best("loss"), Moment(9, metrics={"accuracy": 1.0}), False),
        (EverySteps(500) | EverySeconds(60), Moment(500, seconds=1.0), True),
        (EverySteps(500) | EverySeconds(60), Moment(501, 500, 61.0), True),
        (EverySteps(500) | EverySeconds(60), Moment(501, 500, 1.0), False),
    ],
)
def test_a_save_is_due(policy, moment, due):
    assert policy.is_due(moment) is due


def test_a_node_whose_check_fails_saves_more_often_until_it_is_well(tmp_path):
    failing = tmp_path / "failing"
    policy = WhenFailing(f"test ! -e {failing}  # of the node", every_seconds=0.01)
    looked, between = Moment(1, seconds=0.02), Moment(1)
    assert not policy.is_due(between)
    assert not policy.is_due(looked)
    failing.touch()
    for _ in range(2):
        until(lambda: policy.is_due(looked))
        assert not policy.is_due(between)
    assert not policy.is_due(Moment(1, seconds=0.001))
    failing.unlink()
    until(lambda: not any(policy.is_due(looked) for _ in range(99)))
    policy._checks.kill()
    policy._checks.wait()


@pytest.mark.slow  # imports all of the package
def test_no_check_outlives_a_training_that_is_killed(tmp_path):
    """Its shell ends by itself."""
    script = """
import os, signal
from datatrove_ckpt.torch import Moment, WhenFailing
policy = WhenFailing("true", every_seconds=0.01)
policy.is_due(Moment(1, seconds=1.0))
print(policy._checks.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True)
    until(lambda: not Path("/proc", ended.stdout.decode().strip(), "fd").exists())


LOSSES = {100: 3.0, 200: 1.0, 300: math.nan, 400: 2.0, 500: None, 600: 1.0}


@pytest.mark.parametrize(
    "policy, kept",
    [
        (Last(2), {500, 600}),
        (Last(9), {*LOSSES}),
        (Best("loss"), {200}),  # the older one of two
        (Best("loss", 2), {200, 600}),
        (Best("-loss"), {100}),
        (Best("loss", lowest=False), {100}),
        (Best("loss", 0), set()),
        (Best("accuracy"), set()),
        (Every(300), {300, 600}),
        (Last(1) | Best("loss") | Every(400), {200, 400, 600}),
    ],
)
def test_steps_are_kept(policy, kept):
    metrics = {StepName(0, step): {"loss": loss} for step, loss in LOSSES.items()}
    assert {name.step for name in policy.kept(metrics)} == kept


def test_steps_after_a_rollback_are_newer():
    names = [StepName(0, 300), StepName(1, 100), StepName(1, 200)]
    assert Last(2).kept({name: {} for name in names}) == set(names[1:])
