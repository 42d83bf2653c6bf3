"""The interval between saves: a fixed number of seconds, or one that keeps saves below a share of
the time.
"""

import pytest

from datatrove_ckpt.checkpoint.interval import RECENT, Interval, Tuning

TUNING = Tuning(share=0.02, shortest=0.1, longest=30.0, first=1.0)


@pytest.mark.parametrize(
    "durations, seconds",
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
