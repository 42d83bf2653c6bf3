"""What the command does with the signals that its ranks drain on: it waits for them, and tells the pool's workers.

``preemption.py`` is the rank's side of it, ``pool_workers.py`` that of a worker between two ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

import multiprocess
import multiprocess.forkserver
import multiprocess.pool

from datatrove_ckpt import pool_workers
from datatrove_ckpt.preemption import SAME_EVENT

_FATAL = (signal.SIG_DFL, signal.default_int_handler)


class Signalled(KeyboardInterrupt):
    """A signal as an exception: whatever ends in good order on Ctrl-C does so on this one, too."""


class Interruption:
    """``with Interruption(signals) as interruption:`` around what a command does, in one process or in a pool.

    Signals that would end this process on the spot raise ``Signalled`` instead. The pool then terminates its workers,
    which drain, and waits for them.

    Args:
        signals: those that ranks drain on; none where there are no ranks.

    Attributes:
        number: the signal that came.
    """

    def __init__(self, signals: Sequence[str]) -> None:
        self.number: int | None = None
        self._borrowed: dict[int, Any] = {}
        self._names = signals
        self._came = 0.0
        self._worker = multiprocess.pool.worker
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        for name in dict.fromkeys([*self._names, "SIGINT"]):
            number = signal.Signals[name]
            if signal.getsignal(number) in _FATAL:
                self._borrowed[number] = signal.signal(number, self._receive)
        if self._names:  # other tasks heed no note that a signal leaves
            multiprocess.pool.worker = pool_workers.worker
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._borrowed.items():
            signal.signal(number, previous)
        multiprocess.pool.worker = self._worker

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker that was forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.number is None:
            self.number = number
            self._came = time.monotonic()
        elif time.monotonic() - self._came > SAME_EVENT:
            for worker in _pool_workers():
                worker.terminate()
        else:
            return  # the first one is being acted on
        raise Signalled(signal.Signals(number).name)

    def wait_for_workers(self) -> None:
        """Until they are gone, where a second signal kept the pool from it."""
        for worker in _pool_workers():
            worker.join()


def _pool_workers() -> list[Any]:
    return [child for child in multiprocess.active_children() if "PoolWorker" in child.name]


def start_fork_server(names: Sequence[str]) -> None:
    """Starts multiprocess's fork server so that it ignores these signals, and pool workers without a task, too.

    A signal to the whole process group, as Ctrl-C is one, would end some of them with tracebacks, and the parent ends
    the workers anyway: with SIGTERM, the only one that they heed. In a task, a worker has handlers of its own.
    """
    multiprocess.forkserver.set_forkserver_preload(["__main__", "datatrove_ckpt.fork_server"])
    numbers = {signal.Signals[name] for name in [*names, "SIGINT"]} - {signal.SIGTERM}
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        multiprocess.forkserver.ensure_running()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
