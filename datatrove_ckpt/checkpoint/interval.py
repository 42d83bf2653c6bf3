"""Computes the seconds between two saves: a number, or "auto", a set share of the time for saves.

No fixed interval fits every disk. "auto" times each save, as CheckFreq does (Mohan, Phanishayee and
Chidambaram, FAST'21):

interval = mean of the last RECENT durations / share, but never below shortest or above longest

The mean keeps the share even if one save in a hundred takes a second, and one slow save does not
raise the interval to the maximum.
"""

from collections import deque
from dataclasses import dataclass

from datatrove_ckpt.common.setting_types import IntervalSeconds

RECENT = 5


@dataclass(frozen=True)
class Tuning:
    """The parameters of "auto".

    Attributes:
        share: share of the time that saves may take, from 0 to 1.
        shortest, longest: bounds of the interval, in seconds. They override the share.
    """

    share: float
    shortest: float
    longest: float
    first: float


# Below ``shortest`` nothing is gained. ``longest`` bounds the loss on a slow disk: half a minute of
# answers at a power loss; ten minutes if the node is lost.
SYNC_TUNING = Tuning(share=0.02, shortest=0.1, longest=30.0, first=1.0)
MIRROR_TUNING = Tuning(share=0.05, shortest=5.0, longest=600.0, first=60.0)


class Interval:
    """Holds the ``seconds`` to wait between two saves. One thread calls ``took``; any thread may
    read ``seconds``.

    Args:
        setting: a number of seconds, which stays; "auto": ``seconds`` follows the duration of
            saves.
    """

    def __init__(self, setting: IntervalSeconds, tuning: Tuning) -> None:
        self.seconds = tuning.first if setting == "auto" else setting
        self._is_fixed = setting != "auto"
        self._tuning = tuning
        self._durations = deque[float](maxlen=RECENT)

    def took(self, duration: float) -> None:
        if self._is_fixed:
            return
        self._durations.append(duration)
        tuning = self._tuning
        best = sum(self._durations) / len(self._durations) / tuning.share
        self.seconds = min(max(best, tuning.shortest), tuning.longest)
