"""The sums of all ranks' histories: their progress over time.

Between two lines of a history a sum grows evenly. Where no attempt ran, the rate is not known: what
a killed attempt did after its last line is in no chart.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from datatrove_ckpt.checkpoint.history_read import History

_MAX_INTERVALS = 160  # so many a screen can show


class OverTime:
    """All ranks on one time axis: how much their sums grew in each of its intervals.

    Args:
        first, last: Unix seconds.

    Attributes:
        edges: Unix seconds, ascending: where each interval starts, and where the last one ends.
    """

    def __init__(self, first: float, last: float) -> None:
        self.edges = np.linspace(first, last, int(min(_MAX_INTERVALS, last - first)) + 1)
        self._ran = np.zeros(len(self.edges) - 1)
        names = ("read", "prompt_tokens", "completion_tokens")
        self._grown = {name: np.zeros(len(self.edges) - 1) for name in names}

    def add(self, history: History, until: float | None = None) -> None:
        """Adds a rank. ``until``: the end time for an attempt that is still running."""
        spans = [[attempt.started, attempt.last_seen] for attempt in history.attempts]
        if until is not None and spans:
            spans[-1][1] = max(spans[-1][1], until)
        for start, end in spans:
            self._ran += np.clip(
                np.minimum(self.edges[1:], end) - np.maximum(self.edges[:-1], start), 0.0, None
            )
        if not history.minutes:
            return
        # A clock that was set back does no harm.
        times = np.maximum.accumulate([line.at for line in history.minutes])
        for name, grown in self._grown.items():
            values = [getattr(line.documents, name) for line in history.minutes]
            grown += np.diff(np.interp(self.edges, times, np.maximum.accumulate(values)))

    def rate(self, name: str) -> list[float | None]:
        """Returns the growth of a number of ``DocumentCounts`` per second, in each interval."""
        rates: list[float | None] = []
        for value, ran in zip(self._grown[name] / np.diff(self.edges), self._ran, strict=True):
            if ran:
                rates.append(float(value))
            else:
                rates.append(None)
        return rates


def time_axis(histories: Iterable[History], now: float | None = None) -> OverTime | None:
    attempts = [attempt for history in histories for attempt in history.attempts]
    if not attempts:
        return None
    first = min(attempt.started for attempt in attempts)
    last = max(attempt.last_seen for attempt in attempts)
    return OverTime(first, max(last, now or 0.0, first + 1.0))
