"""Lets pool workers exit only between tasks, so that none dies holding a queue lock or an unsent result.

A pool waits without end for the result of a worker that died before it sent the result, and for a queue lock that a
worker held when it died (a gap in CPython's multiprocessing and in its copy ``multiprocess``, which datatrove uses):

    a task fails, the pool      a worker that is sending its result, error or not, dies with the lock of the results;
    sends SIGTERM to all        if a setting is wrong, all ranks fail at once, and a dozen such runs are enough
    one worker gets a signal    its rank drains, and its task ends with an error, which must be sent
    a worker has no task        it waits for one, and holds the lock of the tasks meanwhile

So a signal handler only sets ``_told``, and ``_Turn``, which replaces the lock of the tasks, checks it. It checks
several times a second: a signal that comes just before the process starts to wait would not wake it. While a rank runs,
``preemption.py`` handles the signals.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from multiprocess.pool import worker as _worker

_AGAIN = 0.05  # seconds
_DELIVERY = 0.5  # seconds in which the parent may end its pool, before it starts another worker instead of this one
_PATIENCE = 5.0  # seconds: nobody may take results any more, or the task may be another step's, which heeds nothing
_END_OF_TASK = 60.0  # seconds: a log on a remote that hangs must not keep the worker alive
_FATAL = (signal.SIG_DFL, signal.default_int_handler)

_told: int | None = None
_pid: int | None = None


def worker(deaf: Iterable[int], tasks: Any, *arguments: Any) -> None:
    """What a pool's process does, in the place of multiprocess's own: the same, but it leaves as told above.

    Args:
        deaf: signals that it ignores, whatever its parent did with them. It leaves of SIGTERM.
        tasks, arguments: multiprocess's.
    """
    _take_turns(tasks)
    for number in deaf:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _tell)
    _worker(tasks, *arguments)


def exit_between_tasks(numbers: Iterable[int] = ()) -> None:
    """The same from within a task: of SIGTERM and these signals, where they would end the process on the spot.

    Outside of a pool's worker: nothing.
    """
    frame = _frame_of_worker()
    if frame is not None:
        _take_turns(frame.f_locals["inqueue"])
        for number in {signal.SIGTERM, *numbers}:
            if signal.getsignal(number) in _FATAL:
                signal.signal(number, _tell)


def exit_after_this_task(number: int) -> None:
    """The worker takes no other task: it leaves, as of this signal, once it has handed in what this one ends with.

    Outside of a pool's worker: nothing.
    """
    frame = _frame_of_worker()
    if frame is not None:
        _take_turns(frame.f_locals["inqueue"])
        signal.signal(number, _tell)
        _note(number, _END_OF_TASK)


def stop_signal() -> int | None:
    """The signal that this worker leaves of."""
    return _told


def exits_on(number: int) -> bool:
    """Whether a worker that gets this signal now leaves between tasks."""
    return signal.getsignal(number) is _tell


def _take_turns(tasks: Any) -> None:
    global _pid
    _pid = os.getpid()
    if not isinstance(tasks._rlock, _Turn):
        tasks._rlock = _Turn(tasks)


def _tell(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _pid:  # something that a task forked
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    else:
        _note(number, _PATIENCE)


def _note(number: int, seconds: float) -> None:
    """The worker leaves soon, and after so many seconds wherever it is."""
    global _told
    _told = _told or number
    # Not threading's: its start takes locks, and a signal handler may have interrupted somebody who has them.
    _thread.start_new_thread(_leave, (number, seconds))


class _Turn:
    """Stands for the lock that a worker has while it waits for a task and takes it."""

    def __init__(self, tasks: Any) -> None:
        self._lock = tasks._rlock
        self._tasks = tasks._reader

    def __enter__(self) -> None:
        if _told is not None:
            _leave(_told, _DELIVERY)
        try:
            while not self._lock.acquire(timeout=_AGAIN):
                if _told is not None:
                    _leave(_told)
            while _told is None and not self._tasks.poll(_AGAIN):
                pass
        except BaseException:  # of somebody else's signal handler
            if self._lock._semlock._is_mine():
                self._lock.release()
            raise
        if _told is not None:
            self._lock.release()
            _leave(_told)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _leave(number: int, delay: float = 0.0) -> NoReturn:
    """Not by an exception: it would have to get past threads that a task left behind."""
    time.sleep(delay)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(128 + number)


def _frame_of_worker() -> FrameType | None:
    """None in another thread, and in what a task forked, whose frames are the worker's copies."""
    frame: FrameType | None = sys._getframe() if _pid in (None, os.getpid()) else None
    while frame is not None and frame.f_code is not _worker.__code__:
        frame = frame.f_back
    return frame
