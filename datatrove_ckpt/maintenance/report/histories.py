"""The sums of all ranks' histories: their progress over time.

Between two lines a sum grows evenly; without an attempt it stands still. Work between the last line
and a kill, known from the next attempt's first line, counts for the minute after the last line (or
the interval of its last two lines).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from datatrove_ckpt.checkpoint.history_read import History
from datatrove_ckpt.checkpoint.history_records import Progress

Floats = NDArray[np.float64]
_MAX_INTERVALS = 160  # so many a screen can show
_MINUTE = 60.0  # from a line of the history to the next one, if none was left out


class OverTime:
    """All ranks on one time axis: how much their sums grew in each of its intervals.

    Args:
        edges: Unix seconds, ascending: where each interval starts, and where the last one ends.
    """

    def __init__(self, edges: Floats) -> None:
        self.edges = edges
        sums = np.zeros((4, len(edges) - 1))
        self.documents, self.prompt_tokens, self.completion_tokens, self._ran = sums

    def add(self, history: History, until: float | None = None) -> None:
        """Adds a rank. ``until``: its last attempt still runs, and ran until then."""
        spans = [[attempt.started, attempt.last_seen] for attempt in history.attempts]
        if until is not None and spans:
            spans[-1][1] = max(spans[-1][1], until)
        for start, end in spans:
            self._ran += np.clip(
                np.minimum(self.edges[1:], end) - np.maximum(self.edges[:-1], start), 0.0, None
            )
        times, lines = _lines(history)
        if not lines:
            return

        def grown(value: Callable[[Progress], int]) -> Floats:
            """Left out is what was there before the first line; a clock that was set back does no
            harm.
            """
            rising = np.maximum.accumulate([float(value(line)) for line in lines])
            return np.diff(np.interp(self.edges, np.maximum.accumulate(times), rising))

        self.documents += grown(lambda line: line.documents.read)
        self.prompt_tokens += grown(lambda line: line.documents.prompt_tokens)
        self.completion_tokens += grown(lambda line: line.documents.completion_tokens)

    def rate(self, grown: Floats) -> list[float | None]:
        values = grown / np.diff(self.edges)
        return [
            float(value) if ran else None for value, ran in zip(values, self._ran > 0, strict=True)
        ]


def time_axis(histories: Iterable[History], now: float | None = None) -> OverTime | None:
    spans = [
        (attempt.started, attempt.last_seen)
        for history in histories
        for attempt in history.attempts
    ]
    if not spans:
        return None
    first = min(first for first, _ in spans)
    last = max(*(last for _, last in spans), now or 0.0, first + 1.0)
    return OverTime(np.linspace(first, last, int(min(_MAX_INTERVALS, last - first)) + 1))


def _lines(history: History) -> tuple[list[float], list[Progress]]:
    times: list[float] = []
    lines: list[Progress] = []
    last_seen = {attempt.number: attempt.last_seen for attempt in history.attempts}
    ended = 0.0
    for number, group in groupby(history.minutes, key=lambda minute: minute.attempt):
        minutes: Sequence[Progress] = list(group)
        if lines:
            # Work after the last line was done soon after it, not in the pause.
            times.append(min(ended, minutes[0].at))
            lines.append(minutes[0])
        times += [minute.at for minute in minutes]
        lines += minutes
        step = _MINUTE
        if len(minutes) > 1:
            step = minutes[-1].at - minutes[-2].at
        ended = max(last_seen[number], minutes[-1].at + min(step, _MINUTE))
    return times, lines
