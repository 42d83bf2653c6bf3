"""How a worker of LocalPipelineExecutor's pool leaves when its task has failed.

A pool ends with its first error, and sends SIGTERM to the workers that are left. One that dies of it while it hands in
its own error dies with the lock of the results' queue, and the pool then waits for that lock for ever (CPython's
multiprocessing has this gap, and so has its copy ``multiprocess``, which datatrove uses). Workers that fail at the same
moment, as all ranks do when a setting is wrong, do that once in some dozen runs.

So once its task has failed, a worker dies of SIGTERM only when it hands nothing in. A thread sees to that: a signal
handler written in Python may have to wait until the main thread comes back from a lock, and that can be never.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import multiprocess
from multiprocess.queues import SimpleQueue

_PATIENCE = 5.0  # seconds: a queue that nobody empties must not keep the worker alive
_AGAIN = 0.01  # seconds

_sentry: tuple[socket.socket, socket.socket] | None = None


def hand_in_before_sigterm() -> None:
    """In a pool's worker whose task has failed: SIGTERM waits until the error is handed in. Elsewhere: nothing."""
    global _sentry
    if multiprocess.parent_process() is None or threading.current_thread() is not threading.main_thread():
        return
    if _sentry is None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        hears, told = _sentry = socket.socketpair()
        told.setblocking(False)
        threading.Thread(target=_wait_for_sigterm, args=(hears,), name="datatrove-ckpt SIGTERM", daemon=True).start()
        signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _nothing_yet)


def sigterm_as_usual() -> None:
    """The worker begins another task."""
    global _sentry
    if _sentry is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _sentry[1].close()  # the thread ends of it
        _sentry = None


def _nothing_yet(*_: object) -> None:
    """The thread has been told."""


def _wait_for_sigterm(hears: socket.socket) -> None:
    with hears:
        while (told := hears.recv(1)) and told[0] != signal.SIGTERM:
            pass
    deadline = time.monotonic() + _PATIENCE
    while told and _is_handing_in() and time.monotonic() < deadline:
        time.sleep(_AGAIN)
    if told:
        os._exit(128 + signal.SIGTERM)


def _is_handing_in() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not SimpleQueue.put.__code__:
        frame = frame.f_back
    return frame is not None
