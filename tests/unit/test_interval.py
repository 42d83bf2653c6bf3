"""The interval between saves: a fixed number of seconds, or one that keeps saves below a share of
the time.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datatrove_ckpt.checkpoint.interval import RECENT, Interval, Tuning

TUNING = Tuning(share=0.02, shortest=0.1, longest=30.0, first=1.0)


@pytest.mark.parametrize(
    ("durations", "seconds"),
    [
        ([], 1.0),
        ([0.01, 0.03], 1.0),
        ([9.0, *[0.01] * RECENT], 0.5),
        ([0.0], 0.1),
        ([0.2], 10.0),
        ([5.0], 30.0),
    ],
)
def test_the_rule(durations, seconds):
    interval = Interval("auto", TUNING)
    for duration in durations:
        interval.took(duration)
    assert interval.seconds == pytest.approx(seconds)


@given(st.lists(st.floats(0.002, 0.6), min_size=1, max_size=100))
def test_saves_take_no_more_than_their_share_of_the_time_whatever_each_takes(
    durations,
):
    """Except the last few saves, whose interval has not passed yet."""
    interval = Interval("auto", TUNING)
    elapsed = 0.0
    for duration in durations:
        interval.took(duration)
        elapsed += duration + interval.seconds
    assert sum(durations) <= TUNING.share * elapsed + sum(durations[-RECENT:])
