"""Parent watch: kills a worker process whose parent has died. And datatrove's manager process, as its parent sees it.

Ray kills an actor with SIGKILL. The workers of the actor's pool survive, and Ray gives the rank to another actor at
once. A surviving worker would hold the rank's lock, and its server the GPUs, for a result that nobody takes. So the
worker gets SIGKILL, too, without a drain: the next actor must find the rank free. Answers are already saved.

``LocalPipelineExecutor`` starts a manager process, which ends in a ``finally`` block of datatrove's. It stays if this
process is killed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable

import multiprocess
from multiprocess.process import BaseProcess

_THREAD_NAME = "datatrove-ckpt parent watch"

_noted: set[BaseProcess] = set()


def _managers() -> list[BaseProcess]:
    return [child for child in multiprocess.active_children() if child.name.startswith("SyncManager-")]


def note_managers() -> None:
    """Call it when a rank starts, for ``managers_gone``."""
    _noted.clear()
    _noted.update(_managers())


def managers_gone() -> bool:
    """Whether a manager process that was there when a rank started has ended."""
    return not _noted <= set(_managers())


def end_managers() -> None:
    """For a process that ends now, past datatrove's ``finally``."""
    for manager in _managers():
        manager.terminate()


def is_pool_worker() -> bool:
    return "PoolWorker" in str(multiprocess.current_process().name)


def die_with_parent(parent: int | None = None) -> None:
    """Lets SIGKILL end this worker process as soon as its parent is gone: its tasks must be free for the next run.

    Args:
        parent: process id. None: that of a pool's worker; then this does nothing in any other process, or if the parent
            is watched already.
    """
    process = multiprocess.parent_process()
    if parent is None:
        watched = any(thread.name == _THREAD_NAME for thread in threading.enumerate())
        if not is_pool_worker() or process is None or watched:
            return
        parent = process.pid
    assert process is not None
    wait: Callable[[], object] = process.join
    if sys.platform == "linux":  # multiprocess watches a pipe, which other workers may hold open
        try:
            poll = select.poll()  # select() takes no descriptor beyond 1,023
            poll.register(os.pidfd_open(parent), select.POLLIN)
            wait = poll.poll
        except ProcessLookupError:
            os._exit(1)
        except OSError:  # the kernel or the container knows no pidfds
            pass

    def kill() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, name=_THREAD_NAME, daemon=True).start()
