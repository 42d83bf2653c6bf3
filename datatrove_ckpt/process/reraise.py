"""What follows a drain: each signal gets its usual effect, now that the old handlers are restored.

    a handler of somebody's        is called, as datatrove's requeue handler
    the default, which kills       SystemExit(128 + n), so that the ``finally`` blocks above run: datatrove's executor
                                   ends its manager process there, which would otherwise stay for ever
    in a worker of a pool          Preempted, whatever the handler is: CPython's pool waits without end for the result
                                   of a worker that ends by itself, by a signal or an exit

A pool worker that its signal would have ended does end, but only when its error is on its way: a ``Pool.terminate``,
which sends SIGTERM once, waits for that.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NoReturn

from datatrove_ckpt.errors import Preempted
from datatrove_ckpt.process import event_loop
from datatrove_ckpt.process.manager_watch import end_managers, managers_gone
from datatrove_ckpt.process.parent_watch import is_pool_worker
from datatrove_ckpt.process.screen import leave_terminal
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.process.slurm_job import job_id_in_environment, requeue_if_preempted

_DOES_NOT_END = {"SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH", "SIGTSTP", "SIGTTIN", "SIGTTOU"}
# For a pool's worker: until it hands in its error, as a log on a remote may be slow to close; and until that is sent.
_HAND_IN_SECONDS = 60.0
_HAND_IN_FAST_SECONDS = 5.0  # after a second signal
_SEND_SECONDS = 5.0
_EXIT_SECONDS = 5.0  # for the threads that Python waits for at its exit


def raise_again(numbers: Sequence[int], shutdown: Shutdown) -> None:
    """Gives each signal its usual effect. Returns if none of them ends the rank.

    Raises:
        Preempted: in a worker of a pool, always.
        SystemExit: the signal's default action would end this process.
        BaseException: what an old handler raises.
    """
    leave_terminal()
    ends = 0
    for number in numbers:
        handler = signal.getsignal(number)
        fatal = handler is signal.SIG_DFL and signal.Signals(number).name not in _DOES_NOT_END
        if fatal:
            requeue_if_preempted()
        if is_pool_worker() and (fatal or handler is signal.default_int_handler):
            ends = ends or number
        elif fatal:
            _exit(number)
        else:
            try:
                with job_id_in_environment():
                    signal.raise_signal(number)
            except BaseException as end:
                if not is_pool_worker() or isinstance(end, Exception):
                    raise end from None  # the rank's own end, as its context, would add nothing
                ends = ends or number
    if is_pool_worker():
        _fail_task(ends, shutdown)


def _exit(number: int) -> NoReturn:
    if event_loop.has_left_behind() or managers_gone():
        # Python would wait for what a rank has left behind. And datatrove's ``finally`` would fail if the same signal
        # has ended its manager.
        end_by(number)
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        # Python waits for such threads at its exit, without a limit. The signal's default action would not.
        threading.Thread(target=_end_late, args=(number,), daemon=True).start()
    raise SystemExit(128 + number)


def _end_late(number: int) -> None:
    time.sleep(_EXIT_SECONDS)
    end_by(number)


def end_by(number: int) -> NoReturn:
    """Ends this process by the signal's default action, and datatrove's manager with it."""
    end_managers()
    leave_terminal()
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal is blocked, or another thread takes its time


def _fail_task(ends: int, shutdown: Shutdown) -> NoReturn:
    """Fails a pool's task.

    Args:
        ends: the signal of which the worker ends once it has handed in the error; 0: it does not.
    """
    error = _Handed(shutdown.message, ends, _HAND_IN_FAST_SECONDS if shutdown.is_fast else _HAND_IN_SECONDS)
    try:
        raise error from None
    finally:
        del error  # else this frame and the error's traceback would hold each other


class _Handed(Preempted):
    """Ends the process once the pool's worker has sent this error: then the worker lets go of it, and holds no lock."""

    def __init__(self, message: str, number: int, seconds: float) -> None:
        super().__init__(message)
        self._number = number
        if number:
            _leave_late(number, seconds)

    def __reduce__(self) -> tuple[type[Preempted], tuple[object, ...]]:
        """Called when the error is sent; its traceback goes as text."""
        if self._number:
            # loguru has read the locals of frames, which so hold this error. Tracebacks hold the frames.
            self.__traceback__ = self.__context__ = None
            gc.collect()
            weakref.finalize(self, _leave, self._number).atexit = False
            _leave_late(self._number, _SEND_SECONDS)
        return Preempted, self.args


_Handed.__module__, _Handed.__qualname__ = Preempted.__module__, Preempted.__qualname__  # in logs it is one
_Handed.__name__ = Preempted.__name__


def _leave_late(number: int, seconds: float) -> None:
    """If a pool that has ended takes no results any more, or somebody else keeps the error."""

    def leave() -> None:
        time.sleep(seconds)
        _leave(number)

    threading.Thread(target=leave, daemon=True).start()


def _leave(number: int) -> None:
    leave_terminal()
    os._exit(128 + number)
