"""Kills a worker process whose parent has died, and managers whose process has died.

Ray kills an actor with SIGKILL, and gives the rank to another actor at once. A surviving worker
would hold the rank's lock, and its server the GPUs, for an unused result.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_THREAD_NAME = "datatrove-ckpt parent watch"


def managers() -> list[Any]:
    module = sys.modules.get("multiprocess")  # it takes long to import
    children = module.active_children() if module is not None else []
    return [child for child in children if child.name.startswith("SyncManager-")]


def end_managers() -> None:
    """Kills the managers: they would keep the standard output of a dead process open."""
    with suppress(AssertionError):  # in a fork, they are another process's
        for manager in managers():
            if manager.is_alive():
                manager.kill()


def die_with_parent() -> None:
    from multiprocess import parent_process

    parent = parent_process()
    if parent is None or any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    wait: Callable[[], object] = parent.join
    if sys.platform == "linux":  # multiprocess watches a pipe, which other workers may hold open
        try:
            poll = select.poll()  # select() takes no descriptor beyond 1,023
            poll.register(os.pidfd_open(parent.pid), select.POLLIN)
            wait = poll.poll
        except ProcessLookupError:
            os._exit(1)
        except OSError:  # no pidfds here
            pass

    def kill() -> None:
        wait()
        # A signal may have come to parent and worker at the same time.
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, name=_THREAD_NAME, daemon=True).start()
