"""What a signal does to a program that runs ranks with datatrove's own LocalPipelineExecutor, which handles none.

The default action ends the program on the spot: its workers are killed, and datatrove's manager stays. Instead:

    a pool or a manager runs     SystemExit(128 + n), as Ctrl-C is a KeyboardInterrupt: datatrove leaves its pool, which
                                 sends SIGTERM to each worker and waits for it, so each rank drains
    neither                      the default action
    a second signal              the program ends at once, and its workers save what they have and end

The handler is set when a step is made: later, nothing of ours runs in this process. Everybody else takes it for the
default (``usual_handler``).
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import multiprocess
from loguru import logger
from multiprocess.process import BaseProcess

from datatrove_ckpt.process.screen import leave_terminal
from datatrove_ckpt.process.shutdown import SAME_EVENT

# Parent watch: kills a worker process whose parent has died. And datatrove's manager process, as its parent sees it.
#
# Ray kills an actor with SIGKILL. The workers of the actor's pool survive, and Ray gives the rank to another actor at
# once. A surviving worker would hold the rank's lock, and its server the GPUs, for a result that nobody takes. So the
# worker gets SIGKILL, too, without a drain: the next actor must find the rank free. Answers are already saved. A worker
# that drains already goes on: a signal to the whole group ends the fork server, and then datatrove's pool at once.
#
# ``LocalPipelineExecutor`` starts a manager process, which ends in a ``finally`` block of datatrove's. It stays if this
# process is killed.


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


_TO_EXIT = 10.0  # seconds, for a program whose workers have ended


class _PoolSignal:
    def __init__(self) -> None:
        self._pid = os.getpid()
        self._came = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        seconds = time.monotonic() - self._came
        first = not self._came
        if first:
            self._came = time.monotonic()
        is_fork = os.getpid() != self._pid
        if is_fork and first and is_manager() and os.getppid() == self._pid:
            return  # the whole group was signalled: the workers still need the manager, which ends with the program
        if is_fork or (first and not pool_workers() and not any(map(is_manager, multiprocess.active_children()))):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif first:
            _thread.start_new_thread(_end_late, (number,))  # takes no lock, as ``threading.Thread.start`` would
            raise SystemExit(128 + number)
        elif seconds > SAME_EVENT:
            _end(number)


def _end_late(number: int) -> None:
    """Ends a program that waits without end: an idle worker which a signal kills may hold a lock of the pool."""
    name = signal.Signals(number).name
    logger.warning(
        f"{name}: the running tasks must stop; what is finished is saved. A second signal ends them at once."
    )
    time.sleep(SAME_EVENT)
    for worker in pool_workers():
        worker.terminate()
    while pool_workers():
        time.sleep(0.1)
    time.sleep(_TO_EXIT)
    _end(number)


def _end(number: int) -> None:
    for worker in pool_workers():
        os.kill(worker.pid, signal.SIGINT)  # SIGTERM would be no second signal
    end_managers()
    leave_terminal()
    os._exit(128 + number)


def drain_pools(numbers: Iterable[int]) -> None:
    """Lets these signals drain the ranks of a pool. Those that this process ignores or handles stay as they are."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and multiprocess.parent_process() is None:
        handler = _PoolSignal()
        for number in numbers:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handler)


def usual_handler(handler: Any) -> Any:
    """The handler of a signal without ``drain_pools``."""
    if isinstance(handler, _PoolSignal):
        return signal.SIG_DFL
    return handler
