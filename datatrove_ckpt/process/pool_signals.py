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
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

import multiprocess
from loguru import logger

from datatrove_ckpt.process.parent_watch import end_managers, is_manager, pool_workers
from datatrove_ckpt.process.screen import leave_terminal
from datatrove_ckpt.process.shutdown import SAME_EVENT

_TO_EXIT = 10.0  # seconds, for a program whose workers have ended


class _PoolSignal:
    def __init__(self) -> None:
        self._pid = os.getpid()
        self._came = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        seconds, first = time.monotonic() - self._came, not self._came
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
    return signal.SIG_DFL if isinstance(handler, _PoolSignal) else handler
