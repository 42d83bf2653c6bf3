"""What runs in a worker process of ``workers.py``, which has the table of what both say to each other."""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Literal, NamedTuple

import fsspec.asyn
from multiprocess.reduction import ForkingPickler

from datatrove_ckpt.errors import CkptError, Preempted, UnexpectedExit
from datatrove_ckpt.process.event_loop import end_fork
from datatrove_ckpt.process.gc_tuning import gc_tuned
from datatrove_ckpt.process.pool_signals import die_with_parent
from datatrove_ckpt.process.screen import RankProgress, reporting_to
from datatrove_ckpt.redaction import HiddenDict

READY = "ready"
CLOSED = "closed"  # nothing of the tasks is left, only the interpreter's own end

_slot: int | None = None


class Work(NamedTuple):
    """What workers do with tasks. Pickled into them.

    Attributes:
        run: called with the worker's slot and a task. What it returns is sent to the parent, so it must be picklable.
        close: called once, before the worker ends.
    """

    run: Callable[[int, int], Any]
    close: Callable[[], object]


class Outcome(NamedTuple):
    """How a task ended in a worker.

    Attributes:
        end: "stopped" is the end that a signal asked for.
        value: what ``Work.run`` returned, the error, or the number of the signal.
    """

    end: Literal["done", "failed", "stopped"]
    value: Any


class Reported(NamedTuple):
    """Where a rank of a worker stands."""

    rank: int
    progress: RankProgress


def worker_slot() -> int | None:
    """The number of this worker among those that work at the same time, from 0; None if this process is none.

    The signal handlers of a worker are our own.
    """
    return _slot


def work(
    connection: Any,
    parent: int,
    environment: HiddenDict,
    numbers: Sequence[int],
    task: Work,
    slot: int,
    below_bar: bool,
) -> None:
    """The main function of a worker process.

    Args:
        connection: to the parent.
        parent: process id.
        environment: the parent's, now. A fork server has that of its own start.
        numbers: signals that ask for a stop. They are blocked when this is called, but not in a process of the fork
            server; one that came there before has ended the process, without a word.
        below_bar: the parent shows a bar on the terminal that both have.
    """
    global _slot
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    signal.set_wakeup_fd(-1)  # a fork has the parent's
    _slot = slot
    os.setpgid(0, 0)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or a terminal with tostop would stop what it logs
    die_with_parent(parent)
    # While signals are blocked: Python reports a loop that one interrupted in its making with a traceback of its own.
    fsspec.asyn.get_loop()
    worker = _Worker(connection, numbers, task, slot)
    with reporting_to(worker.report, below_bar), gc_tuned():
        worker.serve()


class _Worker:
    def __init__(self, connection: Any, numbers: Sequence[int], task: Work, slot: int) -> None:
        self._connection = connection
        self._work = task
        self._slot = slot
        self._in_task = False
        self._stop_signal: int | None = None
        self._pid = os.getpid()
        for number in numbers:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def serve(self) -> None:
        """Runs tasks until the parent has no more, is gone, or a signal came."""
        try:
            with suppress(EOFError, OSError):  # of the connection: the parent is gone
                self._connection.send(READY)
                while self._stop_signal is None and (number := self._connection.recv()) is not None:
                    self._connection.send(self._outcome(number))
        finally:
            self._work.close()
            with suppress(OSError):
                self._connection.send(CLOSED)

    def report(self, rank: int, progress: RankProgress) -> None:
        """Tells the parent where a rank stands, unless that would wait: the parent may be busy."""
        with suppress(OSError):  # the parent is gone
            if select.select([], [self._connection.fileno()], [], 0)[1]:
                self._connection.send(Reported(rank, progress))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # something that a task forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._stop_signal = number
        if self._in_task:
            self._in_task = False  # only once
            raise SystemExit(128 + number)

    def _outcome(self, number: int) -> Outcome:
        try:
            self._in_task = True
            if self._stop_signal is not None:  # it came before the task
                raise SystemExit
            value = self._work.run(self._slot, number)
            end_fork(self._pid)
            self._in_task = False
        except BaseException as error:  # even a SystemExit: the parent waits for the outcome of this task
            end_fork(self._pid, error)
            self._in_task = False
            if self._stop_signal is not None and (not isinstance(error, Exception) or isinstance(error, Preempted)):
                return Outcome("stopped", self._stop_signal)
            return Outcome("failed", _sendable(error, number))
        return Outcome("done", value)


def _sendable(error: BaseException, number: int) -> Exception:
    """The error as it reaches the parent, with this process's traceback as a note."""
    if not isinstance(error, Exception):
        what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {type(error).__name__}"
        return UnexpectedExit(f"A step of task {number} {what}. The task is not complete; raise an Exception instead.")
    text = "".join(traceback.format_exception(error))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # anything can go wrong in somebody's __reduce__ or __init__
        return CkptError(f"Task {number} failed with {type(error).__name__}: {error}\n{text}")
    if not getattr(error, "__notes__", ()):  # a note says which log has it
        error.add_note(f"In the worker process of task {number}:\n{text}")
    return error
