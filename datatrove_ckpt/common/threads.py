"""Threads for calls that cannot be stopped."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Calls in a daemon thread, which keeps no process alive."""
    result: Future[T] = Future()

    def run() -> None:
        result.set_running_or_notify_cancel()  # who waits may be cancelled, the call cannot
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
