"""Lets forks wait while another thread starts a program, or a reader's thread may do so.

A fork copies the pipes that another thread has open. ``subprocess.Popen`` returns only when all
copies of its pipe are closed, and a worker of a rollout's process pool keeps its copy until the run
ends, which waits for the reader.

    a fork in a rollout   waits until each reader is between two documents. A reader waits for the
                          forks that came before its next document
    any fork              waits while ``Popen`` has pipes open in another thread
    a program's start     does not wait, because a program closes the copies

Only forks in rollouts wait for readers: a reader may wait for the thread of a pool, which forks the
pool's workers.
"""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# A reader that is not between two documents by then may wait for the rollout, so no fork waits for
# it until its next document.
_SECONDS = 5.0
_POLL_SECONDS = 0.001
_STARTERS = ("subprocess", "asyncio.subprocess")  # modules; uvloop forks below the second one
_OPENERS = ("subprocess", "multiprocessing.popen_fork", "multiprocess.popen_fork")
_is_rollout = ContextVar("is_rollout", default=False)  # ``asyncio.to_thread`` passes it on
_lock = threading.RLock()  # a signal handler may fork
_reads: set[object] = set()
_forks: set[object] = set()


class _Thread(threading.local):
    """A thread that forks.

    Attributes:
        patient_since: a fork may wait for the time since then, ``_SECONDS`` at most. Each second of
            waiting moves it by two: a thread waits for at most half of its time.
    """

    fork: object = None
    patient_since = 0.0


_thread = _Thread()


def wait_to_fork() -> None:
    _is_rollout.set(True)


def between_forks(documents: Iterable[T]) -> Iterator[T]:
    _is_rollout.set(False)
    read = _begin_read()
    try:
        for document in documents:
            _reads.discard(read)
            yield document
            read = _begin_read()
    finally:
        _reads.discard(read)


def _begin_read() -> object:
    read = object()
    _reads.add(read)
    if _forks:
        _reads.discard(read)
        read = object()  # forks wait for the end of the old one
        _begin(read, _reads, _forks, _SECONDS)
    return read


def _begin(own: object, same: set[object], others: set[object], seconds: float) -> None:
    """Adds a read or fork, once the others that came before it have ended."""
    deadline = time.monotonic() + seconds
    with _lock:
        same.add(own)
        earlier = others.copy()
    while not earlier.isdisjoint(others) or _opens_pipes():
        if time.monotonic() > deadline:
            others -= earlier
            return
        time.sleep(_POLL_SECONDS)


def _opens_pipes() -> bool:
    # A variable that held the frame of this call would keep the variables of all its callers.
    return any(map(_is_opening, sys._current_frames().values()))


def _is_opening(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _before_fork.__code__:
        if frame.f_code.co_name == "__init__" and _module(frame) in _OPENERS:
            return True
        frame = frame.f_back
    return False


def _module(frame: FrameType) -> object:
    return frame.f_globals.get("__name__")


def _before_fork() -> None:
    if _module(sys._getframe(1)) in _STARTERS:
        return
    now = time.monotonic()
    since = max(_thread.patient_since, now - _SECONDS)
    _thread.fork = object()
    _begin(_thread.fork, _forks, _reads if _is_rollout.get() else set(), now - since)
    _thread.patient_since = since + 2 * (time.monotonic() - now)


def _after_fork() -> None:
    _forks.discard(_thread.fork)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    _reads.clear()
    _forks.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
