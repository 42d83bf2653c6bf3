"""A rank's numbers, for its history and for the screen of its command (``process/screen.py``).

The history gets a line after 1, 2, 4, ... seconds, each minute, and at events and the end of the
attempt. The storage thread adds its numbers, and writes the line (``checkpoint/history.py``).
"""

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from loguru import logger

from datatrove_ckpt.checkpoint import history
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.common.counts import BOUNDS, InputPosition, Processed
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import CkptError, LimitReached, WaitsForBatches
from datatrove_ckpt.generation.prefetch import DocumentSource
from datatrove_ckpt.inference.client.client import CompletionClient, Outage, count_answer
from datatrove_ckpt.inference.client.responses import Completion
from datatrove_ckpt.process.screen import (
    READING,
    WAITING,
    RankProgress,
    Report,
    RunProgress,
    Screen,
    reporter,
)
from datatrove_ckpt.process.shutdown import Shutdown

MINUTE_SECONDS = 60.0
_COUNTED_AT_ONCE = 1000  # answers
_BOUNDS = np.array(BOUNDS)
_MAX_ID = 200  # characters of a document's id
_MAX_EXCERPT = 200  # characters of its beginning, and as many of its end


@dataclass(eq=False)
class RankReporter:
    """One rank's progress in this attempt.

    Any thread may call ``progress``, ``spread`` and ``last_records``.

    Attributes:
        own: what this attempt did. The scheduler counts documents, ``RolloutRequests`` failures,
            ``DocumentAnswers`` those that were cached, and clients what they send.
    """

    _rank: int
    source: DocumentSource
    _checkpoint: OpenCheckpoint
    _shutdown: Shutdown
    _interval: float

    def __post_init__(self) -> None:
        checkpoint = self._checkpoint
        self.own = checkpoint.own
        self._before = checkpoint.resumed.finished.read
        self._attempt = time.time_ns()
        self.clients: list[CompletionClient] = []
        self.outages: list[Outage] = []
        self._early = Counter[str]()
        self._ended = 0
        self._ended_at = time.monotonic()  # when it last changed
        self._spread = history.RequestHistograms()
        self._recent: list[tuple[float, int, int]] = []
        """Answers that are not in the histograms yet: many at once cost a fifth of each alone."""
        self._counting = threading.Lock()
        self._has_new_examples = False
        self.last = history.ProgressRecord()
        self.end: history.AttemptEnd | None = None

    # what happens --------------------------------------------------------------------------------

    def serving(self, client: CompletionClient) -> None:
        self.clients.append(client)
        self._ended_at = time.monotonic()
        self._checkpoint.clock.serving()

    async def until(self, name: str, client: asyncio.Future[CompletionClient]) -> CompletionClient:
        self._early[name] += 1
        try:
            return await asyncio.shield(client)
        finally:
            self._early[name] -= 1

    def silence(self) -> history.OutageStatus:
        longest = history.OutageStatus()
        for outage in self.outages:
            failing = history.OutageStatus(
                round(outage.seconds, 1), outage.patience, outage.unreachable, outage.model
            )
            hanging = history.OutageStatus(round(outage.hangs, 1), model=outage.model)
            longest = max(longest, failing, hanging)
        return longest

    def answered(self, answer: Completion, config: InferenceConfig) -> tuple[int, int]:
        tokens = count_answer(self.own, answer, config)
        self._recent.append((1000 * answer.seconds, tokens.prompt, tokens.completion))
        if len(self._recent) == _COUNTED_AT_ONCE:
            self._count_recent()
        return tokens.prompt, tokens.completion

    def _count_recent(self) -> None:
        with self._counting:
            recent = self._recent.copy()  # others may come while these are counted
            columns = zip(*recent, strict=True)
            for name, values in zip(history.HISTOGRAMS.values(), columns, strict=False):
                buckets = np.searchsorted(_BOUNDS, values, "right")  # faster than bisect
                getattr(self._spread, name).update(buckets.tolist())
            del self._recent[: len(recent)]

    def example(self, fault: str, document: str, text: str) -> None:
        examples = self._spread.examples.setdefault(fault, [])
        if len(examples) < 3:  # of each fault
            excerpt = redact(text)
            if len(excerpt) > 2 * _MAX_EXCERPT:
                excerpt = f"{excerpt[:_MAX_EXCERPT]} ... {excerpt[-_MAX_EXCERPT:]}"
            examples.append([redact(document)[:_MAX_ID], excerpt])
            self._has_new_examples = True

    def has_answers(self) -> bool:
        written = self._checkpoint.resumed.finished.written
        return self.own.requests + self.own.cached + written > 0

    def position(self) -> InputPosition:
        source = self.source
        progress = source.progress()
        # A reader is ahead of the rank, so documents are taken to be equal:
        #
        #     done = what lies before the last document handed over * documents finished / documents
        #     up to that document
        #
        # This is exact at both ends, and grows steadily.
        handed_over = self._checkpoint.resumed.next_ordinal + source.handed_over
        done = progress.done
        if source.is_at_end and progress.total is not None:
            done = progress.total
        done = round(done * (self._before + self.own.documents) / max(handed_over, 1))
        if progress.total is not None:
            done = min(done, progress.total)
        return progress._replace(done=done)

    def expected_documents(self) -> float:
        progress = self.source.progress()
        if not progress.done or progress.total is None:
            return 0.0
        handed_over = self._checkpoint.resumed.next_ordinal + self.source.handed_over
        return handed_over * progress.total / progress.done

    def server(self, kind: Any, name: str, url: str | None, cause: str = "") -> None:
        if kind == "restart":
            # Every rank that shares the server is called, and their numbers are added: only the
            # first counts.
            is_first = not self.clients or any(client.is_first for client in self.clients)
            self.own.restarts += is_first
        event = history.ServerEvent(
            what=kind,
            name=name,
            url=url and redact(url),
            why=redact(cause)[: history.MAX_TEXT],
        )
        self._checkpoint.note(event)

    # the screen ----------------------------------------------------------------------------------

    async def report(self) -> None:
        await asyncio.gather(self._keep(), self._show())

    async def _show(self) -> None:
        every = min(self._interval, 1.0)
        was_silent = False
        warned = False
        with _screen(self._interval) as report:
            try:
                while True:
                    ended = self.own.documents + self.own.requests + self.own.failed
                    if ended != self._ended:
                        self._ended = ended
                        self._ended_at = time.monotonic()
                    for client in self.clients:
                        client.servers.look()
                    report(self._rank, self.now())
                    place = ""
                    if time.monotonic() - self._ended_at >= MINUTE_SECONDS:
                        record = self.progress()
                        if not record.in_flight + record.waiting:
                            place = self.source.stands(MINUTE_SECONDS)
                    if place and not warned:
                        logger.warning(
                            f"For a minute, no document has come: the reader stands{place}. "
                            "Wait, or stop the run and correct that."
                        )
                    warned = bool(place)
                    if self.silence().lasts != was_silent:
                        was_silent = not was_silent
                        self._checkpoint.note(self.progress())
                    await asyncio.sleep(every)
            finally:
                report(self._rank, self.now())

    def now(self) -> RankProgress:
        return RankProgress(
            self._attempt,
            self._before + self.own.documents,
            self.own.processed() + Processed(requests=self.own.failed),
            self.position(),
            *self._state(),
            sum(client.in_flight for client in self.clients),
        )

    def _state(self) -> tuple[str, float, bool]:
        if self._shutdown.is_stopping:
            return "stopping", 0.0, False
        silence = self.silence()
        if silence.lasts:
            return str(silence), silence.seconds, True
        clients = self.clients
        if not clients and self.source.has_begun and not self.source.handed_over:
            return READING, 0.0, False
        quiet = time.monotonic() - self._ended_at
        if quiet >= 60.0 and any(client.in_flight + client.pausing for client in clients):
            return "no answer", quiet, False
        if not clients:
            return WAITING, 0.0, False
        early = next((name for name, number in self._early.items() if number), None)
        if early is not None:
            return f"{WAITING} of {early}", 0.0, False
        return "", 0.0, False

    # the history ---------------------------------------------------------------------------------

    async def _keep(self) -> None:
        pause = 1.0  # a kill loses at most half of what a short attempt has counted
        for number in count(1):
            await asyncio.sleep(pause)
            pause = min(2 * pause, MINUTE_SECONDS)
            self._checkpoint.note(self.progress())
            if number % 10 == 0 or self._has_new_examples:
                self._has_new_examples = False
                self._checkpoint.note(self.spread())

    def progress(self) -> history.ProgressRecord:
        """The checkpoint fills in the rest."""
        # Copies of the counters: they grow while other threads add them up.
        counters: dict[str, Any] = {
            name: value.copy()
            for name, value in self.own.fields().items()
            if isinstance(value, Counter)
        }
        record = history.ProgressRecord(own=replace(self.own, **counters), position=self.position())
        for client in self.clients:
            record.in_flight += client.in_flight
            record.waiting += client.waiting
            if client.is_first:  # of the ranks that share the servers
                record.places += client.servers.router.capacity
        record.waiting += self._early.total()
        record.wait = self._wait()
        record.silence = self.silence()
        record.skipped = self.source.skipped
        return record

    def _wait(self) -> history.WaitStatus:
        now = time.monotonic()
        quiet = round(now - self._ended_at, 1)
        all_started = self.source.is_at_end
        attempts = filter(None, [client.oldest for client in self.clients])
        oldest = min(attempts, key=lambda attempt: attempt.started_at, default=None)
        if oldest is None:
            return history.WaitStatus(quiet, all_started=all_started)
        seconds = round(now - oldest.started_at, 1)
        return history.WaitStatus(
            quiet, seconds, redact(oldest.request.document)[:_MAX_ID], all_started
        )

    def spread(self) -> history.RequestHistograms:
        """Returns a copy, because other threads read it later."""
        self._count_recent()
        examples = self._spread.examples.copy().items()
        copied = history.RequestHistograms(
            examples={fault: each.copy() for fault, each in examples}
        )
        for name in history.HISTOGRAMS.values():
            setattr(copied, name, getattr(self._spread, name).copy())
        return copied

    def last_records(self, completed: bool) -> list[history.Record]:
        """Called before the attempt's error is handled."""
        self.last = self.progress()
        self.end = self._end(completed)
        return [self.last, self.spread(), self.end]

    def _end(self, completed: bool) -> history.AttemptEnd:
        if completed:
            return history.AttemptEnd(why="done")
        error = sys.exception()
        if self._shutdown.is_requested:
            return history.AttemptEnd(why="stopped", what=self._shutdown.cause)
        if error is None or isinstance(error, WaitsForBatches):  # between two passes
            return history.AttemptEnd(why="stopped", what=history.WAITS_FOR_BATCHES)
        if isinstance(error, LimitReached):
            return history.AttemptEnd(why="stopped", what=error.setting)
        text = type(error).__name__
        if isinstance(error, CkptError):  # a foreign error's text may hold a secret
            text = redact(f"{text}: {error}")
        return history.AttemptEnd(why="error", what=text[: history.MAX_TEXT])


@contextmanager
def _screen(interval: float) -> Iterator[Report]:
    report_to_command = reporter()
    if report_to_command is None:
        with Screen(RunProgress(), interval) as screen:
            yield screen.update
        return
    # The terminal shows INFO and above, the file everything.
    lines = Screen(RunProgress(), interval, log=logger.debug)

    def report(rank: int, progress: RankProgress) -> None:
        report_to_command(rank, progress)
        lines.update(rank, progress)

    yield report
