"""Adds up the stats of the steps before the runner, over all attempts of a rank.

After a resume that seeks, these steps see only the remaining documents. So a saved position holds
their stats right after its document, and the next attempt adds its stats. After a resume that
counts, they see all documents again.

The last position holds the stats at the end of the input (``ended``). A retry of dead letters does
not run these steps, and reads their stats from ``shard.json``.
"""

import math
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any, SupportsFloat

from datatrove.data import Document
from datatrove.utils.stats import MetricStats, MetricStatsDict, Stats
from loguru import logger

from datatrove_ckpt.checkpoint.checksummed_lines import read_shard
from datatrove_ckpt.readers.inputs import ReaderState
from datatrove_ckpt.readers.pipeline import steps_before

STATS = "stats"


class StepStats:
    """The steps that make these documents, with stats that begin at zero, because ranks may share a
    step object.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        steps = [
            step
            for step, _, _ in steps_before(documents)
            if isinstance(getattr(step, "stats", None), Stats)
        ]
        self._steps: list[Any] = steps[::-1]
        self._earlier = [MetricStatsDict() for _ in steps]
        self._ended = False
        self._are_known = True
        for step in self._steps:
            step.stats = Stats(step.stats.name)

    def restore(self, shard: Path) -> None:
        self.resume(read_shard(shard))
        self.finish(0)

    def resume(self, state: ReaderState) -> None:
        saved = state.get(STATS)
        self._are_known = (
            saved is not None and [name for name, _ in saved["steps"]] == self._names()
        )
        if saved is not None and self._are_known:
            self._earlier = [_from_json(metrics) for _, metrics in saved["steps"]]
            self._ended = saved["ended"]
        elif self._steps:
            logger.warning(
                "The stats of the steps before InferenceRunner lack earlier attempts: an earlier "
                "release, or another pipeline, has saved them."
            )

    def at_end(self, read: int) -> ReaderState:
        """Returns the final stats for ``shard.json``; empty if they are unknown."""
        if not self._are_known:
            return {}
        return {STATS: self._state(True, self._totals(read))}

    def saved(self, ended: bool = False) -> ReaderState | None:
        """Returns the stats of all attempts so far; None if they are unknown.

        Args:
            ended: whether the input has ended.
        """
        if not self._are_known:
            return None
        return self._state(ended, self._sums())

    def _state(self, ended: bool, totals: Iterable[MetricStatsDict]) -> ReaderState:
        steps = zip(self._names(), map(_to_json, totals), strict=True)
        return {"ended": ended, "steps": list(map(list, steps))}

    def finish(self, read: int) -> None:
        """Sets the steps' stats to the sums over all attempts, at the end of the input, of which
        this attempt has read ``read`` documents.
        """
        for step, total in zip(self._steps, self._totals(read), strict=True):
            step.stats.stats = total
        self._earlier = [MetricStatsDict() for _ in self._steps]

    def _totals(self, read: int) -> list[MetricStatsDict]:
        if self._ended and not read:
            return self._earlier
        return self._sums()

    def _sums(self) -> list[MetricStatsDict]:
        return [
            earlier + step.stats.stats
            for earlier, step in zip(self._earlier, self._steps, strict=True)
        ]

    def _names(self) -> list[str]:
        return [step.stats.name for step in self._steps]


def _to_json(metrics: MetricStatsDict) -> ReaderState:
    """Converts metrics, except metrics with a number that is not finite, which JSON cannot hold."""
    numbers_by_name = {}
    for name, metric in list(metrics.items()):
        numbers = (
            metric.total,
            metric.n,
            metric.mean,
            metric._running_variance,
            metric.min,
            metric.max,
        )
        if metric.n and all(map(math.isfinite, numbers)):
            numbers_by_name[str(name)] = [*map(_plain, numbers), metric.unit]
    return numbers_by_name


def _plain(number: SupportsFloat) -> float:
    if isinstance(number, Integral):
        return int(number)
    return float(number)


def _from_json(fields: ReaderState) -> MetricStatsDict:
    stats = {}
    for name, (total, n, mean, variance, low, high, unit) in fields.items():
        stats[name] = MetricStats(total, n, mean, low, high, variance, unit)
    return MetricStatsDict(init=stats)
