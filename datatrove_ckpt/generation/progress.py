"""A rank's numbers: its history is kept with them, and the screen of its command shows them (``process/screen.py``).

The history gets a line each minute, what happens to servers, and how the attempt ends; the first line comes after ten
seconds, and one more when servers have given no answer for half a minute, or give answers again. The counters are plain
numbers on the event loop, so a line costs what one answer costs. The storage thread adds what it alone knows, and
writes the line: see ``checkpoint/history_records.py``. The numbers of all attempts come from the checkpoint, see
``final_stats``.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import cast

from loguru import logger

from datatrove_ckpt.checkpoint import history_records
from datatrove_ckpt.checkpoint.history_records import (
    End,
    InputPosition,
    Record,
    ServerEvent,
    ServerWhat,
    Silence,
    Spread,
    Wait,
    WorkCounts,
)
from datatrove_ckpt.checkpoint.skipped import SkippedLines
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.generation.null_checkpoint import Checkpoint
from datatrove_ckpt.generation.prefetch import DocumentSource
from datatrove_ckpt.inference.client.client import CompletionClient, Outage
from datatrove_ckpt.process.screen import READING, WAITING, RankProgress, Report, RunProgress, Screen, reporter
from datatrove_ckpt.process.shutdown import Shutdown

MINUTE_SECONDS = 60.0
_FIRST_SECONDS = 10.0  # somebody looks whether the run has begun well
_SPREAD_EVERY = 10
_REPORT_SECONDS = 1.0
_SILENCE_SECONDS = 60.0
_SHOWN_ID = 200  # characters of a document's id


class Newest:
    """When a count was last seen to change. To look once a second costs nothing per answer."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._count = 0

    def look(self, count: int) -> None:
        if count != self._count:
            self._count = count
            self._at = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since then."""
        return time.monotonic() - self._at


class ModelObserver:
    """Observes the servers of a model for a rank.

    Args:
        on_serving: called when they are ready.

    Attributes:
        client: None until they are.
        early: requests that wait for that.
        newest: of its answers.
    """

    def __init__(self, on_serving: Callable[[], None]) -> None:
        self.client: CompletionClient | None = None
        self.early = 0
        self.newest = Newest()
        self._on_serving = on_serving
        self._outages: list[Outage] = []

    def waits(self, outage: Outage) -> None:
        """The outage clock of the model, whose servers are waited for."""
        self._outages.append(outage)

    async def until(self, client: asyncio.Future[CompletionClient]) -> CompletionClient:
        """Returns once the model's servers are ready, for which a request waits."""
        self.early += 1
        try:
            return await asyncio.shield(client)
        finally:
            self.early -= 1

    def serving(self, client: CompletionClient) -> None:
        """Requests to the model go through this client from now on."""
        self.client = client
        self.newest = Newest()
        self._outages.append(client.outage)
        self._on_serving()

    @property
    def is_waiting(self) -> bool:
        """Whether servers have a request of the rank, or will have it again."""
        return self.client is not None and self.client.stats.in_flight + self.client.stats.pausing > 0

    def silences(self) -> Iterator[Silence]:
        """Of the servers, and of those that are waited for."""
        for one in self._outages:
            yield Silence(round(one.seconds, 1), one.patience, one.unreachable, one.model)


class RankReporter:
    """One rank's progress in this attempt. The rank's ``Scheduler`` tells it what happens.

    ``progress``, ``spread`` and ``last_records`` may be called in any thread.

    Args:
        checkpoint: its clock is told when the servers are ready. It writes what is noted here, and calls
            ``last_records`` when it is closed.
        interval: seconds between two log lines.

    Attributes:
        own: what this attempt did. The scheduler counts documents, and requests count those that fail, and those that
            the cache answers. Answers of servers are summed up once a second.
        answers: seconds, prompt and completion tokens of those that are not summed up yet.
        position: how much of the input is done.
    """

    def __init__(self, rank: int, checkpoint: Checkpoint, shutdown: Shutdown, interval: float) -> None:
        self.own = WorkCounts()
        self.position: Callable[[], InputPosition] = InputPosition
        self._rank = rank
        self._checkpoint = checkpoint
        self._shutdown = shutdown
        self._interval = interval
        self._before = checkpoint.resumed.finished.read
        self._attempt = time.time_ns()
        self._models: dict[str, ModelObserver] = {}
        self._newest = Newest()
        self._source: DocumentSource | None = None
        self.answers: deque[tuple[float, int, int]] = deque()
        self._spread = Spread()
        self._lock = threading.Lock()  # of whoever sums up the answers: metrics are read in other threads
        checkpoint.last_records = self.last_records

    # what happens ------------------------------------------------------------------------------------------------

    def of(self, config: InferenceConfig) -> ModelObserver:
        """The observer of a model's servers."""
        return self._models.setdefault(config.name, ModelObserver(self._serving))

    def _serving(self) -> None:
        self._newest = Newest()
        self._checkpoint.clock.serving()

    @property
    def clients(self) -> list[CompletionClient]:
        """Of the models whose servers are ready."""
        return [model.client for model in self._models.values() if model.client is not None]

    def silence(self) -> Silence:
        """Of the model that has given no answer for the longest time."""
        return max((found for model in self._models.values() for found in model.silences()), default=Silence())

    def _sum_up(self) -> None:
        """Counts the new answers. Many at once, because most values occur often: so each answer costs little."""
        with self._lock:
            milliseconds = Counter[int]()
            prompt = Counter[int]()
            completion = Counter[int]()
            for _ in range(len(self.answers)):
                seconds, prompt_tokens, completion_tokens = self.answers.popleft()
                milliseconds[int(seconds * 1000)] += 1
                prompt[prompt_tokens] += 1
                completion[completion_tokens] += 1
            self.own.requests += milliseconds.total()
            self.own.prompt_tokens += self._spread.prompt_tokens.count_all(prompt)
            self.own.completion_tokens += self._spread.completion_tokens.count_all(completion)
            self._spread.milliseconds.count_all(milliseconds)

    def reading(self, source: DocumentSource) -> None:
        """The documents come from there: from now on it is known how much of the input is done."""
        self._source = source
        first = self._checkpoint.resumed.next_ordinal
        self.position = lambda: input_position(source, first, self._before + self.own.documents)

    def server(self, what: str, name: str, url: str | None, why: str = "") -> None:
        """Something happened to a server: see ``ServerEvent``."""
        if what == "restart":
            # All ranks that share the server are told, and their numbers are added: so only the first one counts it.
            is_first = not self.clients or any(one.is_first for one in self.clients)
            self.own.restarts += is_first
        event = ServerEvent(what=cast("ServerWhat", what), name=name, url=url and redact(url), why=redact(why))
        self._checkpoint.note(event)

    @property
    def skipped(self) -> SkippedLines:
        """Lines and rows of the input that were no documents, as far as it was read, in all attempts."""
        if self._source is None:
            return SkippedLines()
        return self._source.skipped

    # the screen --------------------------------------------------------------------------------------------------

    async def report(self) -> None:
        """Reports to the screen, and keeps the history, until it is cancelled."""
        await asyncio.gather(self._keep(), self._show())

    async def _show(self) -> None:
        every = min(self._interval, _REPORT_SECONDS)
        was_silent = False
        with _screen(self._interval) as report:
            try:
                while True:
                    self._look()
                    report(self._rank, self.now())
                    if self.silence().lasts != was_silent:
                        was_silent = not was_silent
                        self._checkpoint.note(self.progress())
                    await asyncio.sleep(every)
            finally:
                report(self._rank, self.now())

    def _look(self) -> None:
        self._sum_up()
        self._newest.look(self.own.documents + self.own.requests + self.own.failed)
        for model in self._models.values():
            if model.client is not None:
                model.newest.look(model.client.stats.answers)

    def now(self) -> RankProgress:
        """Where the rank stands."""
        self._sum_up()
        position = self.position()
        return RankProgress(
            self._attempt,
            self._before + self.own.documents,
            (self.own.documents, self.own.requests + self.own.failed, self.own.completion_tokens),
            position.share,
            position.total,
            position.unit,
            *self._state(),
        )

    def _state(self) -> tuple[str, float, bool]:
        """See ``RankProgress``: what the rank does, for how long, and whether that is an outage."""
        if self._shutdown.is_stopping:
            return "stopping", 0.0, False
        silence = self.silence()
        if silence.lasts:
            return str(silence), silence.seconds, True
        if not self.clients and self._source is not None and not self._source.handed_over:
            return READING, 0.0, False
        for name, model in self._models.items():
            quiet = model.newest.seconds
            if quiet >= _SILENCE_SECONDS and model.is_waiting:
                return f"no answer from {name}".removesuffix(" from "), quiet, False
            if model.client is None and model.early and self.clients:
                return f"{WAITING} of {name}", 0.0, False
            if not self.clients:
                return WAITING, 0.0, False
        return "", 0.0, False

    # the history -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Notes a line after ten seconds and each minute, until it is cancelled."""
        first = min(_FIRST_SECONDS, MINUTE_SECONDS)
        for number in count():
            await asyncio.sleep(MINUTE_SECONDS if number else first)
            self._checkpoint.note(self.progress())
            if number and number % _SPREAD_EVERY == 0:
                self._checkpoint.note(self.spread())

    def progress(self) -> history_records.Progress:
        """Where the attempt stands. The checkpoint fills in the rest."""
        self._sum_up()
        errors = Counter[str]()
        found = history_records.Progress(own=replace(self.own, errors=errors), position=self.position())
        for client in self.clients:
            found.own.sent += client.stats.requests
            found.own.retries += client.stats.retries
            found.own.resent += client.stats.resent
            errors.update(client.stats.errors)
            found.in_flight += client.stats.in_flight
            found.waiting += client.waiting
        found.waiting += sum(model.early for model in self._models.values())
        found.wait = self._wait()
        found.silence = self.silence()
        found.skipped = self.skipped
        return found

    def _wait(self) -> Wait:
        quiet = round(self._newest.seconds, 1)
        all_started = self._source is not None and self._source.is_at_end
        attempts = filter(None, [client.oldest for client in self.clients])
        oldest = min(attempts, key=lambda attempt: attempt.started_at, default=None)
        if oldest is None:
            return Wait(quiet, all_started=all_started)
        seconds = round(time.monotonic() - oldest.started_at, 1)
        return Wait(quiet, seconds, redact(oldest.request.document)[:_SHOWN_ID], all_started)

    def spread(self) -> Spread:
        """The histograms now: a copy, because other threads read it later."""
        self._sum_up()
        with self._lock:
            return copy.deepcopy(self._spread)

    def last_records(self, completed: bool) -> Sequence[Record]:
        """The end of the attempt. Called where it ends, in whichever thread, before its error is handled."""
        return [self.progress(), self.spread(), self._end(completed)]

    def _end(self, completed: bool) -> End:
        if completed:
            return End(why="done")
        if self._shutdown.is_requested:
            return End(why="stopped", what=self._shutdown.cause)
        return End(why="error", what=_described(sys.exception()))


@contextmanager
def _screen(interval: float) -> Iterator[Report]:
    """Where a rank reports: the screen of its command, with lines in the task's log file, or a screen of its own."""
    shown = reporter()
    if shown is None:
        with Screen(RunProgress(), interval) as screen:
            yield screen.update
        return
    lines = Screen(RunProgress(), interval, log=logger.debug)  # the terminal shows INFO and above, the file everything

    def report(rank: int, progress: RankProgress) -> None:
        shown(rank, progress)
        lines.update(rank, progress)

    yield report


def _described(error: BaseException | None) -> str:
    """The text of an error that is not ours may hold anything, also a secret: it is in the log only."""
    if error is None:
        return ""
    name = type(error).__name__
    if isinstance(error, CkptError):
        return redact(f"{name}: {error}")
    return name


# input progress -------------------------------------------------------------------------------------------------------

# How much of a rank's input is done, for percent and time left.
#
# A reader is ahead of the rank: it knows the place of the last document that it handed over, and some of the documents
# before that are still in work, others were finished by an attempt before. So we take the documents to be equal:
#
#     done = what lies before the last document handed over * documents finished / documents up to that one
#
# which is exact before the first and after the last document, and grows all the time.


def input_position(source: DocumentSource, first: int, finished: int) -> InputPosition:
    """How much of the input is done.

    Args:
        source: hands over the documents from number ``first`` on, counted from 0.
        finished: documents that are finished, over all attempts.
    """
    reached = source.reached()
    if reached.unit is None:
        return InputPosition()
    known = first + source.handed_over
    done = reached.done
    if source.is_at_end and reached.total is not None:
        done = reached.total  # lines after the last document are none
    done = round(done * finished / max(known, 1))
    if reached.total is not None:
        done = min(done, reached.total)
    return InputPosition(done, reached.total, reached.unit)
