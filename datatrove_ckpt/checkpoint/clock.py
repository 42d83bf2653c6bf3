"""The clocks of a rank, which tests stop."""

import math
import time

from datatrove_ckpt.common.counts import Seconds

# ``tests/crashes.py`` replaces these two, so that no time passes.
_monotonic = time.monotonic
_wall = time.time


def unix_seconds() -> float:
    """Returns the time of the wall clock, which may jump."""
    return round(_wall(), 3)


class RankClock:
    def __init__(self, earlier: Seconds) -> None:
        self._earlier = earlier
        self._started = _monotonic()
        self._serving = math.inf

    def serving(self) -> None:
        self._serving = min(self._serving, _monotonic())

    def now(self) -> Seconds:
        now = _monotonic()
        inference, total = self._earlier
        return Seconds(
            round(inference + max(0.0, now - self._serving), 3),
            round(total + now - self._started, 3),
        )
