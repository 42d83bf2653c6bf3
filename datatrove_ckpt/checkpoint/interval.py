"""How long to wait between two saves: as long as the user says, or so that saving takes a set share of the time.

No fixed interval fits every disk: a sync takes 50 microseconds on one, 200 milliseconds on another. "auto" times each
save, and waits so long that the last few take ``share`` of the time; that is how CheckFreq tunes itself (Mohan,
Phanishayee and Chidambaram, FAST'21).

    interval = mean of the last RECENT durations / share, but never below shortest or above longest

The mean, because it keeps the share also when one save in a hundred takes a second; of several, because a single slow
one would make the next interval, and so what it may lose, as long as can be.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from datatrove_ckpt.errors import ConfigError

Seconds = float | Literal["auto"]
"""A setting: a number of seconds, or "auto"."""

RECENT = 5


@dataclass(frozen=True)
class Tuning:
    """What "auto" keeps to.

    Attributes:
        share: of the time that saves may take, from 0 to 1.
        shortest, longest: bounds of the interval, in seconds. They come before the share.
        first: the interval, in seconds, until a save was timed.
    """

    share: float
    shortest: float
    longest: float
    first: float

    def interval(self, durations: Sequence[float]) -> float:
        """The seconds to wait after saves that took ``durations`` seconds."""
        if not durations:
            return self.first
        recent = durations[-RECENT:]
        return min(max(sum(recent) / len(recent) / self.share, self.shortest), self.longest)


# More often than the shortest gains nothing that anyone would notice. Half a minute of answers, or ten when the node is
# gone, is more than anyone wants to lose, however slow the disk or the remote.
SYNC_TUNING = Tuning(share=0.02, shortest=0.1, longest=30.0, first=1.0)
MIRROR_TUNING = Tuning(share=0.05, shortest=5.0, longest=600.0, first=60.0)


class Interval:
    """``seconds`` to wait between two saves: what the user says."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def took(self, duration: float) -> None:
        """A save took so many seconds."""


class TunedInterval(Interval):
    """The same, after what saves take. One thread tells it; others may read."""

    def __init__(self, tuning: Tuning) -> None:
        super().__init__(tuning.first)
        self._tuning = tuning
        self._durations: deque[float] = deque(maxlen=RECENT)

    def took(self, duration: float) -> None:
        self._durations.append(duration)
        self.seconds = self._tuning.interval(list(self._durations))


def make_interval(seconds: Seconds, tuning: Tuning) -> Interval:
    """The interval that a setting stands for; ``tuning`` is for "auto"."""
    return TunedInterval(tuning) if seconds == "auto" else Interval(seconds)


def check_seconds(name: str, value: object) -> None:
    """Refuses what is no ``Seconds``.

    Raises:
        ConfigError: naming the setting.
    """
    is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    if value != "auto" and not is_valid:
        raise ConfigError(f'{name}: must be "auto" or a number of seconds >= 0; it is {value!r}.')
