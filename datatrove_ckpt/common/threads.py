"""Starts threads that keep no process alive, and calls functions in several threads."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Calls a function in a daemon thread, with the caller's context."""
    result: Future[T] = Future()

    def run() -> None:
        result.set_running_or_notify_cancel()  # who waits may be cancelled, the call cannot
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    context_thread(run, name)
    return result


def context_thread(work: Callable[..., object], name: str, *arguments: object) -> threading.Thread:
    """Starts and returns a daemon thread whose lines are in the log of the caller's rank."""
    run = copy_context().run
    thread = threading.Thread(target=run, args=(work, *arguments), name=name, daemon=True)
    thread.start()
    return thread


def in_threads(call: Callable[..., T], *items: Iterable[object]) -> list[T]:
    """Calls storage in threads, because each request may take tens of milliseconds."""
    with ThreadPoolExecutor(32) as threads:
        return list(threads.map(call, *items))
