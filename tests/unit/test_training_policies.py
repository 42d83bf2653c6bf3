"""Policies of a training: what each decides, alone and together."""

import math

import pytest

from datatrove_ckpt.checkpoint.training_steps import StepName
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.torch.policies import (
    Best,
    Every,
    EverySeconds,
    EverySteps,
    Last,
    Moment,
)


@pytest.mark.parametrize(
    ("policy", "moment", "due"),
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
        (EverySteps(500) | EverySeconds(60), Moment(500, seconds=1.0), True),
        (EverySteps(500) | EverySeconds(60), Moment(501, 500, 61.0), True),
        (EverySteps(500) | EverySeconds(60), Moment(501, 500, 1.0), False),
    ],
)
def test_a_save_is_due(policy, moment, due):
    assert policy.is_due(moment) is due


LOSSES = {100: 3.0, 200: 1.0, 300: math.nan, 400: 2.0, 500: None, 600: 1.0}


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Last(2), {500, 600}),
        (Last(9), {*LOSSES}),
        (Best("loss"), {200}),  # the older one of two
        (Best("loss", 2), {200, 600}),
        (Best("-loss"), {100}),
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


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (Last, (0,), "count: 0 is not a whole number >= 1"),
        (EverySteps, (0,), "steps: 0 is not a whole number >= 1"),
        (EverySeconds, (-1,), "seconds: -1 is not auto or a number"),
    ],
)
def test_mistakes_are_named(make, given, message):
    with pytest.raises(ConfigError, match=message):
        make(*given)
