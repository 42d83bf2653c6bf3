"""All ranks on one time axis: what each did in each interval, from the running sums in its history.

Between two lines of a history a sum is taken to grow evenly. While no attempt runs it stands still. What an attempt did
between its last line and a kill is known from the first line of the next attempt; it counts for the minute after the
last line (or for as long as between its last two lines), because the next line would have been written then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from datatrove_ckpt.maintenance.report.content import Series
from datatrove_ckpt.maintenance.report.rank_log import AttemptLog, Minute, RankLog

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
MAX_INTERVALS = 160
"""So many a screen can show."""
_MINUTE = 60.0  # from a line of the history to the next one, if none was left out
_MAX_KINDS = 6


@dataclass(frozen=True)
class Axis:
    """``edges``: Unix seconds, where the intervals start, and where the last one ends."""

    edges: Floats

    @property
    def widths(self) -> Floats:
        return np.diff(self.edges)

    def place(self, at: float) -> int:
        """The interval that a time belongs to."""
        return int(np.clip(np.searchsorted(self.edges, at, side="right") - 1, 0, len(self.edges) - 2))


def time_axis(logs: Iterable[RankLog], now: float | None = None) -> Axis | None:
    """From the first line to the last one, or to ``now``; None without lines."""
    spans = [(attempt.first_at, attempt.last_at) for log in logs for attempt in log.attempts]
    if not spans:
        return None
    first, last = min(first for first, _ in spans), max(last for _, last in spans)
    last = max(last, now or 0.0, first + 1.0)
    return Axis(np.linspace(first, last, int(min(MAX_INTERVALS, last - first)) + 1))


@dataclass
class RankTimes:
    """One rank on the axis: seconds in which it ran, and what it did, in each interval.

    ``before``: documents that were finished before its first line, by an earlier release.
    """

    before: int
    ran: Floats
    documents: Floats
    prompt_tokens: Floats
    completion_tokens: Floats
    errors: dict[str, Floats] = field(default_factory=dict)


def rank_times(log: RankLog, axis: Axis, until: float | None = None) -> RankTimes:
    """Puts one rank on the axis.

    Args:
        until: the rank's last attempt still runs, and ran until then.
    """
    times, lines = _lines(log.attempts)
    spans = [[attempt.first_at, attempt.last_at] for attempt in log.attempts]
    if until is not None and spans:
        spans[-1][1] = max(spans[-1][1], until)
    ran = np.zeros(len(axis.edges) - 1)
    for start, end in spans:
        ran += np.clip(np.minimum(axis.edges[1:], end) - np.maximum(axis.edges[:-1], start), 0.0, None)

    kinds = dict.fromkeys(kind for line in lines for kind in line.errors)
    return RankTimes(
        lines[0].documents if lines else 0,
        ran,
        _grown(axis, times, [line.documents for line in lines]),
        _grown(axis, times, [line.prompt_tokens for line in lines]),
        _grown(axis, times, [line.completion_tokens for line in lines]),
        {kind: _grown(axis, times, [line.errors.get(kind, 0) for line in lines]) for kind in kinds},
    )


def _lines(attempts: Sequence[AttemptLog]) -> tuple[list[float], list[Minute]]:
    """The progress lines, and when each of them was true."""
    times: list[float] = []
    lines: list[Minute] = []
    ended = 0.0
    for attempt in (attempt for attempt in attempts if attempt.minutes):
        minutes = attempt.minutes
        if lines:
            # What the attempt before did after its last line was done soon after that, and not in the pause.
            times.append(min(ended, minutes[0].at))
            lines.append(minutes[0])
        times += [minute.at for minute in minutes]
        lines += minutes
        step = minutes[-1].at - minutes[-2].at if len(minutes) > 1 else _MINUTE
        ended = max(attempt.last_at, minutes[-1].at + min(step, _MINUTE))
    return times, lines


def _grown(axis: Axis, times: Sequence[float], sums: Sequence[float]) -> Floats:
    """How much a running sum grew in each interval. What was there before the first line is left out."""
    if not times:
        return np.zeros(len(axis.edges) - 1)
    steady = np.maximum.accumulate(np.asarray(times, dtype=np.float64))
    rising = np.maximum.accumulate(np.asarray(sums, dtype=np.float64))
    return np.diff(np.interp(axis.edges, steady, rising))


@dataclass(frozen=True)
class Sums:
    """All ranks together."""

    documents: Series
    document_rate: Series
    tokens: list[Series]
    errors: list[Series]


def summed(axis: Axis, ranks: Sequence[RankTimes]) -> Sums:
    """The sums over all ranks. Rates are None where no rank ran."""
    nothing = np.zeros(len(axis.edges) - 1)
    ran = sum((one.ran for one in ranks), nothing) > 0
    documents = sum((one.documents for one in ranks), nothing)
    prompt = sum((one.prompt_tokens for one in ranks), nothing)
    completion = sum((one.completion_tokens for one in ranks), nothing)

    def rate(name: str, found: Floats) -> Series:
        values = found / axis.widths
        return Series(name, [float(value) if known else None for value, known in zip(values, ran, strict=True)])

    return Sums(
        Series("documents", [round(float(value)) for value in np.cumsum(documents) + sum(one.before for one in ranks)]),
        rate("documents per second", documents),
        [rate("prompt", prompt), rate("completion", completion)],
        _kinds(ranks, nothing),
    )


def _kinds(ranks: Sequence[RankTimes], nothing: Floats) -> list[Series]:
    """Errors by kind, the most frequent first, and the rest as one."""
    found: dict[str, Floats] = {}
    for rank in ranks:
        for kind, values in rank.errors.items():
            found[kind] = found.get(kind, nothing) + values
    ordered = sorted(found.items(), key=lambda item: float(item[1].sum()), reverse=True)
    series = ordered[:_MAX_KINDS]
    if rest := ordered[_MAX_KINDS:]:
        series.append((f"{len(rest)} other kinds", sum((values for _, values in rest), nothing)))
    return [Series(name, [round(float(value), 4) for value in values]) for name, values in series if values.sum() > 0]
