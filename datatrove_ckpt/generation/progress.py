"""Progress and statistics of a run: a bar on a terminal, elsewhere a log line every ``metric_interval`` seconds.

When the run ends, the numbers go to datatrove's stats, under the names that its own runner uses. Until then we keep a
histogram: calling ``stat_update`` for each value would cost as much as reading the document does (measured).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, defaultdict

import multiprocess
from datatrove.utils.stats import MetricStats, Stats
from loguru import logger
from tqdm import tqdm

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.journal import Outcome
from datatrove_ckpt.inference.client.answers import Completion
from datatrove_ckpt.readers.shard import SkippedLines

_UNITS = {
    "prompt_tokens": "request",
    "completion_tokens": "request",
    "successful_requests": "request",
    "failed_requests": "request",
    "requests": "rollout",
}
_OTHERS_UNIT = "document"


class Progress:
    """One rank's progress in this attempt. It is the ``Observer`` of the rank's ``Scheduler``.

    Args:
        stats: the step's, from datatrove.
        before: counts of the documents that earlier attempts committed.
        interval: seconds between two log lines.
        bar: show a progress bar instead.
    """

    def __init__(self, stats: Stats, before: DocumentCounts, interval: float, bar: bool) -> None:
        self.requests = 0
        self.failed_requests = 0
        self.tokens = 0
        self.documents = 0
        self.skipped = SkippedLines()
        """Lines and rows of the input that were no documents, in all attempts; once the input has ended."""
        self._stats = stats
        self._values: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._interval = interval
        self._started = time.monotonic()
        self._serving = asyncio.Event()
        self._before = before.read
        self._wants_bar = bar
        self._bar: tqdm | None = None

    def serving(self) -> None:
        self._started = time.monotonic()
        self._serving.set()

    def answered(self, completion: Completion) -> None:
        prompt_tokens = completion.usage.get("prompt_tokens") or 0
        completion_tokens = completion.usage.get("completion_tokens") or 0
        self.requests += 1
        self.tokens += completion_tokens
        self._values["prompt_tokens"][prompt_tokens] += 1
        self._values["completion_tokens"][completion_tokens] += 1
        self._values["successful_requests"][1] += 1

    def request_failed(self) -> None:
        self.failed_requests += 1
        self._values["failed_requests"][1] += 1

    def finished(self, outcome: Outcome, successful_rollouts: int, requests: list[int]) -> None:
        self.documents += 1
        self._values["requests"].update(requests)
        self._values["successful_rollouts"][successful_rollouts] += 1
        self._values["failed_rollouts"][len(requests) - successful_rollouts] += 1
        self._values["skipped_bad_requests" if outcome == "dead" else "documents_processed"][1] += 1
        if self._bar is not None:
            self._bar.update()

    async def report(self) -> None:
        """Shows the bar, or logs a line every interval, until it is cancelled."""
        # Not before the server is ready: the log lines about its start would break the bar.
        await self._serving.wait()
        if self._wants_bar:
            self._bar = tqdm(initial=self._before + self.documents, unit="doc", desc="Inference", dynamic_ncols=True)
        while True:
            if self._bar is not None:
                self._bar.set_postfix_str(self._rates())
            await asyncio.sleep(1 if self._wants_bar else self._interval)
            if not self._wants_bar:
                logger.info(
                    f"{self.documents} documents finished in this run, {self.requests} requests, {self._rates()}"
                )

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self.requests / seconds:.1f} req/s, {self.tokens / seconds:.0f} tok/s"

    def close(self) -> None:
        """Adds the numbers to datatrove's stats."""
        for label, values in self._values.items():
            self._stats[label] += _metric(values, _UNITS.get(label, _OTHERS_UNIT))
        self._values.clear()
        if self._bar is not None:
            self._bar.close()


def _metric(values: Counter[int], unit: str) -> MetricStats:
    """The same statistics as ``MetricStats.update`` computes from the values one by one."""
    n, total = values.total(), sum(value * times for value, times in values.items())
    mean = total / n
    squares = sum(times * (value - mean) ** 2 for value, times in values.items())
    return MetricStats(total, n, mean, min(values), max(values), squares, unit)


def wants_bar() -> bool:
    """True on a terminal, unless this is one of several workers: their bars would overwrite each other."""
    return sys.stderr.isatty() and multiprocess.parent_process() is None
