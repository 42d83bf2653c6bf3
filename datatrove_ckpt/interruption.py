"""What the command does with the signals that its ranks drain on: it waits for them, and tells the pool's workers.

``preemption.py`` is the rank's side of it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

import multiprocess
import multiprocess.forkserver
from multiprocess.pool import Pool

from datatrove_ckpt.preemption import SAME_EVENT

_AGAIN = 0.01  # seconds
_DEAD = 100  # times: a worker that lives would have read by then what is there to be read
_FATAL = (signal.SIG_DFL, signal.default_int_handler)


class Signalled(KeyboardInterrupt):
    """A signal as an exception: whatever ends in good order on Ctrl-C does so on this one, too."""


class Interruption:
    """``with Interruption(signals) as interruption:`` around what a command does, in one process or in a pool.

    Signals that would end this process on the spot raise ``Signalled`` instead. The pool then terminates its workers,
    which drain, and waits for them; a lock that one of them died with does not keep it.

    Attributes:
        number: the signal that came.
    """

    def __init__(self, signals: Sequence[str]) -> None:
        self.number: int | None = None
        self._borrowed: dict[int, Any] = {}
        self._names = signals
        self._came = 0.0
        self._workers: list[int] = []
        self._helps = Pool.__dict__["_help_stuff_finish"]
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        for name in dict.fromkeys([*self._names, "SIGINT"]):
            number = signal.Signals[name]
            if signal.getsignal(number) in _FATAL:
                self._borrowed[number] = signal.signal(number, self._receive)
        Pool._help_stuff_finish = staticmethod(_help_task_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._borrowed.items():
            signal.signal(number, previous)
        Pool._help_stuff_finish = self._helps

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker that was forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.number is None:
            self.number = number
            self._came = time.monotonic()
            self._workers = list(_pool_workers())
        elif time.monotonic() - self._came > SAME_EVENT:
            self._tell_workers()
        else:
            return  # the first one is being acted on
        raise Signalled(signal.Signals(number).name)

    def _tell_workers(self) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGTERM)

    def wait_for_workers(self) -> None:
        """Until they are gone. The pool does not wait if the same signal ended its fork server, which knew them."""
        for worker in self._workers:
            select.select([worker], [], [])


def _help_task_handler(tasks: Any, task_handler: threading.Thread, _: int) -> None:
    """In place of the pool's own, which waits for ever for the lock of its tasks if a worker died with it.

    A worker without a task has that lock while it waits for one, and ends of a SIGTERM to the whole process group. The
    lock is needed only to make room for a task handler that has more to put than the pipe holds.
    """
    unread = 0
    while not tasks._rlock.acquire(timeout=_AGAIN) and task_handler.is_alive() and unread < _DEAD:
        unread = unread + 1 if tasks._reader.poll() else 0
    while task_handler.is_alive():
        if tasks._reader.poll(_AGAIN):
            os.read(tasks._reader.fileno(), 1 << 20)  # not a task: who died may have read half of one


def _pool_workers() -> Iterator[int]:
    """A pidfd of each; they are children of the fork server. Where there are none (macOS) nobody waits for them."""
    for child in multiprocess.active_children():
        if "PoolWorker" in child.name and hasattr(os, "pidfd_open"):
            with suppress(ProcessLookupError):
                yield os.pidfd_open(child.pid)


def start_deaf_workers(names: Sequence[str]) -> None:
    """Starts multiprocess's fork server so that it, and pool workers without a task, ignore these signals.

    A signal to the whole process group, as Ctrl-C is one, would end some of them with tracebacks, and the parent ends
    all of them anyway: with SIGTERM, the only one that they heed. In a task, a worker has handlers of its own.
    """
    numbers = {signal.Signals[name] for name in [*names, "SIGINT"]} - {signal.SIGTERM}
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        multiprocess.forkserver.ensure_running()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
