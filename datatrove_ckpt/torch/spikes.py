"""LossSpikes: notices a loss that is not like those before."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, pstdev


class LossSpikes:
    """Says when a loss is not like those before. It only advises: ``rollback`` is the caller's decision.

    Args:
        window: with how many losses before it is compared.
        deviations: so many standard deviations above their mean are a spike.
    """

    def __init__(self, window: int = 100, deviations: float = 6.0) -> None:
        self._losses: deque[float] = deque(maxlen=window)
        self._deviations = deviations

    def add(self, loss: float) -> str:
        """What is wrong with this loss; "" if nothing is. A spike is not part of the window."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(self._losses) >= min(10, self._losses.maxlen or 1):
            mean, deviation = fmean(self._losses), pstdev(self._losses)
            if loss > mean + self._deviations * max(deviation, 1e-3 * abs(mean)):
                return f"the loss {loss:.4g} is far above {mean:.4g}, the mean of the last {len(self._losses)}"
        self._losses.append(loss)
        return ""
