"""Runs several ranks of a process at once, over one event loop and one set of servers.

At its end a rank waits minutes for its last long answers, with nearly idle servers. So:

    a rank starts    when each running rank has handed out all its documents, and the servers have
                     free places
    requests         of the rank that started first are sent first
    a failure        drains its rank, then all other ranks. No further rank starts
    a signal         drains all ranks. The old handlers are called once all ranks have ended

The loop runs in the main thread, and each rank's blocking work in a thread (``host_loop.py``).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

from loguru import logger

from datatrove_ckpt.process import event_loop
from datatrove_ckpt.process.host_loop import HostLoop, run_hosted
from datatrove_ckpt.process.preemption import Preemption
from datatrove_ckpt.process.workers import Tasks

_POLL_SECONDS = 0.1
_POLLS = 2  # how many polls in a row must find free places before a rank starts


class Servers(Protocol):
    @property
    def has_room(self) -> bool: ...

    async def close(self, ends_well: bool) -> None: ...


@dataclass(eq=False)
class RankThreads:
    """Runs ranks in threads. ``make_servers`` and ``tasks`` are called on the event loop."""

    _at_once: int
    _preemption: Preemption
    _make_servers: Callable[[], Servers]
    _run: Callable[[int], object]
    _tasks: Tasks
    _hosts: list[HostLoop] = field(default_factory=list)
    _failure: BaseException | None = None

    def work_through(self) -> None:
        """Returns when all ranks have ended.

        Raises:
            BaseException: the error of the rank that failed first. All others have drained.
        """
        shutdown = self._preemption.shutdown
        with shutdown.calling(self._stop), self._preemption.watched(self._save):
            event_loop.run(self._work_through())
        if self._failure is not None:
            raise self._failure
        shutdown.check()

    async def _work_through(self) -> None:
        servers = self._make_servers()
        time_limit = asyncio.create_task(self._preemption.watch_time_limit())
        running = set[asyncio.Task[None]]()
        try:
            for order in count():
                rank = await self._next(running, servers)
                if rank is None:
                    break
                host = HostLoop(
                    asyncio.get_running_loop(), servers, order, rank, self._preemption.shutdown
                )
                self._hosts.append(host)
                self._stop()  # if a signal came since the poll above
                running.add(asyncio.create_task(self._work(rank, host)))
            # After a signal, nothing waits for ranks that only wait for a mirror or a listing.
            while running and (
                not self._preemption.shutdown.is_requested
                or any(host.is_open for host in self._hosts)
            ):
                await self._poll(running)
        finally:
            time_limit.cancel()
            await asyncio.gather(time_limit, return_exceptions=True)
            with self._preemption.shutdown.closing():
                await servers.close(not (running or self._ends))

    @property
    def _ends(self) -> bool:
        is_failing = self._failure is not None or any(
            host.shutdown.is_stopping for host in self._hosts
        )
        return is_failing or self._preemption.shutdown.is_requested

    async def _next(self, running: set[asyncio.Task[None]], servers: Servers) -> int | None:
        polls = 0
        while running and polls < _POLLS and not self._ends:
            await self._poll(running)
            is_free = len(running) < self._at_once and servers.has_room
            is_free = is_free and all(host.has_admitted for host in self._hosts)
            polls = polls + 1 if is_free else 0
        if self._ends:
            return None
        taking = asyncio.create_task(self._tasks.wait_for_next())
        try:
            while not taking.done() and not self._ends:
                await self._poll(running, taking)
            if self._ends:
                return None
            return taking.result()
        finally:
            taking.cancel()

    async def _poll(
        self, running: set[asyncio.Task[None]], *other_tasks: asyncio.Task[int | None]
    ) -> None:
        ended, _ = await asyncio.wait(
            {*running, *other_tasks}, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        running -= ended

    async def _work(self, rank: int, host: HostLoop) -> None:
        try:
            result = await run_hosted(partial(self._run, rank), f"task {rank}", host)
            self._tasks.done(rank, result)
        except BaseException as error:
            is_requested = self._preemption.shutdown.is_requested
            # After a signal, the loop's end cancels the tasks that it does not wait for.
            is_left = is_requested and isinstance(error, asyncio.CancelledError)
            if self._failure is None and not is_left:
                self._failure = error
                if not is_requested:
                    self._tasks.failed(rank, error)
                self._stop()
        finally:
            self._hosts.remove(host)

    def _stop(self) -> None:
        """Stops all ranks after a stop or failure. May run in a signal handler."""
        shutdown = self._preemption.shutdown
        cause = shutdown.cause
        if self._failure is not None:
            cause = cause or "the failure of another task"
        if cause:
            for host in list(self._hosts):
                host.stop(cause, shutdown.is_fast)

    def _save(self) -> None:
        for host in list(self._hosts):
            save = host.save  # the rank's thread may set it to None
            if save is not None:
                try:
                    save()
                except Exception as error:
                    logger.error(f"A part of the work could not be saved: {error}")
