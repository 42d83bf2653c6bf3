"""Runs a rank inside a running event loop: ``await runner.run_async(data)``, or several ranks at
once.

``InferenceRunner.run`` runs in a thread, for blocking work. Rollouts, requests and servers run on
the caller's loop, whose objects a rollout may use.

Cancellations of ``run_async`` act like signals to ``run``: the first cancellation starts the drain,
a second ends it. Everything is saved before the cancellation is raised. A loop that ends cancels
the rank's tasks, and nothing is drained.
"""

import asyncio
import concurrent.futures
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from datatrove_ckpt.common.threads import in_thread
from datatrove_ckpt.process.event_loop import call_soon
from datatrove_ckpt.process.shutdown import Shutdown

_CAUSE = "the cancellation of run_async"
_Result = TypeVar("_Result")


@dataclass(eq=False)
class HostLoop:
    """The caller's event loop, for one rank.

    Args:
        order: requests of the rank with the lowest order go first.
        rank: the rank, if several ranks share the loop. ``RankThreads`` watches time limit and
            notices for them.

    Attributes:
        has_admitted: the rank has handed out all its documents.
        save: returns when all that the rank has handed over is on the disk.
        is_open: the rank processes documents, or closes its files. Before that it has nothing to
            save.
    """

    _loop: asyncio.AbstractEventLoop
    servers: object = None
    order: int = 0
    rank: int | None = None
    parent: Shutdown | None = None
    has_admitted: bool = False
    save: Callable[[], None] | None = None
    is_open: bool = False
    _closings: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.shutdown = Shutdown(parent=self.parent)

    def run(self, main: Coroutine[object, None, _Result]) -> _Result:
        """Runs ``main`` on the caller's loop, and waits for it in this thread.

        Raises:
            Preempted: the loop has cancelled it.
        """
        try:
            return asyncio.run_coroutine_threadsafe(main, self._loop).result()
        except concurrent.futures.CancelledError:
            self.stop(_CAUSE, True)
            self.shutdown.raise_preempted()

    @contextmanager
    def saving(self, save: Callable[[], None]) -> Iterator[None]:
        """Marks a block in which the rank has something to save."""
        self.save = save
        self.is_open = True
        try:
            yield
        finally:
            self.save = None
            if self.parent is not None:
                call_soon(self._loop, self._closings.enter_context, self.parent.closing())

    def detach(self) -> None:
        self.is_open = False
        call_soon(self._loop, self._closings.close)

    def stop(self, cause: str, is_fast: bool) -> None:
        """Lets the rank drain. Any thread or signal handler may call this."""
        self.shutdown.request(cause)
        if is_fast:
            self.shutdown.fast_stop()


_host = contextvars.ContextVar[HostLoop | None]("host", default=None)


def host_loop() -> HostLoop | None:
    """Returns the event loop that this rank runs on, if it is not the rank's own."""
    return _host.get()


def rank_of_many() -> int | None:
    host = host_loop()
    if host is None:
        return None
    return host.rank


async def run_hosted(
    run: Callable[[], _Result], name: str, host: HostLoop | None = None
) -> _Result:
    """Calls ``run`` in a thread, with the running loop as its event loop.

    Args:
        host: the running loop; None: it has this rank alone.

    Raises:
        asyncio.CancelledError: the caller was cancelled, and ``run`` has ended since.
        BaseException: the error of ``run``.
    """
    host = host or HostLoop(asyncio.get_running_loop())
    context = contextvars.copy_context()
    context.run(_host.set, host)
    # A daemon: if the loop ends without a cancellation, nothing ends the thread, as after kill -9.
    work = asyncio.wrap_future(in_thread(partial(context.run, run), name))
    cancellation: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancellation = cancellation or error
            host.stop(_CAUSE, host.shutdown.is_draining)  # the second one ends the drain
    if cancellation is not None:
        work.exception()  # else asyncio logs that nothing has read it
        raise cancellation
    return work.result()
