"""A rank's numbers: its history is kept with them, and the screen of its command shows them (``process/screen.py``).

The history gets a line each minute, what happens to servers, and how the attempt ends; the first line comes after ten
seconds, and one more when servers have given no answer for half a minute, or give answers again. The counters are plain
numbers on the event loop, so a line costs what one answer costs. The storage thread adds what it alone knows, and
writes the line: see ``checkpoint/history_records.py``. The numbers of all attempts come from the checkpoint, see
``final_stats``.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import get_args

from loguru import logger

from datatrove_ckpt.checkpoint import history_records
from datatrove_ckpt.checkpoint.history_records import (
    Buckets,
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
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.generation.null_checkpoint import Checkpoint
from datatrove_ckpt.generation.prefetch import DocumentSource
from datatrove_ckpt.inference.client.answers import Completion
from datatrove_ckpt.inference.client.client import CompletionClient, Outage
from datatrove_ckpt.process.screen import READING, WAITING, RankProgress, Report, RunProgress, Screen, reporter
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.redaction import redact

MINUTE_SECONDS = 60.0
_FIRST_SECONDS = 10.0  # somebody looks whether the run has begun well
_SPREAD_EVERY = 10
_RECENT = 4096
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
        own: what this attempt did. Documents, failed requests and answers from the cache are counted by who knows.
        position: how much of the input is done.
    """

    def __init__(self, rank: int, checkpoint: Checkpoint, shutdown: Shutdown, interval: float) -> None:
        self.own = WorkCounts()
        self.position: Callable[[], InputPosition] = InputPosition
        self._rank = rank
        self._checkpoint = checkpoint
        self._shutdown = shutdown
        self._interval = min(interval, _REPORT_SECONDS), interval
        self._before = checkpoint.resumed.finished.read
        self._attempt = time.time_ns()
        self._models: dict[str, ModelObserver] = {}
        self._newest = Newest()
        self._source: DocumentSource | None = None
        self._has_said_why_unknown = False
        self._spread = Buckets(), Buckets(), Buckets()
        self._recent: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()  # of these two: metrics are read in other threads
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

    def answered(self, completion: Completion) -> None:
        """A server gave an answer."""
        usage = completion.usage
        prompt, tokens = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        self.own.requests += 1
        self.own.prompt_tokens += prompt
        self.own.completion_tokens += tokens
        with self._lock:
            self._recent.append((int(completion.seconds * 1000), prompt, tokens))
            if len(self._recent) >= _RECENT:
                self._sort_recent()

    def _sort_recent(self) -> None:
        """Under the lock. Many at once, because most values occur often: so each answer costs little."""
        recent, self._recent = self._recent, []
        for buckets, values in zip(self._spread, zip(*recent, strict=True), strict=False):
            for value, times in Counter(values).items():
                buckets.count(value, times)

    def reading(self, source: DocumentSource) -> None:
        """The documents come from there: from now on it is known how much of the input is done."""
        point, self._source = self._checkpoint.resumed, source
        self.position = lambda: input_position(source, point.next_ordinal, self._before + self.own.documents)

    def server(self, what: str, name: str, url: str | None, why: str = "") -> None:
        """Something happened to a server: see ``ServerEvent``."""
        if what == "restart":
            # All ranks that share the server are told, and their numbers are added: so only the first one counts it.
            is_first = not self.clients or any(one.is_first for one in self.clients)
            self.own.restarts += is_first
        for known in get_args(ServerWhat):
            if what == known:
                self._checkpoint.note(ServerEvent(what=known, name=name, url=url and redact(url), why=redact(why)))

    @property
    def skipped(self) -> SkippedLines:
        """Lines and rows of the input that were no documents, as far as it was read, in all attempts."""
        return SkippedLines() if self._source is None else self._source.skipped

    # the screen --------------------------------------------------------------------------------------------------

    async def report(self) -> None:
        """Reports to the screen, and keeps the history, until it is cancelled."""
        await asyncio.gather(self._keep(), self._show())

    async def _show(self) -> None:
        (every, interval), was_silent = self._interval, False
        async with _screen(interval) as report:
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
        self._newest.look(self.own.documents + self.own.requests + self.own.failed)
        for model in self._models.values():
            if model.client is not None:
                model.newest.look(model.client.stats.answers)

    def now(self) -> RankProgress:
        """Where the rank stands."""
        position = self.position()
        return RankProgress(
            self._attempt,
            self._before + self.own.documents,
            self.own.documents,
            self.own.requests + self.own.failed,
            self.own.completion_tokens,
            position.done,
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
                return f"no answer from {name}" if name else "no answer", quiet, False
            if model.client is None and (model.early or not self.clients):
                return f"{WAITING} of {name}" if self.clients else WAITING, 0.0, False
        return "", 0.0, False

    # the history -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Notes a line after ten seconds and each minute, until it is cancelled."""
        first = min(_FIRST_SECONDS, MINUTE_SECONDS)
        for number in count():
            await asyncio.sleep(MINUTE_SECONDS if number else first)
            self._say_why_unknown()
            spread = [self.spread()] if number and number % _SPREAD_EVERY == 0 else []
            self._checkpoint.note(self.progress(), *spread)

    def _say_why_unknown(self) -> None:
        if self._source is not None and self._source.lacks_size and not self._has_said_why_unknown:
            self._has_said_why_unknown = True
            logger.info(
                "Progress is shown without percent and time left: the documents have no position in the input, or it "
                "does not say how large it is. A single JsonlReader, ParquetReader, IpcReader or "
                "HuggingFaceDatasetReader of datatrove_ckpt.readers knows both; it takes the same arguments."
            )

    def progress(self) -> history_records.Progress:
        """Where the attempt stands. The checkpoint fills in the rest."""
        own = replace(self.own, errors=dict(self.own.errors))
        found = history_records.Progress(own=own, position=self.position())
        found.in_flight, found.waiting = _add_attempts(own, self.clients)
        found.waiting += sum(model.early for model in self._models.values())
        found.wait = self._wait()
        found.silence = self.silence()
        found.skipped = self.skipped
        return found

    def _wait(self) -> Wait:
        all_started = self._source is not None and self._source.is_at_end
        attempts = [attempt for client in self.clients if (attempt := client.oldest) is not None]
        oldest = min(attempts, key=lambda attempt: attempt.started_at, default=None)
        seconds = 0.0 if oldest is None else round(time.monotonic() - oldest.started_at, 1)
        document = "" if oldest is None else redact(oldest.request.document[:_SHOWN_ID])
        return Wait(round(self._newest.seconds, 1), seconds, document, all_started)

    def spread(self) -> Spread:
        """The histograms now: a copy, because other threads read it later."""
        with self._lock:
            self._sort_recent()
            milliseconds, prompt, completion = map(Buckets, self._spread)
        return Spread(milliseconds=milliseconds, prompt_tokens=prompt, completion_tokens=completion)

    def last_records(self, completed: bool) -> Sequence[Record]:
        """The end of the attempt. Called where it ends, in whichever thread, before its error is handled."""
        return [self.progress(), self.spread(), self._end(completed)]

    def _end(self, completed: bool) -> End:
        if completed:
            return End(why="done")
        if self._shutdown.is_requested:
            return End(why="stopped", what=self._shutdown.cause)
        return End(why="error", what=_described(sys.exception()))


def _add_attempts(work: WorkCounts, clients: Sequence[CompletionClient]) -> tuple[int, int]:
    """Sets what the clients count of attempts. Returns how many requests are in flight, and how many wait."""
    found = [client.stats for client in clients]
    work.sent, work.retries = sum(stats.requests for stats in found), sum(stats.retries for stats in found)
    work.resent = sum(stats.resent for stats in found)
    for stats in found:
        for kind, times in stats.errors.items():
            work.errors[kind] = work.errors.get(kind, 0) + times
    waiting = sum(client.waiting for client in clients)
    return sum(stats.in_flight for stats in found), waiting


@asynccontextmanager
async def _screen(interval: float) -> AsyncIterator[Report]:
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
    return redact(f"{name}: {error}") if isinstance(error, CkptError) else name


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
    done, total = reached.done, reached.total
    if source.is_at_end and total is not None:
        done = total  # lines after the last document are none
    done = round(done * finished / known) if known else 0
    return InputPosition(done if total is None else min(done, total), total, reached.unit)
