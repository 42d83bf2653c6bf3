"""The event loop of a run: uvloop's if it is installed (vLLM depends on it), else Python's own.

A process that user code forked with ``os.fork`` shares the rank's sockets and open checkpoint
files, and would use them in our code. So it ends there at once, and closes nothing (``end_fork``).
"""

import asyncio
import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, TypeVarTuple

from datatrove_ckpt.common.threads import in_thread
from datatrove_ckpt.process.fork_boundaries import wait_to_fork
from datatrove_ckpt.process.screen import exit_now

# Seconds between two cancellations of the tasks that are left at the end.
_PATIENCE = (0.5, 0.5, 1.0, 0.0)
left_behind: list[object] = []
"""Loops of ranks of this process, with tasks or threads that ignored their end."""
_open: list[object] = []
"""Loops that keep nobody waiting, but cannot be closed."""
_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


@contextmanager
def _outer_loop_waits() -> Iterator[None]:
    """Lets this thread run another loop while the loop that it runs, as in a notebook, stands
    still.

    A thread would get no signals. asyncio's page "Extending" offers the four functions to foreign
    loops and tasks.
    """
    outer = asyncio._get_running_loop()
    if outer is None:
        yield
        return
    task = asyncio.current_task()
    if task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if task is not None:
            asyncio.tasks._enter_task(outer, task)


_HIDDEN = {
    "create_connection": "socket.connect",
    "create_unix_connection": "socket.connect",
    "create_datagram_endpoint": "socket.connect",
    "subprocess_exec": "subprocess.Popen",
    "subprocess_shell": "subprocess.Popen",
}
"""Audit events of Python's own loop that libuv hides, by the methods of a loop."""


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    for name, event in _HIDDEN.items():
        setattr(loop, name, partial(_audited_call, event, getattr(loop, name)))
    return loop


def is_audited(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop raises audit events: Python's own, or one of ``run``."""
    return isinstance(loop, asyncio.BaseEventLoop) or _HIDDEN.keys() <= vars(loop).keys()


async def _audited_call(
    event: str,
    call: Callable[..., Awaitable[object]],
    factory: object,
    *arguments: object,
    **settings: object,
) -> object:
    if settings.get("sock") is None:
        sys.audit(event, next(iter(arguments), None), arguments)
    return await call(factory, *arguments, **settings)


@_outer_loop_waits()
def run(main: Awaitable[_Result]) -> _Result:
    interruptions = []

    async def catch_interruption() -> _Result:
        # A KeyboardInterrupt that ends a task also leaves the loop, and asyncio would log it as
        # never retrieved.
        try:
            return await main
        except KeyboardInterrupt as interruption:
            interruptions.append(interruption)
            raise asyncio.CancelledError from None

    runner = asyncio.Runner(loop_factory=_new_loop)
    threads = []

    def begin_thread() -> None:
        threads.append(threading.current_thread())
        wait_to_fork()

    # As asyncio's own, but with the threads of ``asyncio.to_thread`` to join.
    executor = ThreadPoolExecutor(thread_name_prefix="asyncio", initializer=begin_thread)
    runner.get_loop().set_default_executor(executor)
    pid = os.getpid()
    try:
        result = runner.run(catch_interruption())
        end_fork(pid)
    except BaseException as error:
        end_fork(pid, error)
        executor.shutdown(wait=False, cancel_futures=True)
        _close(runner, threads)
        if isinstance(error, asyncio.CancelledError) and interruptions:
            raise interruptions[0] from None
        raise
    _close(runner, [])
    return result


_pid = os.getpid()


def _note_fork() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_note_fork)  # a system call for each rollout would cost more


def end_fork(pid: int, error: BaseException | None = None) -> None:
    """Ends this process if it is a fork of process ``pid``, which called user code.

    The exit code is the argument of ``sys.exit``, 0 without an error, and 1 for another error,
    whose traceback is printed.
    """
    if _pid == pid:
        return
    code = 1
    try:
        if error is None:
            code = 0
        elif not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif isinstance(error.code, int | None):
            code = (error.code or 0) & 0xFF
        else:
            print(error.code, file=sys.stderr)
    finally:
        exit_now(code)


def _close(runner: asyncio.Runner, threads: Iterable[threading.Thread]) -> None:
    """Does ``Runner.close``, but waits for a limited time for tasks that ignore their cancellation.

    Args:
        threads: threads that also get a few seconds to end.
    """
    loop = runner.get_loop()
    for seconds in _PATIENCE:
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=seconds))
    deadline = time.monotonic() + sum(_PATIENCE)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if not asyncio.all_tasks(loop) and not any(thread.is_alive() for thread in threads):
        try:
            runner.close()
        except OSError as error:
            # uvloop, where a rollout has left a connection open.
            if error.errno != errno.EBUSY:
                raise
            _open.append(runner)
        return
    # Nothing may be collected: a coroutine that ignores its cancellation would log that.
    left_behind.append((runner, asyncio.all_tasks(loop)))
    asyncio.set_event_loop(None)


def exit_past_threads(code: int) -> None:
    if left_behind:
        exit_now(code)


async def in_own_thread(call: Callable[[*_Arguments], _Result], *arguments: *_Arguments) -> _Result:
    """Does ``asyncio.to_thread`` in a dedicated thread: rollouts may block all threads of the loop
    while they wait for the result of this call.
    """
    return await asyncio.wrap_future(in_thread(partial(call, *arguments), "datatrove-ckpt"))


def call_soon(
    loop: asyncio.AbstractEventLoop,
    callback: Callable[[*_Arguments], object],
    *arguments: *_Arguments,
) -> None:
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
