"""How a worker of multiprocess's pool leaves: not before it has handed in its task's result, and with no lock.

A pool waits for ever for the result of a worker that died before it handed it in, and for the lock of a queue that a
worker died with (CPython's multiprocessing has these gaps, and so has its copy ``multiprocess``, which datatrove uses):

    a task fails, the pool      of a worker that hands in its result meanwhile, error or not, it is ended with the lock
    sends SIGTERM to all        of the results; when a setting is wrong, all ranks fail at once, and a dozen runs do it
    a worker is told alone      its rank drains, and its task ends with an error: that one is handed in, and then the
                                worker ends where it would take its next task
    a worker has no task        it waits for one, and has the lock of the tasks while it does

So once its rank is over, a worker ends of SIGTERM only after it has handed in its result, and one that waits for a task
gives back the lock. A thread sees to that: a signal handler written in Python may have to wait until the main thread
comes back from a lock, and that can be never. What the command does for workers without a rank is in interruption.py.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NoReturn

import multiprocess
from multiprocess import pool
from multiprocess.queues import SimpleQueue

_PATIENCE = 5.0  # seconds: a queue that nobody empties must not keep the worker alive
_END_OF_TASK = 60.0  # seconds: nor must a task that does not end, as with a log on a remote that hangs
_DELIVERY = 0.5  # seconds in which the parent may end its pool, before it starts another worker instead of this one
_AGAIN = 0.01  # seconds

_sentry: tuple[socket.socket, socket.socket] | None = None


def hand_in_before_sigterm() -> None:
    """In a pool's worker whose rank is over: SIGTERM waits until the result is handed in. Elsewhere: nothing."""
    global _sentry
    if multiprocess.parent_process() is None or threading.current_thread() is not threading.main_thread():
        return
    if _sentry is None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        hears, told = _sentry = socket.socketpair()
        told.setblocking(False)
        threading.Thread(
            target=_wait_for_sigterm, args=(hears, _tasks_done()), name="datatrove-ckpt SIGTERM", daemon=True
        ).start()
        signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _tell)


def sigterm_as_usual() -> None:
    """The worker begins another task."""
    global _sentry
    if _sentry is not None:
        if signal.getsignal(signal.SIGTERM) is _tell:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _sentry[1].close()  # the thread ends of it
        _sentry = None


def _tell(number: int, frame: FrameType | None) -> None:
    """The thread has been told already, unless a later step took the descriptor, as an event loop does."""
    if _sentry is not None:
        with suppress(OSError):
            _sentry[1].send(bytes([number]))


def _wait_for_sigterm(hears: socket.socket, done: int | None) -> None:
    with hears:
        while (told := hears.recv(1)) and not (told[0] == signal.SIGTERM and signal.getsignal(told[0]) is _tell):
            pass
    if not told:
        return
    try:
        if done is not None and _tasks_done() == done:
            _take_no_task(_frame_of(pool.worker.__code__, _main_frame()), signal.SIGTERM)
        _wait_while(lambda: _is_handing_in() or (done is not None and _tasks_done() == done), _PATIENCE)
        _give_back_the_lock_of_the_tasks()
    finally:  # the main thread moves on meanwhile; whatever it made of its frames and locks, the worker ends
        os._exit(128 + signal.SIGTERM)


def end_after_this_task(number: int) -> None:
    """The worker takes no other task: it ends, as of this signal, once it has handed in what this one ends with.

    Outside of a pool's worker: nothing.
    """
    worker = _frame_of(pool.worker.__code__, sys._getframe())
    if worker is not None:
        _take_no_task(worker, number)
        threading.Thread(target=_end_at_the_latest, args=(number,), daemon=True).start()


def _take_no_task(worker: FrameType | None, number: int) -> None:
    if worker is not None:
        worker.f_locals["inqueue"]._rlock = _End(number)


class _End:
    """Stands where the lock was that a worker takes before it takes a task.

    Not a timer: the worker must not end before its result is handed in, nor take a task with it. And not an exception:
    it would have to get past threads that the task left behind.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        time.sleep(_DELIVERY)
        os._exit(128 + self._number)

    def __exit__(self, *_: object) -> None: ...


def _end_at_the_latest(number: int) -> None:
    """If the pool is being ended, it waits for this process, and may take no result any more."""
    _wait_while(lambda: not _is_handing_in(), _END_OF_TASK)
    _wait_while(_is_handing_in, _PATIENCE)
    os._exit(128 + number)


def _wait_while(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while condition() and time.monotonic() < deadline:
        time.sleep(_AGAIN)


def _is_handing_in() -> bool:
    return _frame_of(SimpleQueue.put.__code__, _main_frame()) is not None


def _give_back_the_lock_of_the_tasks() -> None:
    waiting = _frame_of(SimpleQueue.get.__code__, _main_frame())
    lock: Any = waiting.f_locals["self"]._rlock if waiting is not None else None
    # Where an ``_End`` stands for it, the main thread is about to end in there, and has no lock.
    if lock is not None and not isinstance(lock, _End) and lock._semlock._count():  # this process has it
        lock.release()


def _tasks_done() -> int | None:
    """By this worker of a pool; None elsewhere."""
    worker = _frame_of(pool.worker.__code__, _main_frame())
    return None if worker is None else worker.f_locals["completed"]


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _frame_of(code: CodeType, frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
