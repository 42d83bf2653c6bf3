"""Signals borrowed and given back: how a rank ends early and still saves what it has paid for.

    a signal, or the end of the job's time comes near    nothing new is begun; what is in flight has ``drain_seconds``
    a second signal                                      that wait is over
    then      everything is written down, the server stops, the handlers that were there before come back, and the
              signal is handed on to its own

Handed on means: raised again. datatrove's Slurm executor then requeues its job, SIGINT becomes KeyboardInterrupt,
SIGTERM ends the process. Where nothing of that ends us, ``Preempted`` does: an early end is never taken for a finished
rank.

One event often sends several signals: srun passes on what Slurm sends its tasks anyway. So what follows within
``SAME_EVENT`` seconds is no second signal. Nor is the first SIGTERM after another signal in a pool's worker: Ctrl-C
reaches the parent, too, which then terminates its workers.

Handlers here are plain ones, which wake the event loop. ``loop.add_signal_handler`` would need a loop first, and could
not put back what it replaced. Signals are the main thread's: a rank that runs in another thread does without.

What the command does that started the rank, alone or in a pool, is in interruption.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from loguru import logger

from datatrove_ckpt.errors import ConfigError, Preempted
from datatrove_ckpt.process.parent_watch import is_pool_worker
from datatrove_ckpt.process.pool_workers import leave_after_this_task, leave_between_tasks, leaves_of, told
from datatrove_ckpt.process.slurm_job import meaning_this_task, requeue_if_preempted, slurm_deadline

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
# Slurm kills 30 s (KillWait) after SIGTERM: that leaves 10 s to stop the server and to have the job requeued.
DRAIN_SECONDS = 20.0
SAME_EVENT = 1.0
# Seconds between the end of the drain and the end of the job's time. Slurm looks at time limits every 30 s.
_MARGIN = 30.0
_NOT_HANDLED = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
_TIME_LIMIT = "the end of the job's time limit"


def check_signals(names: Sequence[str]) -> tuple[str, ...]:
    """The names as they are.

    Raises:
        ConfigError: not a signal, or one that no process can catch.
    """
    if isinstance(names, str):
        raise ConfigError(f"drain_signals: must be a list of names such as {list(SIGNALS)}; it is {names!r}.")
    for name in names:
        if name not in signal.Signals.__members__:
            raise ConfigError(f"drain_signals: {name!r} is no signal of this system; give names such as SIGTERM.")
        if name in ("SIGKILL", "SIGSTOP"):
            raise ConfigError(f"drain_signals: no process can catch {name}.")
    return tuple(names)


class Preemption:
    """``with Preemption(...) as preemption:`` around the whole run of a rank.

    Args:
        signals: names of the signals to borrow.
        drain_seconds: how long what is in flight may take.

    Attributes:
        cause: what told the rank to end; "" as long as nothing did.
        given_up: how many requests were in flight when the wait was over.
        on_signal: called in the signal handler, so it must be safe there: no locks, no logging.

    Raises:
        Preempted, KeyboardInterrupt: at the end, when the rank was told to end and nobody else ended it.
    """

    def __init__(self, signals: Sequence[str], drain_seconds: float) -> None:
        self.drain_seconds = drain_seconds
        self.cause = ""
        self.given_up = 0
        self.on_signal: Callable[[], None] = lambda: None
        self._names = signals
        self._previous: dict[int, Any] = {}
        self._numbers: list[int] = []
        self._began = 0.0
        self._in_haste = False
        self._raising = False
        self._noticed = False
        self._wake: Callable[[], None] | None = None
        self._told = asyncio.Event()
        self._wait: asyncio.Timeout | None = None
        self._pid = os.getpid()
        self._expects_sigterm = is_pool_worker()

    @property
    def seconds(self) -> float:
        """Since the rank was told to end."""
        return time.monotonic() - self._began

    # borrowed and given back -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            logger.info("This rank runs in a thread: signals end it at once, without a drain.")
            return self
        leave_between_tasks([signal.Signals[name] for name in self._names])
        for name in self._names:
            number = signal.Signals[name]
            if signal.getsignal(number) is not None:  # None: not Python's, which Python cannot give back
                self._previous[number] = signal.signal(number, self._receive)
        if leaves_of(signal.SIGTERM):  # not borrowed: it ends this process, as usual
            self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (before := told()) is not None:  # while this task was being taken
            self._tell(signal.Signals(before).name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        if not self.cause:
            return
        if error is not None and not isinstance(error, Preempted | KeyboardInterrupt):
            logger.error(f"Besides being told to end by {self.cause}, this rank failed: {error}")
        self._hand_on()
        if self._numbers[:1] == [signal.SIGINT]:
            raise KeyboardInterrupt
        if error is None or isinstance(error, KeyboardInterrupt):
            self.end()

    def _hand_on(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for number in self._numbers:
            if is_pool_worker() and (signal.getsignal(number) in _NOT_HANDLED or leaves_of(number)):
                self._leave_pool(number)
            if signal.getsignal(number) is signal.SIG_DFL:
                requeue_if_preempted()
            try:
                with meaning_this_task():
                    signal.raise_signal(number)
            except SystemExit as end:
                if not is_pool_worker():
                    raise end from None
                # A handler that was forked along, as Ray's is: the parent would wait for a result for ever.
                self._leave_pool(number)
            except BaseException as end:
                raise end from None  # what the rank itself ended with is no news

    def _leave_pool(self, number: int) -> NoReturn:
        """The parent waits for this task's result, so it gets an error before this process ends. If it is ending its
        pool already, it waits for the end of this process."""
        leave_after_this_task(number)
        self.end()

    def end(self) -> NoReturn:
        """Raises Preempted."""
        raise Preempted(f"Told to end by {self.cause}. The same command, run again, goes on from there.")

    # when a signal comes -----------------------------------------------------------------------------------------

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork of ours, which has our handlers and not our event loop
            signal.signal(number, self._previous[number])
            os.kill(os.getpid(), number)
            return
        if number not in self._numbers:
            self._numbers.append(number)
        if not self.cause:
            self._tell(signal.Signals(number).name)
        elif self._expects_sigterm and number == signal.SIGTERM:
            self._expects_sigterm = False
        elif self.seconds > SAME_EVENT:
            if self._wake is not None and not self._noticed:
                raise KeyboardInterrupt  # something blocks the event loop
            self._in_haste = True
            self._call()
        if self._raising:
            raise KeyboardInterrupt

    def _tell(self, cause: str) -> None:
        self._began = time.monotonic()
        self.cause = cause
        self._call()

    def _call(self) -> None:
        self.on_signal()
        if self._wake is not None:
            self._wake()

    def raise_if_stop_requested(self) -> None:
        """Where nothing is begun yet.

        Raises:
            Preempted: the rank is to end.
        """
        if self.cause:
            self.end()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Around code that may take long, and may end anywhere: any signal raises KeyboardInterrupt in it."""
        self._raising = True
        try:
            if self.cause:
                raise KeyboardInterrupt
            yield
        finally:
            self._raising = False

    # on the event loop -------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """On the event loop: an event that is set once the rank is to end."""
        loop = asyncio.get_running_loop()
        self._told = asyncio.Event()
        self._noticed = False
        self._wake = lambda: _call_soon(loop, self._notice)
        try:
            if self.cause:
                self._notice()
            yield self._told
        finally:
            self._wake = None

    def _notice(self) -> None:
        self._noticed = True
        self._told.set()
        if self._in_haste and self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def _waiting(self, wait: asyncio.Timeout) -> Iterator[None]:
        self._wait = wait
        try:
            yield
        finally:
            self._wait = None

    async def wait_for(self, awaitable: Any) -> bool:
        """Waits for something, as long as the drain may take; whether it came."""
        left = 0.0 if self._in_haste else max(0.0, self.drain_seconds - self.seconds)
        try:
            async with asyncio.timeout(left) as wait:
                with self._waiting(wait):
                    await awaitable
        except TimeoutError:
            return False
        return True

    async def watch_time_limit(self) -> None:
        """Ends the rank early enough before Slurm ends the job."""
        end = await slurm_deadline()
        if end is None:
            return
        left = end - time.time()
        # At least half of a short time is for work, or such a job would be requeued for ever.
        reserve = min(self.drain_seconds + _MARGIN, left / 2)
        await asyncio.sleep(left - reserve)
        if not self.cause:
            self._numbers += self._requeueing_signal()
            self._tell(_TIME_LIMIT)

    def _requeueing_signal(self) -> list[int]:
        """The signal somebody waits for in order to requeue the job, as datatrove's Slurm executor does."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            handler = self._previous.get(number, signal.getsignal(number))
            if callable(handler):
                return [number]
        return []


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # closed meanwhile: nobody left to tell
        loop.call_soon_threadsafe(callback)
