"""Measures how long a rank took, over all attempts.

Commits and journals hold cumulative seconds: the highest surviving number counts, and a kill loses
only the time after the last line.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple


class Seconds(NamedTuple):
    """Seconds of all attempts so far. ``inference``: with servers that were ready."""

    inference: float = 0.0
    total: float = 0.0

    def __add__(self, other: object) -> Seconds:
        if not isinstance(other, Seconds):
            return NotImplemented
        return Seconds(self.inference + other.inference, self.total + other.total)

    def or_later(self, other: Seconds) -> Seconds:
        return Seconds(max(self.inference, other.inference), max(self.total, other.total))


NO_SECONDS = Seconds()
# Two names that the ``testing`` package replaces, so that no time passes.
_monotonic = time.monotonic
_wall = time.time


def unix_seconds() -> float:
    """The wall clock: it may jump."""
    return round(_wall(), 3)


class RankClock:
    def __init__(self, earlier: Seconds = NO_SECONDS) -> None:
        self._earlier = earlier
        self._started = _monotonic()
        self._serving = math.inf

    def serving(self) -> None:
        """Starts the inference time: the servers are ready."""
        self._serving = min(self._serving, _monotonic())

    def now(self) -> Seconds:
        now = _monotonic()
        inference, total = self._earlier
        return Seconds(
            round(inference + max(0.0, now - self._serving), 3),
            round(total + now - self._started, 3),
        )
