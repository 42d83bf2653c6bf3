"""What a command shows while its ranks run: one bar on a terminal, elsewhere a line in the log from time to time.

    ranks in this process      report here, and each report draws
    ranks in our workers       report over their pipe; who waits for the pipes calls ``tick``
    elsewhere                  a rank has a screen of its own

There is one screen at a time in a process. ``Reporter`` is what a rank sees of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import multiprocess
from loguru import logger

from datatrove_ckpt.process.run_progress import RankProgress, RunProgress, bar
from datatrove_ckpt.process.terminal import BarTerminal, has_terminal

TICK_SECONDS = 0.5
"""How often a bar is drawn."""
_FIRST_LINE_SECONDS = 10.0

Report = Callable[[int, RankProgress], object]
"""Takes a rank and where it stands."""

_report: Report | None = None


class LogLines:
    """Lines about a run in the log: the first one after 10 seconds, then one each interval.

    Args:
        interval: seconds.
        log: how a line is logged.
        clock: like ``time.monotonic``.
    """

    def __init__(
        self,
        progress: RunProgress,
        interval: float,
        log: Callable[[str], object] = logger.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress = progress
        self._interval = interval
        self._log = log
        self._clock = clock
        self._next = clock() + min(_FIRST_LINE_SECONDS, interval)

    def tick(self) -> None:
        """Logs a line if it is time for one. To be called about once a second."""
        self.progress.sample()
        if (now := self._clock()) >= self._next:
            self._next = now + self._interval
            self._log(self.progress.line())


class Screen:
    """``with Screen(progress, interval) as screen:`` around the ranks of a command.

    Args:
        progress: what is shown.
        interval: seconds between two lines in the log, see ``LogLines``.
        clock: like ``time.monotonic``.
    """

    def __init__(self, progress: RunProgress, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress = progress
        self._lines = LogLines(progress, interval, clock=clock)
        self._clock = clock
        self._drawn_at = 0.0
        self._terminal: BarTerminal | None = None
        self._outer = _report

    @property
    def has_bar(self) -> bool:
        return self._terminal is not None

    def __enter__(self) -> Self:
        global _report
        self._outer, _report = _report, self.update
        if has_terminal() and multiprocess.parent_process() is None:
            self._terminal = BarTerminal(lambda columns: bar(self.progress, columns)).__enter__()
            self._terminal.draw()
        return self

    def __exit__(self, *error: object) -> None:
        global _report
        _report = self._outer
        if self._terminal is not None:
            self._terminal.__exit__(*error)
            self._terminal = None

    def update(self, rank: int, progress: RankProgress) -> None:
        """A rank has reported."""
        self.progress.update(rank, progress)
        self.tick()

    def complete(self, rank: int) -> None:
        """A rank is complete."""
        self.progress.complete(rank)
        self._drawn_at = 0.0
        self.tick()

    def tick(self) -> None:
        """Draws the bar, or logs a line if it is time for one. To be called about every ``TICK_SECONDS``."""
        if self._terminal is None:
            self._lines.tick()
        elif (now := self._clock()) >= self._drawn_at + TICK_SECONDS / 2:
            self._drawn_at = now
            self.progress.sample()
            self._terminal.draw()


def reporter() -> Report | None:
    """Where a rank of this process reports; None: it needs a screen of its own."""
    return _report


@contextmanager
def reporting_to(report: Report, below: bool) -> Iterator[None]:
    """In a worker: its ranks report there.

    Args:
        below: the process there draws a bar on the terminal of this one.
    """
    global _report
    before, _report = _report, report
    try:
        if below and sys.stderr is not None and has_terminal():
            with BarTerminal():
                yield
        else:
            yield
    finally:
        _report = before
