"""Stops a task when the run has reached ``until``, ``max_cost`` or ``max_total_tokens``."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.interval import Interval, Tuning
from datatrove_ckpt.checkpoint.run_limits import NO_TOTALS, RunTotals, TotalsReader
from datatrove_ckpt.errors import CkptError, ConfigError, LimitReached
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.process.shutdown import Shutdown

if TYPE_CHECKING:
    from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint

# A poll of 10,000 tasks takes 0.1 s on a local disk, and seconds on others.
_LOOKS = Tuning(share=0.02, shortest=0.1, longest=60.0, first=1.0)


class RunReader:
    """Adds up the totals of all tasks of a run, here and on the mirror. A process has one reader
    for a run.
    """

    def __init__(self, root: Path, mirror: str | None) -> None:
        self.root = root
        self._readers = [TotalsReader(root)]
        if mirror is not None:
            self._readers.append(MirrorTotals(mirror))
        self._guard = threading.Lock()
        self._interval = Interval("auto", _LOOKS)
        self._began_at = self._next_look = 0.0
        self._by_folder: dict[str, RunTotals] = {}

    def read(self, without: str = "", anew: bool = True) -> RunTotals:
        """Returns the sums over all tasks.

        Args:
            without: folder of a task that is not counted.
            anew: read the files now. Otherwise, the sums of the last poll may be returned.
        """
        called_at = time.monotonic()
        with self._guard:
            is_due = time.monotonic() >= self._next_look
            # Many tasks that start together share a poll.
            if is_due or (anew and self._began_at < called_at):
                self._began_at = time.monotonic()
                by_folder: dict[str, RunTotals] = {}
                for reader in self._readers:
                    for name, totals in reader.read().items():
                        by_folder[name] = totals | by_folder.get(name, NO_TOTALS)
                self._by_folder = by_folder
                ended = time.monotonic()
                self._interval.took(ended - self._began_at)
                self._next_look = ended + self._interval.seconds
            by_folder = self._by_folder
        return sum((by_folder[name] for name in by_folder if name != without), NO_TOTALS)


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
    return _reader(root, step.checkpoints_remote_dir, os.getpid())


def limit_reached(steps: Iterable[object]) -> LimitReached | None:
    """Returns the first limit that the run of a pipeline has reached."""
    for step in steps:
        if isinstance(step, RunnerSettings) and step.limits:
            reached: LimitReached | None = step.limits.reached(_reader_of(step).read())
            if reached is not None:
                return reached
    return None


@dataclass(eq=False)
class LimitWatch:
    """Stops one task when the run has reached its limits.

    Attributes:
        other_totals: totals of the other tasks at the last poll.
    """

    step: RunnerSettings
    checkpoint: OpenCheckpoint
    shutdown: Shutdown
    other_totals: RunTotals = NO_TOTALS

    def __post_init__(self) -> None:
        self._limits = self.step.limits
        self.is_on = bool(self._limits)

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

        Called on the event loop, after each answer and at intervals.
        """
        if self.is_on:
            totals = self.checkpoint.totals
            if self._limits.of_usage and self.checkpoint.own.requests and not totals.tokens:
                text = "cannot end this run: the server's answers have no usage. Set until."
                self.shutdown.finish(ConfigError(text, setting=self._limits.of_usage))
            reached = self._limits.reached(self.other_totals + totals)
            if reached is not None and not self.checkpoint.all_committed:
                self.shutdown.finish(reached)

    async def poll_until_reached(self) -> None:
        reader = _reader_of(self.step)
        name = str(self.checkpoint.folder.relative_to(reader.root))
        while True:
            self.other_totals = await asyncio.to_thread(reader.read, name, anew=False)
            looked = time.monotonic()
            while time.monotonic() < looked + _LOOKS.shortest:
                self.look()
                await asyncio.sleep(0.01)
