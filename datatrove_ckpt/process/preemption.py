"""Stops a rank early, and then gives the signals that stopped it their usual effect.

    first signal, or Slurm's time limit is near    no new document or request starts; requests in
                                                   flight have ``drain_seconds`` to be answered
    second signal                                  that wait ends at once
    then                                           everything is saved, the server stops, the old
                                                   handlers are restored, and the signals are raised
                                                   again for them

If the raised signals do not end the process, ``Preempted`` is raised: an early end must never look
like a finished rank. A signal within ``SAME_EVENT`` seconds of the first does not count as the
second: srun passes a signal on to tasks that Slurm has already signalled.

``loop.add_signal_handler`` would need a loop first, and could not restore the old handler.
"""

import _thread
import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Self

import multiprocess
from loguru import logger

from datatrove_ckpt.errors import LimitReached, Preempted
from datatrove_ckpt.process import parent_watch, signals, slurm_job
from datatrove_ckpt.process.host_loop import host_loop, rank_of_many
from datatrove_ckpt.process.preemption_notices import Setting, watched_notices
from datatrove_ckpt.process.screen import exit_now
from datatrove_ckpt.process.shutdown import SAME_EVENT, Shutdown
from datatrove_ckpt.process.workers import in_worker

# All times are seconds.
_GRACE = 10.0  # after the drain's end
_GRACE_FAST = 7.0  # after a second signal
_SAVE = 30.0
_AGAIN = 0.2


@dataclass(eq=False)
class LoopWatchdog:
    """Ends a process that has a stop request, and whose event loop does not end before ``close``.

    A rollout may compute without end, or sleep in ``time.sleep`` and swallow KeyboardInterrupt.
    Then a thread waits until everything is on the disk, calls the old handlers, which may requeue
    the job, and ends the process, as ``kill -9`` would.

    The time in which servers stop and the checkpoint closes does not count: both have their own
    limits.

    Args:
        hand_on: calls the signal's old handlers; returns the exit code.
    """

    _shutdown: Shutdown
    _save: Callable[[], None]
    _hand_on: Callable[[], int]
    _started: bool = False
    _closed: bool = False

    def start(self) -> None:
        """Takes no lock, unlike ``threading.Thread.start``."""
        if self._shutdown.is_requested and not self._started:
            self._started = True
            _thread.start_new_thread(self._watch, ())

    def close(self) -> None:
        self._closed = True

    def _watch(self) -> None:
        while not self._closed:
            time.sleep(_AGAIN)
            shutdown = self._shutdown
            ends_at = max(shutdown.deadline, shutdown.closed_at) + (
                _GRACE_FAST if shutdown.is_fast else _GRACE
            )
            if time.monotonic() >= ends_at and not shutdown.open_closings and not self._closed:
                self._end()

    def _end(self) -> None:
        # The main thread may hold a lock, of the log for example.
        threading.Timer(_SAVE, exit_now, [1]).start()
        with suppress(BaseException):
            self._save()
        logger.error(
            "This task must stop, and a rollout blocks its event loop (time.sleep, a "
            "computation). The process ends now. Run again to resume."
        )
        exit_now(self._hand_on())


# Seconds between the end of the drain and the end of the job's time. Slurm checks time limits every
# 30 s.
_MARGIN_SECONDS = 30.0
_TIME_LIMIT = "the end of the job's time limit"
_REQUEUING = (signal.SIGUSR1, signal.SIGTERM)


def has_time_for(drain_seconds: float, seconds: float) -> bool:
    """Whether ``seconds`` of work fit before the last drain of this job.

    True for the first rank.
    """
    return not slurm_job.is_time_up(drain_seconds + _MARGIN_SECONDS + seconds)


class Preemption:
    """Stops a rank early. Enter it around the whole run of a rank.

    Raises:
        Preempted, KeyboardInterrupt, SystemExit: when the block ends, if a stop was requested. See
            ``raise_again``.
    """

    def __init__(
        self, names: Sequence[str], drain_seconds: float, notice: Setting | None = None
    ) -> None:
        self._host = host_loop()
        self.shutdown = Shutdown() if self._host is None else self._host.shutdown
        self.shutdown.drain_for(drain_seconds)
        self._names = names
        self._setting = notice
        self._notice = ""
        self._handlers = signals.Handlers(self._receive)
        self._received: list[int] = []
        self._interruptible = False
        self._is_one_of_many = rank_of_many() is not None
        # datatrove's executors have pools of multiprocessing.
        self._is_pool_worker = "PoolWorker" in multiprocess.current_process().name
        self._managers = parent_watch.managers()
        self._watches = ExitStack()

    def __enter__(self) -> Self:
        if self._is_pool_worker:
            parent_watch.die_with_parent()
            logger.info(
                "This task runs in multiprocessing's pool, where signals end it without a drain. "
                "Use datatrove_ckpt.LocalPipelineExecutor."
            )
        if signals.in_main_thread():
            signals.between_ranks.restore()
            numbers = [signal.Signals[name] for name in self._names]
            self._handlers.install(filter(signals.may_handle, numbers))
        elif not (self._is_one_of_many or self._is_pool_worker):
            logger.info("This task runs in a thread: signals end it without a drain.")
        parent = self.shutdown.parent  # its rollouts run in the main thread
        of_process = parent is not None and parent.handles_interrupt
        self.shutdown.handles_interrupt = of_process or signal.SIGINT in self._handlers.usual
        if self._setting is not None and not self._is_one_of_many:
            self._watches.enter_context(
                watched_notices(self._setting, self.shutdown, self._notice_came)
            )
        return self

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        trace: object,
    ) -> None:
        if self._host is not None:
            self._host.detach()
        self._watches.close()
        numbers = list(self._handlers.usual)
        self._handlers.restore()
        if not self.shutdown.is_requested:
            signals.handle_between_ranks(numbers)
            return
        if error is not None and not isinstance(
            error, Preempted | KeyboardInterrupt | LimitReached
        ):
            logger.error(
                f"This task was stopped by {self.shutdown.cause}, and it also failed: {error}"
            )
        # A signal to the group has ended them; datatrove's executor would fail in its ``finally``
        # block.
        managers_ended = not all(manager.is_alive() for manager in self._managers)
        signals.raise_again(self._received, at_once=managers_ended)
        if self._received[:1] == [signal.SIGINT]:
            raise KeyboardInterrupt
        if error is None or isinstance(error, KeyboardInterrupt):
            self.shutdown.raise_preempted()

    # when a signal comes -------------------------------------------------------------------------

    def _receive(self, number: int) -> None:
        if self._is_pool_worker:
            os.kill(os.getpid(), signal.SIGKILL)
        if number not in self._received:
            self._received.append(number)
        # A failing rank drains already. A worker's parent may stop all after another rank's
        # failure.
        shutdown = self.shutdown
        is_first = not shutdown.is_draining or (in_worker() and not shutdown.is_requested)
        cause = signal.Signals(number).name
        if number == signal.SIGTERM and self._notice:
            cause = self._notice
        shutdown.request(cause)
        if not is_first and shutdown.seconds > SAME_EVENT:
            unnoticed = shutdown.is_unnoticed
            shutdown.fast_stop()
            if unnoticed:
                # The first signal went unnoticed, so the event loop is blocked.
                raise KeyboardInterrupt
        if self._interruptible:
            raise KeyboardInterrupt

    def _notice_came(self, notice: str) -> None:
        """Requests a stop. A worker signals its parent."""
        self._notice = notice
        if self.shutdown.is_requested:
            if self._received[:1] == [signal.SIGTERM]:
                self.shutdown.cause = notice
        elif self._is_pool_worker or signal.SIGTERM not in self._handlers.usual:
            self.shutdown.request(notice)
        else:
            logger.warning(f"This node goes away: {notice}.")
            process = multiprocess.current_process()
            if in_worker():
                process = multiprocess.parent_process()
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets signals raise KeyboardInterrupt in code that may be cut off anywhere."""
        self._interruptible = True
        try:
            if self.shutdown.is_requested:
                raise KeyboardInterrupt
            yield
        finally:
            self._interruptible = False

    @contextmanager
    def watched(self, save: Callable[[], None]) -> Iterator[None]:
        if self._host is not None:  # the loop and the process are not ours to end
            with self._host.saving(save):
                yield
            return
        watch = LoopWatchdog(self.shutdown, save, self._hand_on)
        with self.shutdown.calling(watch.start), closing(watch):
            watch.start()
            yield

    def _hand_on(self) -> int:
        """Calls the old handlers in this thread: the main thread is blocked.

        Returns the exit code.
        """
        for number in self._received:
            previous = self._handlers.usual.get(number)
            if callable(previous) and previous is not signal.default_int_handler:
                with suppress(BaseException), slurm_job.job_id_in_environment():
                    previous(number, None)
            elif previous is signal.SIG_DFL:
                with suppress(Exception):
                    slurm_job.requeue_if_preempted()
        if self._received:
            return 128 + self._received[0]
        return 1

    async def watch_time_limit(self) -> None:
        if self._is_one_of_many:
            return
        end = await slurm_job.slurm_deadline()
        if end is None:
            return
        await asyncio.sleep(
            slurm_job.stop_time(end, self.shutdown.drain_seconds + _MARGIN_SECONDS) - time.time()
        )
        self.stop_for_time_limit()

    def check_time_limit(self) -> None:
        """Stops this rank if an earlier rank of this process has left it no time.

        Raises:
            Preempted: no time is left.
        """
        if not self._is_one_of_many and not has_time_for(self.shutdown.drain_seconds, 0.0):
            self.stop_for_time_limit()
            logger.warning(f"{_TIME_LIMIT} is too near. The job's next attempt runs this task.")
            self.shutdown.raise_preempted()

    def stop_for_time_limit(self) -> None:
        if not self.shutdown.is_requested:
            # As if the signal had come whose old handler requeues the job; a worker's parent does
            # that.
            usual = {
                number: self._handlers.usual.get(number, signal.getsignal(number))
                for number in _REQUEUING
            }
            if not in_worker() and not self._is_pool_worker:
                self._received += [
                    number for number, handler in usual.items() if callable(handler)
                ][:1]
            self.shutdown.request(_TIME_LIMIT)
