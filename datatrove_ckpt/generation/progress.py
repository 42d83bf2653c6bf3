"""A rank's progress: its numbers of work, which it reports to the screen of its command (``process/screen.py``).

The numbers of all attempts come from the checkpoint, see ``final_stats``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loguru import logger

from datatrove_ckpt.formatting import duration
from datatrove_ckpt.generation.null_checkpoint import Checkpoint
from datatrove_ckpt.generation.prefetch import DocumentSource
from datatrove_ckpt.generation.rank_history import RankHistory
from datatrove_ckpt.inference.client.answers import Completion
from datatrove_ckpt.inference.client.client import CompletionClient
from datatrove_ckpt.process.screen import WAITING, LogLines, RankProgress, Report, RunProgress, Screen, reporter
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.readers.shard import SkippedLines

_REPORT_SECONDS = 1.0
_SILENCE_SECONDS = 60.0


class Progress:
    """One rank's progress in this attempt. The rank's ``Scheduler`` tells it what happens.

    Args:
        checkpoint: its clock is told when the servers are ready, and its history gets the numbers.
        interval: seconds between two log lines.
    """

    def __init__(self, rank: int, checkpoint: Checkpoint, shutdown: Shutdown, interval: float) -> None:
        self.history = RankHistory(checkpoint, shutdown)
        self.own = self.history.own
        self.skipped = SkippedLines()
        """Lines and rows of the input that were no documents, in all attempts; once the input has ended."""
        self._rank = rank
        self._clock = checkpoint.clock
        self._shutdown = shutdown
        self._interval = min(interval, _REPORT_SECONDS), interval
        self._before = checkpoint.resumed.finished.read
        self._attempt = time.time_ns()
        self._client: CompletionClient | None = None
        self._answered_at = time.monotonic()

    def serving(self, client: CompletionClient) -> None:
        self.history.serving(client)
        self._clock.serving()
        self._client = client
        self._answered_at = time.monotonic()

    def answered(self, completion: Completion) -> None:
        self.history.answered(completion)
        self._answered_at = time.monotonic()

    def reading(self, documents: DocumentSource) -> None:
        self.history.read_from(documents)

    def request_failed(self) -> None:
        self.own.failed += 1

    @property
    def documents(self) -> int:
        """Finished in this attempt."""
        return self.own.documents

    @property
    def sent(self) -> int:
        """Requests that the server got and that ended: with an answer, a rejection or a failure."""
        return self.own.requests + self.own.failed

    def finished(self) -> None:
        self.own.documents += 1

    async def report(self) -> None:
        """Reports to the screen, and keeps the history, until it is cancelled."""
        await asyncio.gather(self.history.keep(), self._show())

    async def _show(self) -> None:
        every, interval = self._interval
        async with _screen(interval) as report:
            try:
                while True:
                    report(self._rank, self.now())
                    await asyncio.sleep(every)
            finally:
                report(self._rank, self.now())

    def now(self) -> RankProgress:
        """Where the rank stands."""
        position = self.history.position()
        return RankProgress(
            self._attempt,
            self._before + self.documents,
            self.documents,
            self.sent,
            self.own.completion_tokens,
            position.done,
            position.total,
            position.unit,
            self._state(),
        )

    def _state(self) -> str:
        if self._shutdown.is_requested:
            return "stopping"
        if self._client is None:
            return WAITING
        silent = time.monotonic() - self._answered_at
        if self._client.stats.in_flight and silent >= _SILENCE_SECONDS:
            return f"no answer for {duration(silent)}"
        return ""


@asynccontextmanager
async def _screen(interval: float) -> AsyncIterator[Report]:
    """Where a rank reports: the screen of its command, with lines in the task's log file, or a screen of its own."""
    shown = reporter()
    if shown is None:
        with Screen(RunProgress(), interval) as screen:
            yield screen.update
        return
    lines = LogLines(RunProgress(), interval, logger.debug)  # the terminal shows INFO and above, the file everything

    def report(rank: int, progress: RankProgress) -> None:
        shown(rank, progress)
        lines.progress.update(rank, progress)
        lines.tick()

    yield report
