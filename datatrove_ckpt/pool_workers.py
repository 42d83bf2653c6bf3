"""How a worker of multiprocess's pool leaves: where it would take its next task, with no result and no lock.

A pool waits for ever for the result of a worker that died before it handed it in, and for the lock of a queue that a
worker died with (CPython's multiprocessing has these gaps, and so has its copy ``multiprocess``, which datatrove uses):

    a task fails, the pool      of a worker that hands in its result meanwhile, error or not, it is ended with the lock
    sends SIGTERM to all        of the results; when a setting is wrong, all ranks fail at once, and a dozen runs do it
    a worker is told alone      its rank drains, and its task ends with an error, which must be handed in
    a worker has no task        it waits for one, and has the lock of the tasks while it does

So a signal only leaves a note, and ``_Turn``, in the place of the lock of the tasks, heeds it. It looks several times a
second: a signal that comes just before the process begins to wait would not wake it. While a rank runs, signals are
preemption.py's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NoReturn

from multiprocess.pool import worker as _worker

_AGAIN = 0.05  # seconds
_DELIVERY = 0.5  # seconds in which the parent may end its pool, before it starts another worker instead of this one
_PATIENCE = 5.0  # seconds: nobody may take results any more, or the task may be another step's, which heeds nothing
_END_OF_TASK = 60.0  # seconds: a log on a remote that hangs must not keep the worker alive

_told: int | None = None


def worker(tasks: Any, *arguments: Any) -> None:
    """What a pool's process does, in the place of multiprocess's own: the same, but it leaves as told above."""
    signal.signal(signal.SIGTERM, _tell)  # a parent that forked it may have left its own
    _take_turns(tasks)
    _worker(tasks, *arguments)


def leave_between_tasks() -> None:
    """The same from within a task, where nobody else handles SIGTERM. Outside of a pool's worker: nothing."""
    frame = _frame_of(_worker.__code__, sys._getframe())  # none in another thread either
    if frame is not None:
        _take_turns(frame.f_locals["inqueue"])
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _tell)


def leave_after_this_task(number: int) -> None:
    """The worker takes no other task: it leaves, as of this signal, once it has handed in what this one ends with.

    Outside of a pool's worker: nothing.
    """
    frame = _frame_of(_worker.__code__, sys._getframe())
    if frame is not None:
        _take_turns(frame.f_locals["inqueue"])
        signal.signal(number, _tell)
        _note(number, _END_OF_TASK)


def told() -> int | None:
    """The signal that this worker leaves of."""
    return _told


def leaves_of(number: int) -> bool:
    """Whether a worker that gets this signal now leaves between tasks."""
    return signal.getsignal(number) is _tell


def _take_turns(tasks: Any) -> None:
    if not isinstance(tasks._rlock, _Turn):
        tasks._rlock = _Turn(tasks)


def _tell(number: int, frame: FrameType | None) -> None:
    _note(number, _PATIENCE)


def _note(number: int, seconds: float) -> None:
    """The worker leaves soon, and after so many seconds wherever it is."""
    global _told
    _told = _told or number
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, min(left or seconds, seconds))


class _Turn:
    """Stands for the lock that a worker has while it waits for a task and takes it."""

    def __init__(self, tasks: Any) -> None:
        self._lock = tasks._rlock
        self._tasks = tasks._reader

    def __enter__(self) -> None:
        if _told is not None:
            _leave(_told, _DELIVERY)
        while not self._lock.acquire(timeout=_AGAIN):
            if _told is not None:
                _leave(_told)
        while _told is None and not self._tasks.poll(_AGAIN):
            pass
        if _told is not None:
            self._lock.release()
            _leave(_told)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _leave(number: int, delay: float = 0.0) -> NoReturn:
    """Not by an exception: it would have to get past threads that a task left behind."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    time.sleep(delay)
    os._exit(128 + number)


def _frame_of(code: CodeType, frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
