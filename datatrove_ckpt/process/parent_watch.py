"""Parent watch: kills a worker process whose parent has died. And datatrove's manager process, as its parent sees it.

Ray kills an actor with SIGKILL. The workers of the actor's pool survive, and Ray gives the rank to another actor at
once. A surviving worker would hold the rank's lock, and its server the GPUs, for a result that nobody takes. So the
worker gets SIGKILL, too, without a drain: the next actor must find the rank free. Answers are already saved. A worker
that drains already goes on: a signal to the whole group ends the fork server, and then datatrove's pool at once.

``LocalPipelineExecutor`` starts a manager process, which ends in a ``finally`` block of datatrove's. It stays if this
process is killed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

import multiprocess
from multiprocess.process import BaseProcess

_THREAD_NAME = "datatrove-ckpt parent watch"

_TO_NOTICE = 0.5  # seconds: a signal came to parent and worker at the same time

_spared_until = 0.0  # ``time.monotonic``
_noted: set[BaseProcess] = set()


def _managers() -> list[BaseProcess]:
    return [child for child in multiprocess.active_children() if is_manager(child)]


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
        manager.kill()


def is_manager(process: BaseProcess | None = None) -> bool:
    """Whether a process, by default this one, is a manager of datatrove's."""
    return str((process or multiprocess.current_process()).name).startswith("SyncManager-")


def is_pool_worker(process: BaseProcess | None = None) -> bool:
    """The same for a worker of a pool."""
    return "PoolWorker" in str((process or multiprocess.current_process()).name)


def pool_workers() -> list[BaseProcess]:
    """Those of this process's pools that have not ended."""
    return [child for child in multiprocess.active_children() if is_pool_worker(child)]


def spare(seconds: float) -> None:
    """For so long, the end of its parent does not kill this process."""
    global _spared_until
    _spared_until = time.monotonic() + seconds


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
        time.sleep(_TO_NOTICE)
        while time.monotonic() < _spared_until:
            time.sleep(_TO_NOTICE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, name=_THREAD_NAME, daemon=True).start()
