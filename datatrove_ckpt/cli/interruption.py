"""What the command does on a signal: it sends SIGTERM to the pool's workers, and waits until their ranks are saved.

``process/preemption.py`` handles signals in a rank, ``process/pool_workers.py`` in a worker between two ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

import multiprocess
import multiprocess.forkserver
import multiprocess.pool
from multiprocess import util
from multiprocess.managers import BaseManager
from multiprocess.pool import Pool

from datatrove_ckpt.process import pool_workers
from datatrove_ckpt.process.preemption import SAME_EVENT

_AGAIN = 10.0  # seconds
_FATAL = (signal.SIG_DFL, signal.default_int_handler)


class Signalled(KeyboardInterrupt):
    """A signal as an exception: whatever ends in good order on Ctrl-C does so on this one, too."""


class Interruption:
    """``with Interruption(signals) as interruption:`` around what a command does, in one process or in a pool.

    Signals that would end this process on the spot raise ``Signalled`` instead. The pool then terminates its workers,
    which drain, and waits for them; of a second signal they end at once. A pool or manager that is being made is
    completed, and then ended: nobody would know the processes of half of one.

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
        self._making = False
        self._originals = multiprocess.pool.worker, Pool.__init__, BaseManager.start
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        for name in dict.fromkeys([*self._names, "SIGINT"]):
            number = signal.Signals[name]
            if signal.getsignal(number) in _FATAL:
                self._borrowed[number] = signal.signal(number, self._receive)
        if self._names:  # other tasks heed no note that a signal leaves
            multiprocess.pool.worker = partial(pool_workers.worker, _deaf_to(self._names))
        Pool.__init__ = self._whole(Pool.__init__, Pool.terminate)
        BaseManager.start = self._whole(BaseManager.start, lambda manager: manager.shutdown())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.number is not None:
            with suppress(KeyboardInterrupt):
                _end_children()
        for number, previous in self._borrowed.items():
            signal.signal(number, previous)
        multiprocess.pool.worker, Pool.__init__, BaseManager.start = self._originals

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker that was forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.number is None:
            self.number = number
            self._came = time.monotonic()
            if self._making:
                return
        elif time.monotonic() - self._came > SAME_EVENT:
            for child in multiprocess.active_children():
                if "PoolWorker" in child.name:
                    child.terminate()
        else:
            return  # the first one is being acted on
        raise Signalled(signal.Signals(number).name)

    def _whole(self, make: Callable[..., None], end: Callable[[Any], None]) -> Callable[..., None]:
        def made(self_: Any, *arguments: Any, **options: Any) -> None:
            self._making = True
            try:
                make(self_, *arguments, **options)
            finally:
                self._making = False
            if self.number is not None:
                end(self_)
                raise Signalled(signal.Signals(self.number).name)

        return made


def _end_children() -> None:
    """Those that nobody has ended: a signal came between two lines, say, or a second one did."""
    util._run_finalizers(0)  # of pools and managers, as at the interpreter's exit
    while children := multiprocess.active_children():
        for child in children:
            child.terminate()
        deadline = time.monotonic() + _AGAIN
        for child in children:  # one that was just forked may lose a signal: Python forgets those of the parent
            child.join(max(0.0, deadline - time.monotonic()))


def _deaf_to(names: Sequence[str]) -> set[signal.Signals]:
    """What a pool's workers ignore as long as they have no rank: the parent tells them by SIGTERM."""
    return {signal.Signals[name] for name in [*names, "SIGINT"]} - {signal.SIGTERM}


def start_fork_server(names: Sequence[str]) -> None:
    """Starts multiprocess's fork server so that it ignores these signals, and pool workers without a task, too.

    A signal to the whole process group, as Ctrl-C is one, would end some of them with tracebacks, and the parent ends
    the workers anyway: with SIGTERM, the only one that they heed. In a task, a worker has handlers of its own.
    """
    # What a worker imports takes a second: once, and not in each of them.
    multiprocess.forkserver.set_forkserver_preload(
        ["__main__", "datatrove_ckpt.process.fork_server", "datatrove_ckpt.cli.run"]
    )
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in _deaf_to(names)}
    try:
        multiprocess.forkserver.ensure_running()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
