"""Stops a task when the run has reached ``until``, ``max_cost`` or ``max_total_tokens``.

Documents begin only if the run is expected to pay for them, with those in work: at the mean so far,
and more while few answers show the mean.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.interval import Interval, Tuning
from datatrove_ckpt.checkpoint.journal import FinishedDocument
from datatrove_ckpt.checkpoint.run_limits import NO_TOTALS, RunTotals, TotalsReader
from datatrove_ckpt.errors import CkptError, ConfigError, LimitReached
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.process.shutdown import Shutdown

if TYPE_CHECKING:
    from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint

# A poll of 10,000 tasks takes 0.1 s on a local disk, and seconds on others.
_LOOKS = Tuning(share=0.02, shortest=0.1, longest=60.0, first=1.0)
_FIRST = 4  # documents in work before the first has ended
_FEW = 20  # documents; until then, each that has cost something lets _FIRST more begin
_RECHECKED = 64  # what may begin is computed again after this part of the documents
# Where costs vary by their mean, simulated runs of 200 documents and more ended below the tolerance
# in 19 of 20 with these, also if long answers cost more.
_TOLERANCE = 0.05
_ERRORS = 3.0
_CENSORED = 24.0  # documents in work hide more of the mean, the more of all they are


@dataclass
class DocumentCosts:
    """Costs and times of the documents that have ended in this process.

    A cost is a share of the limits. The sum may differ from what was spent: ``_room`` scales it.

    Attributes:
        longest: the longest time, in milliseconds.
        longest_unpaid: the longest time of a document that has cost nothing, in milliseconds.
    """

    ended: int = 0
    total: float = 0.0
    squares: float = 0.0
    milliseconds: float = 1.0
    longest: float = 0.0
    longest_unpaid: float = 0.0

    def add(self, cost: float, milliseconds: float) -> None:
        self.ended += 1
        self.total += cost
        self.squares += cost * cost
        self.milliseconds += milliseconds
        self.longest = max(self.longest, milliseconds)

    def mean(self, ages: Sequence[float]) -> float:
        """Returns the mean cost of documents, also of those in work.

        Short documents end first. So the cost of all, with what those in work have cost at the rate
        of all, is divided by the number of those that have ended, as for exponential times. One
        that hangs has cost no more than the longest.

        Args:
            ages: milliseconds since each document in work began.
        """
        begun = sum(min(age, self.longest) for age in ages) / self.milliseconds
        return self.total * (1 + begun) / self.ended

    def error(self, in_work: int) -> float:
        ended = self.ended
        variance = max(0.0, ended * self.squares / self.total**2 - 1)
        return _ERRORS * math.sqrt(variance * in_work + _CENSORED * in_work**3 / ended**2)


@dataclass
class _Poll:
    by_folder: dict[str, RunTotals] = field(default_factory=dict)
    whole: RunTotals = NO_TOTALS


class RunReader:
    """Adds up the totals of all tasks of a run, here and on the mirror. A process has one reader
    for a run.

    Attributes:
        room: number of documents that may begin before ``LimitWatch`` computes it again.
        at_start: the sums at the first poll, without what this process had spent by then.
    """

    def __init__(self, root: Path, mirror: str | None) -> None:
        self.root = root
        self._readers = [TotalsReader(root)]
        if mirror is not None:
            self._readers.append(MirrorTotals(mirror))
        self._guard = threading.Lock()
        self._interval = Interval("auto", _LOOKS)
        self._began_at = self._next_look = 0.0
        self._poll = _Poll()
        self.at_start = NO_TOTALS
        self.tasks: set[LimitWatch] = set()
        self.costs = DocumentCosts()
        self.room = 0

    def read(self, without: str = "", anew: bool = True) -> RunTotals:
        """Returns the sums over all tasks.

        Args:
            anew: read the files now. Otherwise, the sums of the last poll may be returned.
        """
        called_at = time.monotonic()
        with self._guard:
            is_due = time.monotonic() >= self._next_look
            # Many tasks that start together share a poll.
            if is_due or (anew and self._began_at < called_at):
                is_first = not self._began_at
                self._began_at = time.monotonic()
                by_folder: dict[str, RunTotals] = {}
                for reader in self._readers:
                    for name, totals in reader.read().items():
                        by_folder[name] = totals | by_folder.get(name, NO_TOTALS)
                whole = sum(by_folder.values(), NO_TOTALS)
                if is_first or whole.tokens < self.at_start.tokens:  # the run has begun anew
                    own = [RunTotals.of(task.checkpoint.own) for task in list(self.tasks)]
                    self.at_start = whole - sum(own, NO_TOTALS)
                self._poll = _Poll(by_folder, whole)
                ended = time.monotonic()
                self._interval.took(ended - self._began_at)
                self._next_look = ended + self._interval.seconds
        copied = list(self._poll.by_folder.items())  # the event loop changes it
        return sum((totals for name, totals in copied if name != without), NO_TOTALS)

    @property
    def number(self) -> int:
        """Counts the tasks that have begun."""
        return len(self._poll.by_folder)

    @property
    def seconds(self) -> float:
        return self._interval.seconds if self.number > 1 else 0.0

    def now(self) -> RunTotals:
        """Returns the sums over all tasks, which are exact for those that run in this process.

        Called on the event loop for each document: sums over 10,000 tasks would keep it for 30 ms.
        """
        poll = self._poll
        for task in self.tasks:
            totals = task.checkpoint.totals
            others = poll.whole - poll.by_folder.get(task.name, NO_TOTALS)
            poll.by_folder[task.name] = totals
            poll.whole = others + totals
        return poll.whole

    @property
    def has_polled(self) -> bool:
        return self._next_look > 0.0


class MirrorTotals(TotalsReader):
    """Reads the tasks' totals from a copy of a mirror. Each ``read`` updates the copy if the mirror
    can be read.
    """

    def __init__(self, url: str) -> None:
        from datatrove_ckpt.mirror.restore import MirrorReader

        folder = tempfile.mkdtemp(prefix="datatrove-ckpt-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        super().__init__(Path(folder))
        self._mirror = MirrorReader(url, self.root, _is_wanted)
        self._has_warned = False

    def read(self) -> dict[str, RunTotals]:
        try:
            self._mirror.refresh()
        except CkptError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(f"The progress of tasks on other nodes is unknown: {error}")
        return super().read()


def _is_wanted(name: str, size: int) -> bool:
    return name in (layout.COMMITS, layout.HISTORY, layout.PAID)


@lru_cache(8)
def _reader(root: Path, mirror: str | None, pid: int) -> RunReader:
    return RunReader(root, mirror)


def _reader_of(step: RunnerSettings) -> RunReader:
    root = Path(str(step.checkpoints_local_dir))
    with suppress(ConfigError):  # the node that starts jobs may lack a variable of the jobs
        root = step.checkpoints_root
    mirror = step.checkpoints_remote_dir if step.limits else None
    return _reader(root, mirror, os.getpid())


def limit_reached(steps: Iterable[object]) -> LimitReached | None:
    for step in steps:
        if isinstance(step, RunnerSettings) and step.limits:
            reader = _reader_of(step)
            reached: LimitReached | None = step.limits.reached(reader.read(), reader.seconds)
            if reached is not None:
                return reached
    return None


@dataclass(eq=False)
class LimitWatch:
    """Stops one task at the run's limits, and holds back documents before."""

    step: RunnerSettings
    checkpoint: OpenCheckpoint
    shutdown: Shutdown
    other_totals: RunTotals = NO_TOTALS
    began: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._limits = self.step.limits
        self.is_on = bool(self._limits)
        self.is_paid = bool(self._limits.of_usage)
        self.reader = _reader_of(self.step)
        self.name = str(layout.RankAddress.of(self.checkpoint.folder))
        self.reader.tasks.add(self)

    def affords(self, ordinal: int) -> bool:
        """Begins a document, if it may."""
        reader = self.reader
        if reader.room < 1:
            reader.room = self._room()
        reader.room -= 1
        if reader.room < 0:
            return False
        self.begin(ordinal)
        return True

    def begin(self, ordinal: int) -> None:
        self.began[ordinal] = time.monotonic()

    def end(self, document: FinishedDocument, is_paid: bool, cost: int) -> None:
        """Ends a document.

        Args:
            is_paid: not all of its answers were there before.
            cost: of its new answers, in billionths.
        """
        costs = self.reader.costs
        milliseconds = 1000 * (time.monotonic() - self.began.pop(document.ordinal))
        if is_paid:
            spent = RunTotals(0, document.prompt_tokens, document.completion_tokens, cost)
            costs.add(max(self._limits.spent(spent)), milliseconds)
        else:
            costs.longest_unpaid = max(costs.longest_unpaid, milliseconds)

    def _room(self) -> int:
        reader = self.reader
        now = time.monotonic()
        ages = [1000 * (now - began) for task in reader.tasks for began in task.began.values()]
        if not ages:  # also a document that takes more than what is left
            return 1
        costs = reader.costs
        ended = costs.ended
        is_start = ended < _FEW
        # Younger documents may also cost nothing.
        likely_paid = sum(age >= costs.longest_unpaid for age in ages)
        if is_start and likely_paid >= max(_FIRST * (1 + ended), self._paid_at_earlier_mean()):
            return 0
        if not (costs.total and reader.has_polled):  # the first poll of a mirror may take minutes
            return 1
        mean = costs.mean(ages) / costs.total
        totals = reader.now()
        spent = self._limits.spent(totals)
        # Other processes have as much in work, for what they spend, as this one.
        run = self._limits.spent(totals - reader.at_start)
        for room in (max(1, ended // _RECHECKED), 1):
            in_work = len(ages) + room
            likely = mean * (ended + in_work) - 1
            at_most = likely
            if not is_start:
                at_most += mean * costs.error(in_work)
            if all(
                before + paid * likely <= 1 and before + paid * at_most <= 1 + _TOLERANCE
                for before, paid in zip(spent, run, strict=True)
            ):
                return room
        return 0

    def _paid_at_earlier_mean(self) -> float:
        """Returns how many documents this process's part of the limits pays for, at twice the mean
        of earlier attempts of its tasks; 0.0 if these finished few.
        """
        reader = self.reader
        finished = 0
        earlier = NO_TOTALS
        for task in reader.tasks:
            finished += task.checkpoint.resumed.finished.read
            earlier += task.checkpoint.totals - RunTotals.of(task.checkpoint.own)
        if finished < _FEW or not reader.has_polled:
            return 0.0
        shares = zip(self._limits.spent(reader.now()), self._limits.spent(earlier), strict=True)
        rest = min((1 - spent) / max(paid, 1e-9) for spent, paid in shares)
        return finished * rest / 2 * len(reader.tasks) / reader.number

    def may_suffice(self) -> bool:
        """Returns whether ``until`` is reached once the documents in work are written. The document
        that would begin a new chunk then waits, because that chunk may never be complete.
        """
        until = self._limits.until
        if until is None:
            return False
        return self.other_totals.written + self.checkpoint.most_written > until

    def look(self) -> None:
        """Stops the task if the run has reached a limit, unless the task has committed everything.

        Called on the event loop where a limit is set, after each answer and at intervals.
        """
        totals = self.checkpoint.totals
        if self._limits.of_usage and self.checkpoint.own.requests and not totals.tokens:
            text = "needs usage in the server's answers. Set until."
            self.shutdown.finish(ConfigError(text, setting=self._limits.of_usage))
        reached = self._limits.reached(self.other_totals + totals, self.reader.seconds)
        if reached is not None and not self.checkpoint.all_committed:
            self.shutdown.finish(reached)

    async def poll_until_reached(self) -> None:
        while True:
            self.other_totals = await asyncio.to_thread(self.reader.read, self.name, anew=False)
            looked = time.monotonic()
            while time.monotonic() < looked + _LOOKS.shortest:
                self.look()
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self.reader.now()  # it keeps the totals of this task
        self.reader.tasks.remove(self)
