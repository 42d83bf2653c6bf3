"""Worker processes that we start and own. Each takes one task after another over a pipe.

    this process                                         a worker
    starts it, with signals blocked               ->     sets its handlers, unblocks, leaves the process group
                                                  <-     "ready"
    sends a task                                  ->     runs it in its main thread
    shows it                                      <-     where its rank stands, once a second
                                                  <-     its outcome
    passes on each signal that asks for a stop    ->     the task drains, or ends; its outcome says so
    sends None                                    ->     ends

This process waits on pipes and processes, so a worker that is killed is noticed at once, whatever it was doing: no lock
and no queue is shared. A worker watches this process in turn, and kills itself when this process is gone, however it
ended. Only this process gets the signals of a terminal, and passes them on: so one Ctrl-C is one request to stop.

datatrove's own executor uses a pool. CPython's pool waits without end for the task of a worker that was killed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Self

from loguru import logger
from multiprocess import connection as connections
from multiprocess import forkserver, resource_tracker

from datatrove_ckpt.errors import Preempted, WorkerDied
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.process.memory import WORKERS_VARIABLE
from datatrove_ckpt.process.pool_signals import usual_handler
from datatrove_ckpt.process.screen import TICK_SECONDS, Screen
from datatrove_ckpt.process.shutdown import SAME_EVENT
from datatrove_ckpt.process.worker import CLOSED, READY, Outcome, Reported, Work, work
from datatrove_ckpt.redaction import HiddenDict

# Seconds that workers have to end after a second signal, and one that has nothing left to do but to end.
_AFTER_SECOND_SIGNAL = 10.0
_TO_EXIT = 5.0
_LONGEST_WAIT = 3600.0
_KEPT = (signal.SIG_IGN, None)  # a signal that is ignored, as under nohup; a handler that Python cannot restore


class Stopped(Exception):
    """A signal stopped the workers. Raised by ``Workers.run`` once all of them have ended."""


class _Process:
    """One worker, as its parent sees it."""

    def __init__(self, context: Any, slot: int, count: int, task: Work, numbers: list[int], below_bar: bool) -> None:
        self.slot = slot
        self.task: int | None = None
        self.is_ready = False  # for a task
        self.was_ready = False
        self.ends_by: float | None = None  # it is killed then
        self.is_silent = False  # no more messages can come
        self.connection, theirs = connections.Pipe()
        # Not a daemon: a step may start processes of its own.
        environment = HiddenDict({**os.environ, WORKERS_VARIABLE: str(count)})
        arguments = (theirs, os.getpid(), environment, numbers, task, slot, below_bar)
        self.process = context.Process(target=work, args=arguments, daemon=False)
        with theirs:  # closed here once the worker has it
            self.process.start()
        self._handle: int | None = None  # it has ended, or there are no pidfds here
        if sys.platform == "linux":
            with suppress(OSError):  # it has ended, or the kernel or the container knows no pidfds
                self._handle = os.pidfd_open(self.process.pid)

    @property
    def sentinel(self) -> int:
        """Becomes readable when the process has ended. multiprocess's own also does when the fork server has ended."""
        return self._handle if self._handle is not None else int(self.process.sentinel)

    def messages(self) -> Iterator[Any]:
        """Those that have come."""
        try:
            while self.connection.poll():
                yield self.connection.recv()
        except (EOFError, OSError):
            self.is_silent = True

    def send(self, message: object) -> None:
        with suppress(OSError):  # it has ended: its sentinel tells
            self.connection.send(message)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)
            elif self.process.is_alive():
                os.kill(self.process.pid, number)

    def close(self) -> str:
        """Ends what may be left of it. Returns how it ended."""
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + _TO_EXIT
        # Not join: it waits for a pipe that a fork of the worker may hold open.
        while self.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.005)
        self.connection.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


@dataclass(eq=False, repr=False)
class Workers:
    """``with Workers(...) as workers:`` around ``workers.run(tasks)``. No process of it is left when the block ends.

    Args:
        context: multiprocess's, of a start method.
        count: processes at once.
        work: what they do.
        numbers: signals that ask for a stop. Those that this process ignores stay ignored.
        max_attempts: how many workers may die of the same task.
        stop_seconds: a worker that takes longer to end its task after a request to stop is killed.
        screen: shows where the tasks stand.

    Attributes:
        lost: the tasks that were given up, and why.
        signal: the first signal that came.
    """

    context: Any
    count: int
    work: Work
    numbers: Iterable[int]
    max_attempts: int
    stop_seconds: float = math.inf
    screen: Screen | None = None

    def __post_init__(self) -> None:
        self.lost: dict[int, str] = {}
        self.signal: int | None = None
        self._numbers = [number for number in sorted(set(self.numbers)) if signal.getsignal(number) not in _KEPT]
        self._workers: list[_Process] = []
        self._tasks: deque[int] = deque()
        self._attempts: Counter[int] = Counter()
        self._failed_starts = 0
        self._error: Exception | None = None
        self._is_failing = False  # the other tasks are told to stop
        self._requests = 0
        self._to_pass_on: deque[int] = deque()
        self._came = 0.0
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1
        self._pid = os.getpid()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # A signal interrupts no wait that is about to begin, and none of this thread if another thread gets it.
            self._previous_wakeup = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
            self._previous = {number: signal.signal(number, self._receive) for number in self._numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.close()
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._woken)
        os.close(self._wake)

    def run(self, tasks: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yields each task that is done, with what ``Work.run`` returned, as they finish.

        Raises:
            Stopped: a signal came; all tasks have drained.
            WorkerDied: no worker could be started.
            Exception: of the first task that failed; the others have drained.
        """
        self._tasks.extend(tasks)
        self._start()
        while self._workers:
            self._wait()
            for worker in list(self._workers):
                yield from self._read_replies(worker)
            self._start()
            self._pass_on()  # after it: when no worker can be started, the running ones must hear of it
            self._kill_late()
            self._assign()
        if self.signal is not None:
            raise Stopped
        if self._error is not None:
            raise self._error

    # workers ----------------------------------------------------------------------------------------------------------

    @property
    def _stops(self) -> bool:
        return self.signal is not None or self._error is not None

    def _start(self) -> None:
        """Starts as many workers as there are tasks that nobody has, and places."""
        free = sum(worker.task is None for worker in self._workers)
        while not self._stops and len(self._tasks) > free and len(self._workers) < self.count:
            slot = min(set(range(self.count)) - {worker.slot for worker in self._workers})
            resource_tracker.ensure_running()  # its own start unblocks signals
            if self.context.get_start_method() == "forkserver":
                # Before they are blocked here: it serves others, too, and its processes inherit what it has blocked. A
                # ``Pool.terminate`` of datatrove's would wait for ever for a worker that does not hear SIGTERM.
                forkserver.ensure_running()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
            try:
                below_bar = self.screen is not None and self.screen.has_bar
                self._workers.append(_Process(self.context, slot, self.count, self.work, self._numbers, below_bar))
            except (EOFError, ConnectionError):  # the fork server has ended
                self._error = _cannot_start("the process that starts them has ended")
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            free += 1

    def _assign(self) -> None:
        """Gives a task to each worker that waits for one, or lets it end."""
        for worker in self._workers:
            if worker.is_ready and worker.task is None:
                worker.is_ready = False
                if self._tasks and not self._stops:
                    worker.task = self._tasks.popleft()
                    self._attempts[worker.task] += 1
                worker.send(worker.task)

    def _wait(self) -> None:
        """Until a message has come, a worker has ended, a signal has come, or somebody's time is over."""
        limits = [worker.ends_by for worker in self._workers if worker.ends_by is not None]
        limits += [] if self.screen is None else [time.monotonic() + TICK_SECONDS]
        seconds = max(0.0, min(min(limits) - time.monotonic(), _LONGEST_WAIT)) if limits else None
        sources = [self._woken, *(worker.sentinel for worker in self._workers)]
        open_ = [worker.connection for worker in self._workers if not worker.is_silent]
        ready = connections.wait([*sources, *open_], seconds)
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self.screen is not None:
            self.screen.tick()

    def _read_replies(self, worker: _Process) -> Iterator[tuple[int, Any]]:
        has_ended = connections.wait([worker.sentinel], 0)  # first: what it sent before its end has come then
        for message in worker.messages():
            if message == READY:
                worker.is_ready = worker.was_ready = True
                self._failed_starts = 0
            elif message == CLOSED:
                worker.ends_by = time.monotonic() + _TO_EXIT
            elif isinstance(message, Reported):
                if self.screen is not None:
                    self.screen.progress.update(*message)
            else:
                assert worker.task is not None
                task, worker.task = worker.task, None
                worker.is_ready = message.end != "stopped"  # it ends by itself then
                yield from self._finished(task, message)
        if has_ended:
            self._workers.remove(worker)
            self._died(worker, worker.close())

    def _finished(self, task: int, outcome: Outcome) -> Iterator[tuple[int, Any]]:
        if outcome.end == "done":
            yield task, outcome.value
        elif outcome.end == "stopped":
            self._give_back(task, f"its worker was stopped by {signal.Signals(outcome.value).name}")
        elif self._error is None:
            self._error = outcome.value

    def _died(self, worker: _Process, how: str) -> None:
        if worker.task is not None:
            self._give_back(worker.task, f"its worker process {how}")
        elif not worker.was_ready and not self._stops:
            self._failed_starts += 1
            if self._failed_starts >= self.max_attempts:
                self._error = _cannot_start(f"the last one {how}")

    def _give_back(self, task: int, why: str) -> None:
        """A task whose worker ended before it."""
        if self._stops:
            return
        attempts = self._attempts[task]
        if attempts < self.max_attempts:
            logger.warning(f"Task {task}: {why}. It starts again (attempt {attempts + 1} of {self.max_attempts}).")
            self._tasks.appendleft(task)
        else:
            logger.error(f"Task {task}: {why}, in attempt {attempts} of {self.max_attempts}. The others go on.")
            self.lost[task] = why

    # signals ----------------------------------------------------------------------------------------------------------

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork of this process that has not set its own handlers
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._came = number, now
        elif now - self._came < SAME_EVENT:
            return
        self._requests += 1
        self._to_pass_on.append(number)

    def _pass_on(self) -> None:
        """Passes requests to stop on to the workers that have a task. The others end in ``_assign``."""
        if self._error is not None and not self._is_failing:
            self._is_failing = True
            self._to_pass_on += [signal.SIGTERM] if signal.SIGTERM in self._numbers else []
        while self._to_pass_on:
            number = self._to_pass_on.popleft()
            busy = [worker for worker in self._workers if worker.task is not None]
            why = "a task has failed" if self.signal is None else signal.Signals(number).name
            if self._requests > 1:
                why = f"{why} again, the drain is over"
            if busy:
                logger.warning(f"{why}: {plural(len(busy), 'running task')} must stop; what is finished is saved.")
            for worker in busy:
                worker.signal(number)
                worker.ends_by = worker.ends_by or time.monotonic() + self.stop_seconds
            for worker in self._workers:
                if not worker.was_ready:  # it still imports, and has nothing to save
                    worker.signal(signal.SIGKILL)
                if self._requests > 1:
                    worker.ends_by = min(worker.ends_by or math.inf, time.monotonic() + _AFTER_SECOND_SIGNAL)

    def _kill_late(self) -> None:
        for worker in self._workers:
            if worker.ends_by is not None and time.monotonic() >= worker.ends_by:
                if worker.task is not None:
                    logger.error(f"Task {worker.task} does not end. Its process {worker.process.pid} is killed.")
                worker.signal(signal.SIGKILL)
                worker.ends_by = None


def end_as(number: int) -> NoReturn:
    """Ends this process as this signal would without us, but through the stack.

    Raises:
        KeyboardInterrupt, SystemExit, Preempted, or whatever the handler raises.
    """
    if usual_handler(signal.getsignal(number)) is signal.SIG_DFL:
        raise SystemExit(128 + number)
    signal.raise_signal(number)
    raise Preempted(f"Stopped by {signal.Signals(number).name}. Run the same command again to resume.")


def _cannot_start(why: str) -> WorkerDied:
    return WorkerDied(
        f"No worker process could be started: {why}. What it printed is above. In a script, run() must be called under "
        "`if __name__ == '__main__':`, because each worker imports the script. A program without a file, as one from "
        "standard input, needs start_method='fork'."
    )
