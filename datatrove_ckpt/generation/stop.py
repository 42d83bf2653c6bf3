"""How a rank stops early, in order. What was requested, and how quickly it must be done, is in its ``Shutdown``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import NoReturn, Protocol

from loguru import logger

from datatrove_ckpt.generation.document_tasks import DocumentTasks
from datatrove_ckpt.generation.generate import RankContext
from datatrove_ckpt.inference.client.client import CompletionClient

# How long a drain waits for complete chunks to be published.
_PUBLISH_WAIT_SECONDS = 5.0


class StoppableRank(RankContext, Protocol):
    """See ``Scheduler``."""

    documents: DocumentTasks

    def next_change(self) -> Awaitable[None]: ...


async def stop_when_requested(rank: StoppableRank, serving: asyncio.Task[None]) -> NoReturn:
    """Waits until a stop is requested, and stops the rank.

    Args:
        serving: starts, watches and, when it is cancelled, stops the servers.

    Raises:
        Preempted: always.
    """
    shutdown, checkpoint = rank.shutdown, rank.checkpoint
    await shutdown.requested()
    # From now on no document is admitted, and the router sends no request: both look at the shutdown.
    client = rank.client.result() if rank.client.done() else None
    if client is None:
        serving.cancel()  # a model may need minutes to load
    else:
        logger.warning(
            f"{shutdown.cause}: {client.stats.in_flight} requests in flight have {shutdown.drain_seconds:g} s to be "
            f"answered; {shutdown.hurried_by} ends the wait at once."
        )
    lost, cancelled = (client.stats.lost, client.stats.cancelled) if client is not None else (0, 0)
    # 1. Requests in flight are answered, and complete chunks published, until the deadline.
    try:
        shutdown.late = not await shutdown.wait_for(_drained(rank, client))
    except asyncio.CancelledError:  # the caller's loop ends, and cancels all its tasks, those of requests among them
        if client is not None:
            shutdown.given_up = client.stats.in_flight + client.stats.lost - lost + client.stats.cancelled - cancelled
        raise
    if client is not None:
        shutdown.given_up = client.stats.in_flight + client.stats.lost - lost
    # 2. Documents that are left end unrecorded. First the state: a cancelled rollout is no failure of its document.
    shutdown.abort()
    if client is not None:  # else it was cancelled above; a second time would cut its end off
        serving.cancel()
    await rank.documents.end(shutdown.is_fast)
    # 3. Servers end meanwhile: by themselves if the drain was in time, else they are killed.
    with shutdown.closing():
        await asyncio.wait([serving])
        # 4. What was handed over is written, the mirror gets its last version, and another process may have the rank.
        checkpoint.on_change = lambda: None  # what fails now is in ``checkpoint.error``
        await asyncio.to_thread(checkpoint.close)
    # 5. The old signal handlers get the signals: see process/preemption.py.
    shutdown.raise_preempted()


async def _drained(rank: StoppableRank, client: CompletionClient | None) -> None:
    rank.checkpoint.hurry()
    await rank.drain.until_over(client)
    with suppress(TimeoutError):  # an upload may take minutes; its chunk's journal is safe
        async with asyncio.timeout(_PUBLISH_WAIT_SECONDS):
            while rank.checkpoint.publishing:
                await rank.next_change()
