"""A pool's worker does not outlive its parent: nobody would take its result, and its rank may be at work elsewhere.

That is how Ray kills: the actor gets SIGKILL, its pool's workers do not, and the rank is given to another actor at
once. The orphan would hold the rank's lock, and its server the GPUs. It gets SIGKILL, too, and no time for a drain: the
next one must find the rank free. What was answered is saved anyway.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import Any

import multiprocess

_PR_SET_PDEATHSIG = 1
_NAME = "waits for the end of the pool's parent"


def is_pool_worker() -> bool:
    return "PoolWorker" in str(multiprocess.current_process().name)


def die_with_parent() -> None:
    """Does nothing outside of a pool."""
    parent = multiprocess.parent_process()
    if not is_pool_worker() or parent is None:
        return
    # Two ways: the pipe that multiprocess looks at may be held open by the other workers of a pool that was forked, and
    # the kernel looks at who forked us, which may be a fork server that lives on, or ends of a signal that we drain on.
    if sys.platform == "linux" and os.getppid() == parent.pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not any(thread.name == _NAME for thread in threading.enumerate()):
        threading.Thread(target=_follow, args=(parent,), name=_NAME, daemon=True).start()


def _follow(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
