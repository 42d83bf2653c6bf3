"""Histograms of all requests that servers answered, from those of each attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from datatrove_ckpt.checkpoint.history_records import Buckets
from datatrove_ckpt.maintenance.report.content import Histogram
from datatrove_ckpt.maintenance.report.rank_log import RankLog
from datatrove_ckpt.maintenance.report.scales import grouped

_MAX_BINS = 24
_PER_POWER = 4  # buckets for each power of two


def histograms(logs: Iterable[RankLog], requests: int) -> Iterator[Histogram]:
    """Latency, prompt tokens, completion tokens; each if there is any.

    Args:
        requests: of all documents. Those of the last minutes before a kill are in no histogram.
    """
    sums = {name: Counter[int]() for name in ("milliseconds", "prompt_tokens", "completion_tokens")}
    for spread in (attempt.spread for log in logs for attempt in log.attempts):
        if spread is not None:
            for name, counter in sums.items():
                counter.update(getattr(spread, name))
    shown = (
        ("Latency of requests", "s", sums["milliseconds"], 0.001),
        ("Prompt tokens of requests", "tokens", sums["prompt_tokens"], 1.0),
        ("Completion tokens of requests", "tokens", sums["completion_tokens"], 1.0),
    )
    for title, unit, counter, factor in shown:
        if counted := sum(counter.values()):
            note = f" of {grouped(requests)}" if counted < requests else ""
            yield Histogram(title, unit, list(_bins(counter, factor)), note)


def _bins(counter: Counter[int], factor: float) -> Iterator[tuple[float, float, int]]:
    """Neighbouring buckets are joined until there are few enough."""
    low, high = min(counter), max(counter)
    joined = next(number for number in (1, 2, _PER_POWER, 400) if (high - low) / number < _MAX_BINS)
    groups = Counter[int]()
    for bucket, count in counter.items():
        groups[(bucket - 1) // joined] += count  # bucket 0 becomes group -1
    for group in range(min(groups), max(groups) + 1):
        start = Buckets.lower(group * joined + 1) if group >= 0 else 0.0
        yield start * factor, Buckets.lower((group + 1) * joined + 1) * factor, groups[group]
