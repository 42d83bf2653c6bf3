"""What the command does on a signal: it lets every rank save what it has, and ends with one line.

``process/preemption.py`` handles signals in a rank, ``process/workers.py`` in the process that waits for workers.
Before and after them, and in datatrove's own executors, a signal is an exception.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import multiprocess

_FATAL = (signal.SIG_DFL, signal.default_int_handler)
_TO_END = 10.0  # seconds for all that datatrove's executors left behind


class Signalled(KeyboardInterrupt):
    """A signal as an exception: whatever ends in good order on Ctrl-C does so on this one, too."""


class Interruption:
    """``with Interruption(signals) as interruption:`` around what a command does.

    Signals that would end this process on the spot raise ``Signalled`` instead.

    Args:
        signals: names of further signals than SIGINT, SIGTERM and SIGHUP.

    Attributes:
        number: the signal that came.
    """

    def __init__(self, signals: Sequence[str]) -> None:
        self.number: int | None = None
        self._names = dict.fromkeys(["SIGINT", "SIGTERM", "SIGHUP", *signals])
        self._borrowed: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        for name in self._names:
            number = signal.Signals[name]
            if signal.getsignal(number) in _FATAL:
                self._borrowed[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.number is not None:
            _end_children()
        for number, previous in self._borrowed.items():
            signal.signal(number, previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker that datatrove's executor forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.number = self.number or number
        raise Signalled(signal.Signals(number).name)


def _end_children() -> None:
    """Those of datatrove's pools that a second signal left."""
    children = multiprocess.active_children()
    for child in children:
        child.terminate()
    deadline = time.monotonic() + _TO_END
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()
