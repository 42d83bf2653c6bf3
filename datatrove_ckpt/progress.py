"""What a run shows of itself: a bar on a terminal, a log line every ``metric_interval`` seconds elsewhere.

Numbers go to datatrove's stats under the names its own runner uses.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import multiprocess
from loguru import logger
from tqdm import tqdm

from datatrove_ckpt.checkpoint.commits import Tally
from datatrove_ckpt.checkpoint.journal import Outcome
from datatrove_ckpt.inference.answers import Completion

StatUpdate = Callable[..., None]


class Progress:
    """One rank's progress in this life, an ``Observer`` of its ``Generation``.

    Args:
        stat_update: datatrove's, of the step.
        before: what earlier lives committed.
        bar: show a progress bar.
    """

    def __init__(self, stat_update: StatUpdate, before: Tally, interval: float, bar: bool) -> None:
        self.requests = 0
        self.failed_requests = 0
        self.tokens = 0
        self.documents = 0
        self._stat_update = stat_update
        self._interval = interval
        self._started = time.monotonic()
        self._serving = asyncio.Event()
        self._before = before.read
        self._wants_bar = bar
        self._bar: Any = None

    def serving(self) -> None:
        self._started = time.monotonic()
        self._serving.set()

    def answered(self, completion: Completion) -> None:
        prompt_tokens = completion.usage.get("prompt_tokens") or 0
        completion_tokens = completion.usage.get("completion_tokens") or 0
        self.requests += 1
        self.tokens += completion_tokens
        self._stat_update("prompt_tokens", value=prompt_tokens, unit="request")
        self._stat_update("completion_tokens", value=completion_tokens, unit="request")
        self._stat_update("successful_requests", value=1, unit="request")

    def request_failed(self) -> None:
        self.failed_requests += 1
        self._stat_update("failed_requests", value=1, unit="request")

    def finished(self, outcome: Outcome, successful_rollouts: int, requests: list[int]) -> None:
        self.documents += 1
        for count in requests:
            self._stat_update("requests", value=count, unit="rollout")
        self._stat_update("successful_rollouts", value=successful_rollouts, unit="document")
        self._stat_update("failed_rollouts", value=len(requests) - successful_rollouts, unit="document")
        if outcome == "dead":
            self._stat_update("skipped_bad_requests", value=1, unit="document")
        else:
            self._stat_update("documents_processed", value=1, unit="document")
        if self._bar is not None:
            self._bar.update()

    async def report(self) -> None:
        """Shows the bar, or logs a line every interval, for ever."""
        # Not before the server serves: its start is told in log lines, which would tear the bar apart.
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
        if self._bar is not None:
            self._bar.close()


def wants_bar() -> bool:
    """On a terminal, unless this is one of several workers, whose bars would overwrite each other."""
    return sys.stderr.isatty() and multiprocess.parent_process() is None
