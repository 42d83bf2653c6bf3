"""Temporary signal handlers: drain, save, restore the old handler, re-raise.

    first signal, or Slurm's time limit is near    no new document or request starts; requests in flight have
                                                   ``drain_seconds`` to be answered
    second signal                                  that wait ends at once
    then                                           everything is saved, the server stops, the old handlers are restored,
                                                   and the signals are raised again for them

Raised again, a signal has its usual effect (``reraise.py``): datatrove's Slurm executor requeues its job, SIGINT
becomes KeyboardInterrupt, SIGTERM becomes SystemExit. If the re-raised signal does not end the process, raise
``Preempted``: an early end must never look like a finished rank.

One event often sends several signals: srun passes a signal on to tasks that Slurm has signalled already. So a signal
within ``SAME_EVENT`` seconds of the first one is no second signal. Nor is the first SIGTERM after another signal in a
pool worker: Ctrl-C reaches the parent, too, which then terminates its workers.

The handlers only drive the rank's ``Shutdown``. ``loop.add_signal_handler`` would need a loop first, and could not
restore the handler that it replaced. Only the main thread can set handlers: a rank in another thread has no drain.

What the command does on a signal, alone or with a pool, is in ``cli/interruption.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self

from loguru import logger

from datatrove_ckpt.errors import Preempted
from datatrove_ckpt.process.host_loop import host_loop
from datatrove_ckpt.process.loop_watch import LoopWatch
from datatrove_ckpt.process.parent_watch import is_pool_worker
from datatrove_ckpt.process.reraise import raise_again
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.process.slurm_job import (
    handle_between_ranks,
    is_time_up,
    job_id_in_environment,
    requeue_if_preempted,
    slurm_deadline,
    stop_time,
    usual_handler,
)
from datatrove_ckpt.process.worker import is_worker

# Ignored, they stay ignored: nohup does that with SIGHUP, a shell with the SIGINT of what it starts in the background.
_OF_TERMINALS = ("SIGHUP", "SIGINT")
SAME_EVENT = 1.0
# Seconds between the end of the drain and the end of the job's time. Slurm looks at time limits every 30 s.
_MARGIN_SECONDS = 30.0
_TIME_LIMIT = "the end of the job's time limit"

Handler = Callable[[int, FrameType | None], object] | int | None
"""What ``signal.getsignal`` returns."""


class Preemption:
    """``with Preemption(...) as preemption:`` around the whole run of a rank.

    Args:
        signals: names of the signals to handle.
        drain_seconds: see ``Shutdown``.

    Attributes:
        shutdown: what the signals ask for.

    Raises:
        Preempted, KeyboardInterrupt, SystemExit: when the block ends, if a stop was requested. See ``reraise.py``.
    """

    def __init__(self, signals: Sequence[str], drain_seconds: float) -> None:
        self.shutdown = Shutdown(drain_seconds)
        self._names = signals
        self._previous: dict[int, Handler] = {}
        self._received: list[int] = []
        self._interruptible = False
        self._pid = os.getpid()
        self._expects_sigterm = is_pool_worker()

    # set the handlers, restore them, raise again ------------------------------------------------------------------

    def __enter__(self) -> Self:
        if (host := host_loop()) is not None:
            host.attach(self.shutdown)
        if threading.current_thread() is not threading.main_thread():
            logger.info("This rank runs in a thread: signals end it at once, without a drain.")
            return self
        for name in self._names:
            number = signal.Signals[name]
            handler = signal.getsignal(number)
            # None: a handler that Python did not set and cannot restore
            if handler is not None and not (handler is signal.SIG_IGN and name in _OF_TERMINALS):
                self._previous[number] = usual_handler(signal.signal(number, self._receive))
        self.shutdown.handles_interrupt = signal.SIGINT in self._previous
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        if not self.shutdown.is_requested:
            handle_between_ranks(self._previous)
            return
        if error is not None and not isinstance(error, Preempted | KeyboardInterrupt):
            logger.error(f"This rank was stopped by {self.shutdown.cause}, and it also failed: {error}")
        raise_again(self._received, self.shutdown)
        if self._received[:1] == [signal.SIGINT]:
            raise KeyboardInterrupt
        if error is None or isinstance(error, KeyboardInterrupt):
            self.shutdown.raise_preempted()

    # when a signal comes -----------------------------------------------------------------------------------------

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process forked from this one: it has these handlers, but not the event loop
            signal.signal(number, self._previous[number])
            os.kill(os.getpid(), number)
            return
        if number not in self._received:
            self._received.append(number)
        if not self.shutdown.is_requested:
            self.shutdown.request(signal.Signals(number).name)
        elif self._expects_sigterm and number == signal.SIGTERM:
            self._expects_sigterm = False
        elif self.shutdown.seconds > SAME_EVENT:
            unnoticed = self.shutdown.is_unnoticed
            self.shutdown.fast_stop()
            if unnoticed:
                raise KeyboardInterrupt  # the first signal was not noticed, so something blocks the event loop
        if self._interruptible:
            raise KeyboardInterrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around slow code that may be cut off anywhere: any handled signal raises KeyboardInterrupt in it."""
        self._interruptible = True
        try:
            if self.shutdown.is_requested:
                raise KeyboardInterrupt
            yield
        finally:
            self._interruptible = False

    @contextmanager
    def watched(self, save: Callable[[], None]) -> Iterator[None]:
        """Around the event loop: if it is blocked when a stop is requested, the process saves and ends all the same.

        Args:
            save: returns when everything that was handed over is on the disk.
        """
        if host_loop() is not None:  # the loop and the process are not ours to end
            yield
            return
        watch = LoopWatch(self.shutdown, save, self._hand_on)
        with self.shutdown.calling(watch.start):
            try:
                watch.start()
                yield
            finally:
                watch.close()

    def _hand_on(self) -> int:
        """For a process whose main thread is blocked: calls the old handlers in this thread. Returns the exit code."""
        for number in self._received:
            previous = self._previous.get(number)
            if callable(previous) and previous is not signal.default_int_handler:
                with suppress(BaseException), job_id_in_environment():
                    previous(number, None)
            elif previous is signal.SIG_DFL:
                with suppress(Exception):
                    requeue_if_preempted()
        return 128 + self._received[0] if self._received else 1

    # on the event loop -------------------------------------------------------------------------------------------

    async def watch_time_limit(self) -> None:
        """Requests a stop early enough before Slurm ends the job."""
        end = await slurm_deadline()
        if end is None:
            return
        await asyncio.sleep(stop_time(end, self.shutdown.drain_seconds + _MARGIN_SECONDS) - time.time())
        self._stop_for_time_limit()

    def check_time_limit(self) -> None:
        """Before a rank starts anything: an earlier rank of this process may have left it no time.

        Raises:
            Preempted: the time is up.
        """
        if is_time_up(self.shutdown.drain_seconds + _MARGIN_SECONDS):
            self._stop_for_time_limit()
            logger.warning(f"{_TIME_LIMIT} is too near to start this rank. The job's next attempt runs it.")
            self.shutdown.raise_preempted()

    def _stop_for_time_limit(self) -> None:
        if not self.shutdown.is_requested:
            self._received += self._requeueing_signal()
            self.shutdown.request(_TIME_LIMIT)

    def _requeueing_signal(self) -> list[int]:
        """The signal whose old handler requeues the job, as datatrove's Slurm executor has one."""
        if is_worker():  # the parent decides what follows
            return []
        for number in (signal.SIGUSR1, signal.SIGTERM):
            handler = self._previous.get(number, signal.getsignal(number))
            if callable(handler):
                return [number]
        return []
