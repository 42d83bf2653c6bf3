"""Sets and restores the handlers of signals that stop ranks, and raises the signals again. No other
module does.

    a rank               drains, then gives each signal its usual effect (``preemption.py``)
    worker processes     the parent passes signals on, a worker ends its tasks (``workers.py``)
    between two ranks    a task of Slurm is requeued, then as usual (``handle_between_ranks``)
    a command            ends with one line (``Interruption``)

Handlers nest: the usual handler of an inner level is the outer level's, and at last the user's or
Python's. ``raise_again`` calls the user's handler, such as datatrove's requeue handler. Where the
default action would kill, it raises SystemExit(128 + n), so that ``finally`` blocks run:
datatrove's executor ends its manager process there, which would otherwise stay forever.

A worker of multiprocessing's pool, as in datatrove's executor, kills itself, because CPython's pool
waits without end for a worker that exits. A handler that exits, such as Ray's, would raise
SystemExit in a rollout, and fail its document.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import NoReturn, Self

from datatrove_ckpt.process import event_loop
from datatrove_ckpt.process.parent_watch import end_managers
from datatrove_ckpt.process.screen import leave_terminal
from datatrove_ckpt.process.slurm_job import (
    job_id,
    job_id_in_environment,
    requeue_if_preempted,
)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Ignored signals stay ignored: nohup ignores SIGHUP, a shell the SIGINT of background jobs.
_OF_TERMINALS = (signal.SIGHUP, signal.SIGINT)
_FATAL = (signal.SIG_DFL, signal.default_int_handler)
_EXIT_SECONDS = 5.0  # for threads at Python's exit

Handler = Callable[[int, FrameType | None], object] | int | None
"""What ``signal.getsignal`` returns."""


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def may_handle(number: int) -> bool:
    handler = signal.getsignal(number)
    if handler is None:  # Python did not set it, and cannot restore it
        return False
    return handler is not signal.SIG_IGN or number not in _OF_TERMINALS


class Handlers:
    """Handles signals from ``install`` to ``restore``. Does nothing outside the main thread.

    In a process that is forked meanwhile, a signal has its usual effect.
    """

    def __init__(self, receive: Callable[[int], object]) -> None:
        self.usual: dict[int, Handler] = {}
        self._receive = receive
        self._pid = 0

    def install(self, numbers: Iterable[int]) -> None:
        self._pid = os.getpid()
        if in_main_thread():
            for number in numbers:
                self.usual.setdefault(number, signal.signal(number, self._handle))

    def restore(self) -> None:
        while self.usual and in_main_thread():
            signal.signal(*self.usual.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._receive(number)
        else:
            signal.signal(number, self.usual[number])
            os.kill(os.getpid(), number)


class Interruption:
    """Raises KeyboardInterrupt for a signal that would end the process."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.number = 0
        self._numbers = set(numbers)
        self._handlers = Handlers(self._receive)

    def __enter__(self) -> Self:
        self._handlers.install(
            number for number in self._numbers if signal.getsignal(number) in _FATAL
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._handlers.restore()

    def _receive(self, number: int) -> None:
        self.number = self.number or number
        raise KeyboardInterrupt(signal.Signals(number).name)


def raise_again(numbers: Iterable[int], at_once: bool = False) -> None:
    """Gives each signal its usual effect, through the stack. Returns if no signal ends this
    process.

    Args:
        at_once: a default action ends the process here, and no ``finally`` block runs.

    Raises:
        SystemExit: the signal's default action would end this process.
        BaseException: what the handler raises.
    """
    leave_terminal()
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_DFL:
            requeue_if_preempted()
            _exit(number, at_once)
        try:
            with job_id_in_environment():
                signal.raise_signal(number)
        except BaseException as end:
            raise end from None  # the rank's own end, as its context, would add nothing


def _exit(number: int, at_once: bool) -> NoReturn:
    if at_once or event_loop.left_behind:  # Python would wait for it
        end_by(number)
    if any(
        thread is not threading.main_thread() and not thread.daemon
        for thread in threading.enumerate()
    ):
        # Python waits for such threads at its exit, the signal's default action would not.
        timer = threading.Timer(_EXIT_SECONDS, end_by, [number])
        timer.daemon = True
        timer.start()
    raise SystemExit(128 + number)


def end_by(number: int) -> NoReturn:
    end_managers()
    leave_terminal()
    with suppress(BaseException):  # of a handler in Python
        os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal is blocked or handled, or another thread takes its time


def _receive_between_ranks(number: int) -> None:
    between_ranks.restore()
    raise_again([number])


between_ranks = Handlers(_receive_between_ranks)


def handle_between_ranks(numbers: Iterable[int]) -> None:
    """Installs ``between_ranks`` in a task of datatrove's Slurm executor, which may run several
    ranks in turn.

    datatrove's own handler requeues SLURM_JOB_ID, which may mean the whole array. It does not
    handle SIGTERM, so a preempted task's job would count as failed.
    """
    if job_id() is not None and os.environ.get("DATATROVE_EXECUTOR") == "SLURM":
        unhandled = (None, signal.SIG_IGN, signal.default_int_handler)
        between_ranks.install(
            number for number in numbers if signal.getsignal(number) not in unhandled
        )
