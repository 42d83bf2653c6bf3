"""Worker processes that we start and own. Each takes its tasks over a pipe.

    this process                         a worker
    starts it, with signals blocked  ->  sets its handlers, unblocks, leaves the process group
                                     <-  "ready": it has room for a task, perhaps beside others
    sends a task                     ->  runs it
    shows it                         <-  where its rank stands, once a second
                                     <-  its outcome
    passes on signals to stop        ->  its tasks drain, or end; its exit code says so
    sends None                       ->  ends

A ready worker with running tasks gets no None before they are done: another worker may die and
leave a task. ``common/attempts.py`` decides how often such a task is tried.

No lock or queue is shared, so this process notices a killed worker at once, where CPython's pool
waits without end. Only this process gets a terminal's signals.
"""

import asyncio
import math
import os
import select
import signal
import sys
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import fsspec.asyn
from loguru import logger
from multiprocess import connection as connections
from multiprocess import forkserver, resource_tracker
from multiprocess.context import BaseContext
from multiprocess.reduction import ForkingPickler

from datatrove_ckpt.common.attempts import AttemptRecord, may_overlap
from datatrove_ckpt.common.formatting import plural, safe_text
from datatrove_ckpt.common.memory import WORKERS_VARIABLE
from datatrove_ckpt.errors import CkptError, Preempted, WorkerDied
from datatrove_ckpt.process import signals
from datatrove_ckpt.process.event_loop import end_fork
from datatrove_ckpt.process.gc_tuning import gc_tuned
from datatrove_ckpt.process.parent_watch import die_with_parent
from datatrove_ckpt.process.screen import TICK_SECONDS, RankProgress, Screen, reporting_to
from datatrove_ckpt.process.shutdown import SAME_EVENT, exit_error


@dataclass
class TaskList:
    """Tasks from an iterator, which may block.

    Args:
        done: called with each task and its result, unless that is None: another process has the
            task.
    """

    _tasks: Iterator[int]
    _done: Callable[[int, object], None]

    def next(self) -> int | None:
        return next(self._tasks, None)

    async def wait_for_next(self) -> int | None:
        return await asyncio.to_thread(self.next)

    def done(self, task: int, result: object) -> None:
        if result is not None:
            self._done(task, result)

    def failed(self, task: int | None, error: BaseException) -> None:
        pass


# Seconds that workers have to end after a second signal, and once they have closed.
_AFTER_SECOND_SIGNAL = 10.0
_TO_EXIT = 5.0


@dataclass(eq=False)
class _WorkerProcess:
    """One worker, as its parent sees it.

    Attributes:
        _handle: a pidfd; None: the process has ended, or the kernel or the container has no pidfds.
    """

    slot: int
    connection: connections.Connection
    process: Any
    _handle: int | None = None
    tasks: set[int] = field(default_factory=set)
    is_ready: bool = False
    was_ready: bool = False
    is_ending: bool = False
    is_failing: bool = False
    ends_by: float = math.inf
    is_silent: bool = False

    def __post_init__(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                self._handle = os.pidfd_open(self.process.pid)

    @property
    def sentinel(self) -> int:
        """Becomes readable when the process ends. multiprocess's sentinel also does when the fork
        server ends.
        """
        if self._handle is not None:
            return self._handle
        return int(self.process.sentinel)

    def messages(self) -> Iterator[Any]:
        try:
            while self.connection.poll():
                yield self.connection.recv()
        except (EOFError, OSError):
            self.is_silent = True

    def send(self, message: object) -> None:
        with suppress(OSError):  # it has ended, as its sentinel shows
            self.connection.send(message)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)
            elif self.process.is_alive():
                os.kill(self.process.pid, number)

    def close(self) -> str:
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + _TO_EXIT
        # Not join, which waits for a pipe that a fork of the worker may hold open.
        while self.process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.005)
        self.connection.close()
        if self._handle is not None:
            os.close(self._handle)
        code = self.process.exitcode
        if code == -signal.SIGKILL:
            return "was ended by SIGKILL (mostly out of memory: use fewer workers)"
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


@dataclass(eq=False, repr=False)
class Workers:
    """Runs tasks in worker processes: ``with Workers(...) as workers:`` around
    ``workers.run(tasks)``. The end of the block leaves no process.

    Args:
        stop_seconds: time for a worker's tasks after a request to stop, before it is killed.
    """

    context: BaseContext
    count: int
    work: "Work"
    numbers: Iterable[int]
    max_attempts: int
    stop_seconds: float = math.inf
    screen: Screen | None = None

    def __post_init__(self) -> None:
        self.lost: dict[int, str] = {}
        self.signal = 0
        self._numbers = sorted(filter(signals.may_handle, set(self.numbers)))
        self._workers: list[_WorkerProcess] = []
        self._tasks = deque[int]()
        self._records = defaultdict[int, AttemptRecord](AttemptRecord)
        self._failed_starts = 0
        self._error: Exception | None = None
        self._is_failing = False
        self._requests = 0
        self._to_pass_on = deque[int]()
        self._came = 0.0
        self._handlers = signals.Handlers(self._receive)

    def __enter__(self) -> Self:
        self._handlers.install(self._numbers)
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.close()
        self._handlers.restore()

    def run(self, tasks: Iterable[int]) -> Iterator[tuple[int, object]]:
        """Yields each task that is done, with its result, as they finish. After a ``signal``, all
        tasks have drained.

        Raises:
            WorkerDied: no worker could be started.
            Exception: the error of the first task that failed; the other tasks have drained.
        """
        self._tasks.extend(tasks)
        self._start()
        while self._workers:
            ends = [worker.sentinel for worker in self._workers]
            open_ = [worker.connection for worker in self._workers if not worker.is_silent]
            # A signal interrupts no wait.
            connections.wait([*ends, *open_], TICK_SECONDS)
            if self.screen is not None:
                self.screen.tick()
            for worker in list(self._workers):
                yield from self._read_replies(worker)
            self._start()
            # After ``_start``: if no worker can be started, the running workers must stop.
            self._pass_on()
            self._kill_late()
            self._assign()
        if not self.signal and self._error is not None:
            raise self._error

    @property
    def _stops(self) -> bool:
        return self.signal > 0 or self._error is not None

    @property
    def _idle(self) -> int:
        return sum(not worker.tasks and not worker.is_ending for worker in self._workers)

    def _start(self) -> None:
        free = self._idle
        while not self._stops and len(self._tasks) > free and len(self._workers) < self.count:
            slot = min(set(range(self.count)) - {worker.slot for worker in self._workers})
            method = self.context.get_start_method()
            if method != "fork":
                resource_tracker.ensure_running()  # its own start unblocks signals
            if method == "forkserver":
                # Started before signals are blocked here, because its processes inherit the mask:
                # datatrove's pools use it, and their ``terminate`` would wait forever for a worker
                # that blocks SIGTERM.
                forkserver.ensure_running()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
            try:
                below_bar = self.screen is not None and self.screen.has_bar
                environment = {**os.environ, WORKERS_VARIABLE: str(self.count)}
                ours, theirs = connections.Pipe()
                arguments = (theirs, environment, self._numbers, self.work, slot, below_bar)
                # Not a daemon: a step may start processes of its own.
                process = self.context.Process(target=work, args=arguments, daemon=False)
                with theirs:  # closed here once the worker has it
                    process.start()
                self._workers.append(_WorkerProcess(slot, ours, process))
            except (EOFError, ConnectionError):  # the fork server has ended
                self._error = _cannot_start("the process that starts them has ended")
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            free += 1

    def _assign(self) -> None:
        for worker in sorted(self._workers, key=lambda worker: len(worker.tasks)):
            if not worker.is_ready:
                continue
            task = None if self._stops else self._take(worker)
            if task is not None:
                worker.tasks.add(task)
            elif worker.tasks:
                continue
            worker.is_ready = False
            worker.is_ending = task is None
            worker.send(task)

    def _take(self, worker: _WorkerProcess) -> int | None:
        if not self._tasks:
            return None
        if worker.tasks:
            # Tasks that are tried alone come last.
            beside = [self._records[task] for task in (*worker.tasks, self._tasks[0])]
            if not may_overlap(beside, len(self._tasks), self._idle):
                return None
        return self._tasks.popleft()

    def _read_replies(self, worker: _WorkerProcess) -> Iterator[tuple[int, object]]:
        # Read first: then all messages from before the end have come.
        has_ended = connections.wait([worker.sentinel], 0)
        for message in worker.messages():
            task = message.task
            if message.kind == "ready":
                worker.is_ready = worker.was_ready = True
                self._failed_starts = 0
            elif message.kind == "closed":
                worker.ends_by = time.monotonic() + _TO_EXIT
            elif message.kind == "at work":
                if self.screen is not None:
                    self.screen.progress.update(task, message.value)
            elif message.kind == "done":
                worker.tasks.remove(task)
                yield task, message.value
            else:
                worker.is_failing = True
                worker.tasks.discard(task)
                self._error = self._error or message.value
        if has_ended:
            self._workers.remove(worker)
            how = worker.close()
            if not self._stops:
                self._died(worker, how)

    def _died(self, worker: _WorkerProcess, how: str) -> None:
        if not worker.was_ready:
            self._failed_starts += 1
            if self._failed_starts >= self.max_attempts:
                self._error = _cannot_start(f"the last process {how}")
        reason = f"its worker process {how}"
        for task in sorted(worker.tasks):
            record = self._records[task]._replace(alone=True)
            if len(worker.tasks) == 1:
                # Progress does not count here: it would try a task that kills workers for days.
                record = record.ended(reason, self.max_attempts)
            self._records[task] = record
            tried = f"{record.tries} of {plural(self.max_attempts, 'attempt')}"
            if record.why:
                logger.error(f"Task {task}: {reason}, in {tried}. The other tasks continue.")
                self.lost[task] = reason
            else:
                logger.warning(f"Task {task}: {reason}. It starts again alone, after {tried}.")
                self._tasks.append(task)

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        if not self.signal:
            self.signal = number
            self._came = now
        elif now - self._came < SAME_EVENT:
            return
        self._requests += 1
        self._to_pass_on.append(number)

    def _pass_on(self) -> None:
        """Passes requests to stop on. Workers without tasks end in ``_assign``."""
        if self._error is not None and not self._is_failing:
            self._is_failing = True
            self._to_pass_on += [signal.SIGTERM] if signal.SIGTERM in self._numbers else []
        while self._to_pass_on:
            number = self._to_pass_on.popleft()
            busy = [worker for worker in self._workers if worker.tasks]
            reason = "a task has failed"
            if self.signal:
                reason = signal.Signals(number).name
            if self._requests > 1:
                reason = f"{reason} again, the drain is over"
            if busy:
                tasks = plural(sum(len(worker.tasks) for worker in busy), "running task")
                logger.warning(f"{reason}: {tasks} must stop; what is finished is saved.")
            for worker in busy:
                if not worker.is_failing or self.signal:  # else its tasks drain already
                    worker.signal(number)
                worker.ends_by = min(worker.ends_by, time.monotonic() + self.stop_seconds)
            for worker in self._workers:
                if not worker.was_ready:  # it still imports, and has nothing to save
                    worker.signal(signal.SIGKILL)
                if self._requests > 1:
                    worker.ends_by = min(worker.ends_by, time.monotonic() + _AFTER_SECOND_SIGNAL)

    def _kill_late(self) -> None:
        for worker in self._workers:
            if time.monotonic() >= worker.ends_by:
                for task in sorted(worker.tasks):
                    logger.error(
                        f"Task {task} does not end. Its process {worker.process.pid} is killed."
                    )
                worker.signal(signal.SIGKILL)
                worker.ends_by = math.inf


def _cannot_start(reason: str) -> WorkerDied:
    return WorkerDied(
        f"No worker process could be started: {reason}. A script must call run() under `if "
        "__name__ == '__main__':`; a program without a file needs start_method='fork'."
    )


_in_worker = False


class Message(NamedTuple):
    """A message to the parent.

    Attributes:
        kind: "ready" for a task; "at work": progress of a rank; "done" or "failed": the end of a
            task, and after a failure the worker ends; "closed": only the interpreter's own end is
            left.
        task: None: all tasks of the worker that are not done.
    """

    kind: Literal["ready", "at work", "done", "failed", "closed"]
    task: int | None = None
    value: object = None


def in_worker() -> bool:
    return _in_worker


def work(
    connection: connections.Connection,
    environment: dict[str, str],
    numbers: list[int],
    run: "Work",
    slot: int,
    below_bar: bool,
) -> None:
    """Runs a worker process.

    Args:
        environment: the parent's, because a fork server has an older one.
        numbers: signals that request a stop. A process of the fork server does not block them yet.
    """
    global _in_worker
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    _in_worker = True
    os.setpgid(0, 0)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    # Or a terminal with tostop would stop this process when it logs.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    die_with_parent()
    # While signals are blocked: an interrupted start of a loop prints a traceback.
    fsspec.asyn.get_loop()
    worker = _Worker(connection)
    signals.Handlers(worker.receive).install(numbers)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    with reporting_to(worker.report, below_bar), gc_tuned():
        worker.serve(run, slot)


class _Worker:
    def __init__(self, connection: connections.Connection) -> None:
        self._connection = connection
        self._at_work = set[int]()
        self._has_failed = False  # as the parent knows
        self._stop_signal = 0
        self._pid = os.getpid()

    def serve(self, run: "Work", slot: int) -> None:
        try:
            run(slot, self)
        except BaseException as error:
            task = None
            if len(self._at_work) == 1:
                (task,) = self._at_work
            self.failed(task, error)
        finally:
            self._send(Message("closed"))
        if self._stop_signal:
            sys.exit(128 + self._stop_signal)  # the parent may not have sent it

    def next(self) -> int | None:
        self._send(Message("ready"))
        return self._take()

    async def wait_for_next(self) -> int | None:
        """Does ``next`` on an event loop."""
        self._send(Message("ready"))
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
        if self._stop_signal:  # it came before the task
            self._at_work.clear()
            return None
        return task

    def done(self, task: int, value: object) -> None:
        end_fork(self._pid)
        self._at_work.discard(task)
        self._send(Message("done", task, value))

    def failed(self, task: int | None, error: BaseException) -> None:
        """Reports a failure, which the parent raises once all tasks have ended. None: of the
        runner.
        """
        end_fork(self._pid, error)
        self._at_work.clear()
        is_stopped = self._stop_signal and (
            not isinstance(error, Exception) or isinstance(error, Preempted)
        )
        if not self._has_failed and not is_stopped:
            self._has_failed = True
            self._send(Message("failed", task, _sendable(error, task)))

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the parent is gone
            self._connection.send(message)

    def report(self, rank: int, progress: RankProgress) -> None:
        """Sends the progress of a rank, unless sending would block: the parent may be busy."""
        with suppress(OSError):  # the parent is gone
            if select.select([], [self._connection.fileno()], [], 0)[1]:
                self._connection.send(Message("at work", rank, progress))

    def receive(self, number: int) -> None:
        self._stop_signal = number
        if self._at_work:
            self._at_work.clear()
            raise SystemExit(128 + number)


Tasks = TaskList | _Worker
"""The source of a process's tasks, to which it also reports their ends."""

Work = Callable[[int, Tasks], object]
"""A function that is pickled into a worker, and called with its slot and its tasks."""


def _sendable(error: BaseException, number: int | None) -> Exception:
    task = "its tasks" if number is None else f"task {number}"
    if not isinstance(error, Exception):
        return exit_error(f"A step of {task}", error)
    text = "".join(traceback.format_exception(error))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # of a user's __reduce__ or __init__
        name = f"{type(error).__name__}: {safe_text(error)}"
        return CkptError(f"{task.capitalize()} failed with {name}\n{text}")
    if not getattr(error, "__notes__", ()):  # a note names the log that has it
        error.add_note(f"In the worker process of {task}:\n{text}")
    return error
