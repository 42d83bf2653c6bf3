"""One formula for every wait between attempts."""

import random

import pytest

from datatrove_ckpt.common import retrying


@pytest.mark.parametrize(
    "name, share",
    [("SERVER", 1.0), ("READING", 0.5), ("OPENING", 0.5), ("STORAGE", 0.5), ("HUB", 0.7)],
)
def test_what_failed_for_many_at_once_is_not_tried_again_by_all_at_one_moment(
    monkeypatch, name, share
):
    """The server that came back would fail again under the requests of all."""
    policy = getattr(retrying, name)
    for failures, whole in ((1, policy.first), (2, 2 * policy.first), (100, policy.longest)):
        monkeypatch.setattr(retrying.JITTER, "uniform", min)
        assert policy.wait(failures) == pytest.approx((1 - share) * whole)
        monkeypatch.setattr(retrying.JITTER, "uniform", max)
        assert policy.wait(failures) == whole


@pytest.mark.parametrize("name", ["READING", "STORAGE", "HUB"])
def test_a_wait_that_a_service_asks_for_is_lengthened_by_chance_and_never_cut(monkeypatch, name):
    policy = getattr(retrying, name)
    monkeypatch.setattr(retrying.JITTER, "uniform", min)
    assert policy.wait(1, 100.0) == 100.0
    monkeypatch.setattr(retrying.JITTER, "uniform", max)
    assert policy.wait(1, 100.0) == pytest.approx(110.0)


def test_waits_draw_nothing_from_the_numbers_of_rollouts():
    """Else a recorded document would have their state, and a seed of the user's other numbers."""
    state = random.getstate()
    assert retrying.SERVER.wait(3, 100.0) > 0
    assert random.getstate() == state
