"""``Shutdown`` holds whether a rank ends early, and how quickly. All code that waits, waits on it.

    ``is_requested``   a signal or the like requested a stop
    ``is_stopping``    it did, or the rank fails: nothing new starts, and requests in flight have
                       until ``deadline``
    ``is_fast``        a second signal came: all waits end
    ``aborted``        work in progress is cut off, and not recorded: the drain is over, or nothing
                       can be saved

``generation/scheduler.py`` has the order of a stop. Signal handlers call ``request`` and
``fast_stop``: neither this module nor a callback may lock or log.

``no_exit`` turns attempts of foreign code to end the process (``sys.exit(0)`` in a rollout, a
reader or ``shared_context``) into errors. ``SystemExit`` is no ``Exception``, so datatrove would
see no failure: documents would be missing after exit code 0, or its pool would wait without end.
"""

import asyncio
import math
import os
import queue
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NoReturn, TypeVar

from datatrove_ckpt.common.formatting import safe_repr
from datatrove_ckpt.errors import ConfigError, Preempted, UnexpectedExit
from datatrove_ckpt.process.event_loop import call_soon, end_fork

T = TypeVar("T")

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
"""Request a stop by default."""
SAME_EVENT = 1.0
"""Seconds: signals within this time after the first signal are the same request to stop."""


def check_signals(names: Sequence[str], setting: str = "drain_signals") -> tuple[str, ...]:
    """Returns a tuple; a text is a single name.

    Raises:
        ConfigError: a name is not a signal.
    """
    if isinstance(names, str):
        names = [names]
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise ConfigError(
                f"{setting}: {name!r} is no signal that can be caught here; give names such as "
                "SIGTERM."
            )
    return tuple(names)


class Shutdown:
    """The stop of one rank.

    Attributes:
        cause: a signal's name or the time limit; "" without a requested stop.
        deadline: end of the drain (``time.monotonic``); infinite if the rank does not stop.
        late: the drain did not end in time, so servers are killed.
        closed_at: end of the last ``closing`` block (``time.monotonic``); 0 if there was none.
        handles_interrupt: SIGINT requests a stop, so Python's own handler raises no
            KeyboardInterrupt.
    """

    def __init__(self, drain_seconds: float = 0.0, parent: "Shutdown | None" = None) -> None:
        self.drain_seconds = drain_seconds
        self.parent = parent
        self.cause = ""
        self.failure: BaseException | None = None
        self.deadline = math.inf
        self.is_fast = False
        self.is_stopping = False
        self.aborted = False
        self.late = False
        self.given_up = 0
        self.open_closings = 0
        self.closed_at = 0.0
        self.handles_interrupt = False
        self._began_at = 0.0
        self._unnoticed = False
        # Threads and signal handlers add and remove callbacks, which is atomic.
        self._callbacks: dict[object, Callable[[], object]] = {}

    def drain_for(self, seconds: float) -> None:
        self.drain_seconds = seconds

    def request(self, cause: str) -> None:
        """Stops the rank early. A second request changes nothing."""
        if not self.cause:
            self._begin(self.drain_seconds)
            self.cause = cause
            self._changed()

    def fail(self, failure: BaseException) -> None:
        """Lets the rank drain, then fail. Only on the event loop."""
        self._fail(failure, self.drain_seconds)

    def finish(self, reason: BaseException) -> None:
        """Ends the rank early with ``reason``, after all requests in flight, because they are paid.
        A signal limits the wait for them. Only on the event loop.
        """
        self._fail(reason, math.inf)

    def _fail(self, failure: BaseException, drain_seconds: float) -> None:
        if self.failure is None and not self.aborted:
            self._begin(drain_seconds)
            self.failure = failure
            self._changed()

    def _begin(self, drain_seconds: float) -> None:
        now = time.monotonic()
        if not self.is_draining:
            self._began_at = now
            self.is_stopping = True
        self.deadline = min(self.deadline, now + drain_seconds)

    def fast_stop(self) -> None:
        self.is_fast = True
        self.deadline = min(self.deadline, time.monotonic())
        self._changed()

    def abort(self, failure: BaseException | None = None) -> None:
        """Cuts off work unrecorded. The first failure counts. Only on the event loop."""
        if self.aborted and (failure is None or self.failure is not None):
            return  # each document that is cut off calls this
        self.aborted = True
        self.failure = self.failure if failure is None else failure
        self._changed()

    @property
    def is_requested(self) -> bool:
        return self.cause != ""

    @property
    def is_finishing(self) -> bool:
        """Whether it waits for all requests in flight: see ``finish``."""
        return self.is_stopping and not self.cause and math.isinf(self.deadline)

    @property
    def is_draining(self) -> bool:
        """Whether requests in flight have a limited time."""
        return self.is_stopping and not self.is_finishing

    @property
    def has_failed(self) -> bool:
        """Whether the rank cannot become complete."""
        return self.aborted or self.failure is not None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_at

    @property
    def is_unnoticed(self) -> bool:
        """Whether a blocked event loop does not see the stop."""
        return self._unnoticed and self.cause != ""

    def raise_preempted(self) -> NoReturn:
        raise Preempted(f"Stopped by {self.cause}. Run again to resume.")

    def check(self) -> None:
        """Checks for a stop where nothing needs a drain.

        Raises:
            Preempted: a stop is requested.
        """
        if self.cause:
            self.raise_preempted()

    def raised(self, error: BaseException) -> bool:
        """Whether a signal, not the user's code, may have raised this error."""
        return isinstance(error, KeyboardInterrupt) and (
            self.cause != "" or not self.handles_interrupt
        )

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Marks work that a stop must wait for. Only on the event loop."""
        self.open_closings += 1
        try:
            with nullcontext() if self.parent is None else self.parent.closing():
                yield
        finally:
            self.closed_at = time.monotonic()
            self.open_closings -= 1

    @contextmanager
    def calling(self, callback: Callable[[], object]) -> Iterator[None]:
        """Calls ``callback`` after each change in this block, perhaps in a signal handler."""
        key = object()
        self._callbacks[key] = callback
        try:
            yield
        finally:
            del self._callbacks[key]

    def call(self, callback: Callable[[], object]) -> None:
        self._callbacks[object()] = callback

    def _changed(self) -> None:
        for callback in list(self._callbacks.values()):
            callback()

    async def requested(self) -> None:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        self._unnoticed = True
        try:
            with self.calling(lambda: call_soon(loop, changed.set)):
                while not self.is_stopping:
                    changed.clear()
                    await changed.wait()
        finally:
            self._unnoticed = False

    async def wait_for(self, awaitable: Awaitable[object]) -> bool:
        loop = asyncio.get_running_loop()
        waits = True

        def hurry() -> None:
            if waits and not limit.expired():
                limit.reschedule(loop.time() + max(0.0, self.deadline - time.monotonic()))

        try:
            async with asyncio.timeout(max(0.0, self.deadline - time.monotonic())) as limit:
                with self.calling(lambda: call_soon(loop, hurry)):
                    try:
                        await awaitable
                    finally:
                        waits = False
        except TimeoutError:
            return False
        return True

    def join(self, ended: queue.SimpleQueue[bool], running: float | None, draining: float) -> bool:
        """Waits until another thread puts True into ``ended``. Returns whether it has. Not on the
        event loop.

        Args:
            running: seconds to wait if no stop is requested; None: without a limit.
            draining: seconds to wait from now, or from a stop that is requested meanwhile; 0 after
                a fast stop.
        """
        started = time.monotonic()
        with self.calling(lambda: ended.put(False)):
            while True:
                limit = running
                if self.cause:
                    if self.is_fast:
                        limit = 0.0
                    else:
                        limit = max(started, self._began_at) + draining - time.monotonic()
                elif running is not None:
                    limit = started + running - time.monotonic()
                try:
                    if get_within(ended, None if limit is None else max(0.0, limit)):
                        return True
                except queue.Empty:
                    return False


def get_within(items: queue.SimpleQueue[T], seconds: float | None) -> T:
    """Does ``SimpleQueue.get`` for a single reader, without a bug of CPython 3.11.

    Raises:
        queue.Empty: nothing came in time.
    """
    # CPython's ``get`` may find the lock free and the queue empty, and then waits forever if its
    # time left became negative meanwhile. ``get_nowait`` leaves the lock of an empty queue taken.
    try:
        return items.get_nowait()
    except queue.Empty:
        return items.get(timeout=seconds)


async def end_tasks(*tasks: asyncio.Future[T]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_until_cancelled() -> NoReturn:
    never = asyncio.Event()
    while True:
        await never.wait()


# exits of foreign code ----------------------------------------------------------------------------

_EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)


def exit_error(caller: str, error: BaseException) -> UnexpectedExit:
    if isinstance(error, SystemExit):
        did = f"called sys.exit({'' if error.code is None else safe_repr(error.code)})"
    else:
        did = f"raised {type(error).__name__}"
    return UnexpectedExit(
        f"{caller} {did}, which would lose documents. Raise an Exception instead."
    )


@contextmanager
def no_exit(caller: str, shutdown: "Shutdown") -> Iterator[None]:
    """Turns an exit of foreign code into an error, and ends a fork that leaves the block.

    Raises:
        UnexpectedExit: the code tried to end the process, and no signal requested it.
    """
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        end_fork(pid, error)
        if not isinstance(error, _EXITS) or shutdown.raised(error):
            raise
        raise exit_error(caller, error) from error
    end_fork(pid)
