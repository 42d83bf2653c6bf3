"""Policies of a training: what each decides, alone and together."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.torch import policies
from datatrove_ckpt.torch.policies import Last, Moment, WhenFailing
from datatrove_ckpt.torch.step_folder import StepName
from tests import golden
from tests.patience import until

LOSSES_OF_TWO = {StepName(0, 3): {"loss": 3.0}, StepName(1, 2): {"loss": 1.0}}


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


def kept(policy):
    metrics = {StepName(0, step): {"loss": loss} for step, loss in LOSSES.items()}
    return sorted(name.step for name in policy.kept(metrics))


test_saves_are_due_and_steps_are_kept = golden.shows("policies", vars(policies), globals())


def test_steps_after_a_rollback_are_newer():
    names = [StepName(0, 300), StepName(1, 100), StepName(1, 200)]
    assert Last(2).kept({name: {} for name in names}) == set(names[1:])
