"""An early stop of a rank, in order. ``Shutdown`` says whether and how quickly."""

import asyncio
from contextlib import suppress

from loguru import logger

from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.generation.rank_requests import Model, RankRequests
from datatrove_ckpt.process.event_loop import in_own_thread

# How often the loop looks at what other threads do for the rank. Being told of each change would
# cost more: the disk writes hundreds of groups in a second.
LOOK_SECONDS = 0.01
_PUBLISH_WAIT_SECONDS = 5.0  # of a drain, for complete chunks
_GRACE_SECONDS = 2.0  # for rollouts that compute or sleep
# Seconds between two cancellations. A rollout has their sum for its clean-up.
_PATIENCE = (0.2, 0.8, 2.0, 2.0)
_PATIENCE_FAST = (0.2, 0.8)


async def next_look() -> None:
    await asyncio.sleep(LOOK_SECONDS)


async def end_documents(requests: RankRequests) -> None:
    """Cancels the remaining documents, repeatedly if needed, for five seconds, and in a fast
    stop for one.

    ``asyncio.TaskGroup`` waits forever for a task that swallows its cancellation; a rank leaves
    it behind.
    """
    if requests.is_ending:
        return
    requests.is_ending = True
    patience = _PATIENCE_FAST if requests.shutdown.is_fast else _PATIENCE
    left = [*requests.documents.values()]
    for seconds in patience:
        left = [task for task in left if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=seconds)
    number = sum(not task.done() for task in left)
    if number:
        logger.error(
            f"{number} rollouts ignored their cancellation for {sum(patience):g} s and are "
            "left behind. A rollout must let asyncio.CancelledError out: write `except "
            "Exception`, not `except BaseException`."
        )


async def stop_when_requested(
    requests: RankRequests, serving: list[asyncio.Task[None]], watch: asyncio.Task[None]
) -> None:
    """Waits until the rank is to stop, and stops it.

    Args:
        serving: start, watch and, when they are cancelled, stop the servers; one for each model.
        watch: raises failures of the checkpoint.

    Raises:
        Preempted: a stop was requested.
        BaseException: the rank's failure. Then the caller closes the checkpoint.
    """
    shutdown = requests.shutdown
    observer = requests.observer
    await shutdown.requested()
    # No document is admitted, and the router sends no request: both look at the shutdown.
    models = [model for model in requests.models.values() if model.client.done()]
    clients = [model.client.result() for model in models]
    in_flight = sum(client.in_flight for client in clients)
    running = f"{in_flight} requests"
    if requests.calls.running:
        running += f" and {plural(requests.calls.running, 'call')}"
    if not clients:
        for task in serving:  # a model may need minutes to load
            task.cancel()
    elif shutdown.is_finishing:
        logger.info(f"{shutdown.failure} Still answered: {running}.")
    elif shutdown.failure is None or in_flight or requests.calls.running:
        why = shutdown.cause or f"The task has failed ({type(shutdown.failure).__name__})"
        logger.warning(
            f"{why}: {running} in flight have {shutdown.drain_seconds:g} s to be "
            "answered; a further signal, or cancellation, ends the wait at once."
        )
    own = observer.own
    lost = own.lost
    # 1. Requests in flight are answered, and complete chunks published, until the deadline.
    try:
        shutdown.late = not await shutdown.wait_for(_drained(requests, models))
        if shutdown.parent is not None:
            shutdown.parent.late |= shutdown.late
    finally:
        in_flight = sum(client.in_flight for client in clients)
        shutdown.given_up = in_flight + own.lost - lost
    # 2. Other documents end unrecorded. The state comes first: a cancelled rollout is no failure.
    shutdown.abort()
    if shutdown.failure is not None:
        raise shutdown.failure
    for task in serving:
        task.cancel()
    await end_documents(requests)
    # 3. Everything handed over is written, the mirror gets its last version, and the rank is
    # released.
    with shutdown.closing():
        await asyncio.wait(serving)
        watch.cancel()  # what fails now is in ``checkpoint.error``
        await in_own_thread(requests.checkpoint.close, False, observer.last_records)
    shutdown.raise_preempted()


async def _drained(requests: RankRequests, models: list[Model]) -> None:
    requests.checkpoint.hurry()
    # Over when no request or call is in flight, none begins any more, and every document waits for
    # one. Twice: an answer that has just come still has to be passed to its rollout.
    quiet = 0.0
    while quiet < _GRACE_SECONDS:
        await next_look()
        in_flight = any(model.client.result().in_flight and not model.is_dead for model in models)
        if in_flight or requests.calls.running:
            quiet = 0.0
        elif quiet and requests.waiting == len(requests.documents):
            break
        else:
            quiet += LOOK_SECONDS
    with suppress(TimeoutError):  # an upload may take minutes; its chunk's journal is safe
        async with asyncio.timeout(_PUBLISH_WAIT_SECONDS):
            while requests.checkpoint.publishing:
                await next_look()
