"""Calls into libraries that cannot be told to give up: made in threads that a rank which stops leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from datatrove_ckpt.checkpoint.placement import Stopping
from datatrove_ckpt.retrying import file_system_call

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Calls in a daemon thread, which keeps no process alive. Returns its result, to be waited for."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


class StoppableCalls:
    """Calls and pauses that end when ``stop`` is called, from any thread."""

    def __init__(self) -> None:
        self._stopped: Future[Any] = Future()  # Any, so that it can be waited for together with a result of any type

    @property
    def stopped(self) -> bool:
        return self._stopped.done()

    def stop(self) -> None:
        """Ends all waiting, from now on. A request under way ends by itself, or with the process."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    def sleep(self, seconds: float) -> None:
        """Returns after that time, or earlier when ``stop`` is called."""
        wait([self._stopped], timeout=seconds)

    def run(self, call: Callable[[], T], at_most_seconds: float | None = None) -> T:
        """Calls in a thread of its own.

        Raises:
            Stopping: ``stop`` was called before the call returned.
            TimeoutError: the call took longer than ``at_most_seconds``. What it does may still happen.
            OSError: whatever the library raised.
        """

        def run() -> T:
            with file_system_call():
                return call()

        if self.stopped:
            raise Stopping
        result = in_thread(run, "datatrove-ckpt upload")
        wait([result, self._stopped], timeout=at_most_seconds, return_when=FIRST_COMPLETED)
        if not result.done():
            if self.stopped:
                raise Stopping
            raise TimeoutError(f"no answer within {at_most_seconds:.0f} s")
        return result.result()
