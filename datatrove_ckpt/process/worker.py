"""Runs in a worker process. ``workers.py`` has the table of the messages."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import fsspec.asyn
from multiprocess.connection import Connection
from multiprocess.reduction import ForkingPickler

from datatrove_ckpt.errors import CkptError, Preempted, UnexpectedExit
from datatrove_ckpt.process.event_loop import end_fork
from datatrove_ckpt.process.gc_tuning import gc_tuned
from datatrove_ckpt.process.parent_watch import die_with_parent
from datatrove_ckpt.process.screen import RankProgress, reporting_to
from datatrove_ckpt.process.signals import Handlers
from datatrove_ckpt.process.tasks import Tasks

READY = "ready"
CLOSED = "closed"  # only the interpreter's own end is left

_slot: int | None = None


Work = Callable[[int, Tasks], object]
"""Is pickled into a worker, and called with its slot and its tasks."""


class Outcome(NamedTuple):
    """How a task ended in a worker.

    Attributes:
        task: None: all tasks of the worker that are not done.
        end: "stopped" by a signal. Then and after "failed" the worker ends.
        value: the task's result, the error, or the number of the signal.
    """

    task: int | None
    end: Literal["done", "failed", "stopped"]
    value: Any


class Reported(NamedTuple):
    rank: int
    progress: RankProgress


def worker_slot() -> int | None:
    """Returns the number of this worker among its parent's workers, from 0; None in another
    process.
    """
    return _slot


def work(
    connection: Connection,
    environment: dict[str, str],
    numbers: Sequence[int],
    run: Work,
    slot: int,
    below_bar: bool,
) -> None:
    """Runs a worker process.

    Args:
        connection: to the parent.
        environment: the parent's, now. A fork server has the environment of its own start.
        numbers: signals that request a stop. A process of the fork server does not block them yet.
        below_bar: the parent shows a bar on the shared terminal.
    """
    global _slot
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    signal.set_wakeup_fd(-1)  # a fork has the parent's
    _slot = slot
    os.setpgid(0, 0)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    # Or a terminal with tostop would stop what it logs.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    die_with_parent()
    # While signals are blocked: an interrupted start of a loop prints a traceback.
    fsspec.asyn.get_loop()
    worker = _Worker(connection)
    Handlers(worker.receive).install(numbers)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    with reporting_to(worker.report, below_bar), gc_tuned():
        worker.serve(run, slot)


class _Worker:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._at_work: set[int] = set()
        self._has_failed = False  # as the parent knows
        self._stop_signal: int | None = None
        self._pid = os.getpid()

    def serve(self, run: Work, slot: int) -> None:
        try:
            run(slot, self)
        except BaseException as error:
            self.failed(None, error)
        finally:
            if self._stop_signal is not None:
                self._send(Outcome(None, "stopped", self._stop_signal))
            self._send(CLOSED)

    def next(self) -> int | None:
        self._send(READY)
        return self._take()

    async def wait_for_next(self) -> int | None:
        self._send(READY)
        loop = asyncio.get_running_loop()
        has_come = asyncio.Event()
        loop.add_reader(self._connection.fileno(), has_come.set)
        try:
            await has_come.wait()
        finally:
            loop.remove_reader(self._connection.fileno())
        return self._take()

    def _take(self) -> int | None:
        try:
            task: int | None = self._connection.recv()
        except (EOFError, OSError):  # the parent is gone
            return None
        if task is not None:
            self._at_work.add(task)
        if self._stop_signal is not None:  # it came before the task
            self._at_work.clear()
            return None
        return task

    def done(self, task: int, value: object) -> None:
        end_fork(self._pid)
        self._at_work.discard(task)
        self._send(Outcome(task, "done", value))

    def failed(self, task: int | None, error: BaseException) -> None:
        end_fork(self._pid, error)
        self._at_work.clear()
        is_stopped = self._stop_signal is not None and (
            not isinstance(error, Exception) or isinstance(error, Preempted)
        )
        if not self._has_failed and not is_stopped:
            self._has_failed = True
            self._send(Outcome(task, "failed", _sendable(error, task)))

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the parent is gone
            self._connection.send(message)

    def report(self, rank: int, progress: RankProgress) -> None:
        """Sends where a rank stands, unless that would wait: the parent may be busy."""
        with suppress(OSError):  # the parent is gone
            if select.select([], [self._connection.fileno()], [], 0)[1]:
                self._connection.send(Reported(rank, progress))

    def receive(self, number: int) -> None:
        self._stop_signal = number
        if self._at_work:
            self._at_work.clear()  # only once
            raise SystemExit(128 + number)


def _sendable(error: BaseException, number: int | None) -> Exception:
    task = "its tasks" if number is None else f"task {number}"
    if not isinstance(error, Exception):
        if isinstance(error, SystemExit):
            what = f"called sys.exit({error.code!r})"
        else:
            what = f"raised {type(error).__name__}"
        return UnexpectedExit(
            f"A step of {task} {what}. The task is not complete; raise an Exception instead."
        )
    text = "".join(traceback.format_exception(error))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # anything can go wrong in somebody's __reduce__ or __init__
        return CkptError(f"{task.capitalize()} failed with {type(error).__name__}: {error}\n{text}")
    if not getattr(error, "__notes__", ()):  # a note says which log has it
        error.add_note(f"In the worker process of {task}:\n{text}")
    return error
