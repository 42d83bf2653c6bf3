"""Parent watch: kills a pool worker whose parent process has died.

Ray kills an actor with SIGKILL. The workers of the actor's pool survive, and Ray gives the rank to another actor at
once. A surviving worker would hold the rank's lock, and its server the GPUs, for a result that nobody takes. So the
worker gets SIGKILL, too, without a drain: the next actor must find the rank free. Answers are already saved.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

import multiprocess

_PR_SET_PDEATHSIG = 1
_THREAD_NAME = "datatrove-ckpt parent watch"


def is_pool_worker() -> bool:
    return "PoolWorker" in str(multiprocess.current_process().name)


def die_with_parent() -> None:
    """Starts the parent watch in a pool worker. Does nothing in any other process."""
    parent = multiprocess.parent_process()
    if not is_pool_worker() or parent is None:
        return
    # Both ways are needed. multiprocess watches a pipe, which the other workers of a forked pool may hold open. The
    # kernel watches the process that forked this one: a fork server may outlive the parent, or end of a signal on which
    # this worker drains.
    if sys.platform == "linux" and os.getppid() == parent.pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        kill_after(parent.join)


def kill_after(wait: Callable[[], object]) -> None:
    """Kills this process when the call returns, which is made in a thread."""

    def kill() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, name=_THREAD_NAME, daemon=True).start()
