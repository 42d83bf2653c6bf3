"""Stops a rank early, in order. ``Shutdown`` decides whether and how quickly."""

import asyncio
from contextlib import suppress

from loguru import logger

from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.generation.rank_requests import RankContext, RankModel
from datatrove_ckpt.process.event_loop import in_own_thread

# Interval at which the loop polls the work of other threads. A callback for each change would cost
# more: the disk writes hundreds of groups in a second.
LOOK_SECONDS = 0.01
_PUBLISH_WAIT_SECONDS = 5.0  # for complete chunks, in a drain
_GRACE_SECONDS = 2.0  # for rollouts that compute or sleep, in a drain
# Seconds after each cancellation of a rollout. Its clean-up may take their sum.
_CANCEL_WAITS = (0.2, 0.8, 2.0, 2.0)
_CANCEL_WAITS_FAST = (0.2, 0.8)


async def next_look() -> None:
    await asyncio.sleep(LOOK_SECONDS)


async def end_documents(requests: RankContext) -> None:
    """Cancels the remaining documents, and repeats it for documents that swallow the cancellation,
    for five seconds, or one second in a fast stop.

    ``asyncio.TaskGroup`` would wait for such a task forever; a rank leaves it behind.
    """
    if requests.is_ending:
        return
    requests.is_ending = True
    waits = _CANCEL_WAITS_FAST if requests.shutdown.is_fast else _CANCEL_WAITS
    running = [*requests.documents.values()]
    for seconds in waits:
        running = [task for task in running if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=seconds)
    number = sum(not task.done() for task in running)
    if number:
        logger.error(
            f"{number} rollouts ignored their cancellation for {sum(waits):g} s and are "
            "left behind. A rollout must let asyncio.CancelledError out: write `except "
            "Exception`, not `except BaseException`."
        )


async def stop_when_requested(
    requests: RankContext, serving: list[asyncio.Task[None]], watch: asyncio.Task[None]
) -> None:
    """Waits until the rank is to stop, and stops it.

    Args:
        serving: a task for each model, which starts and watches its servers, and stops them when it
            is cancelled.
        watch: task that raises failures of the checkpoint.

    Raises:
        Preempted: a stop was requested.
        BaseException: the rank's failure. Then the caller closes the checkpoint.
    """
    shutdown = requests.shutdown
    observer = requests.observer
    await shutdown.requested()
    # No document is admitted, and the router sends no request: both read the shutdown.
    models = [model for model in requests.models.values() if model.client.done()]
    clients = [model.client.result() for model in models]
    if clients:
        _log_drain(requests, sum(client.in_flight for client in clients))
    else:
        for task in serving:  # a model may need minutes to load
            task.cancel()
    counts = observer.own
    lost_before = counts.lost
    # 1. Requests in flight are answered, and complete chunks published, until the deadline.
    try:
        shutdown.late = not await shutdown.wait_for(_drain(requests, models))
        if shutdown.parent is not None:
            shutdown.parent.late |= shutdown.late
    finally:
        in_flight = sum(client.in_flight for client in clients)
        shutdown.given_up = in_flight + counts.lost - lost_before
    # 2. Other documents end unrecorded. ``abort`` comes before the cancellations, because a
    # cancelled rollout is no failure.
    shutdown.abort()
    if shutdown.failure is not None:
        raise shutdown.failure
    for task in serving:
        task.cancel()
    await end_documents(requests)
    # 3. The checkpoint writes everything that was handed over, uploads the last version to the
    # mirror, and releases the rank.
    with shutdown.closing():
        await asyncio.wait(serving)
        watch.cancel()  # further failures are in ``checkpoint.error``
        await in_own_thread(requests.checkpoint.close, False, observer.last_records)
    shutdown.raise_preempted()


def _log_drain(requests: RankContext, in_flight: int) -> None:
    shutdown = requests.shutdown
    calls = requests.calls.running
    running = f"{in_flight} requests"
    if calls:
        running += f" and {plural(calls, 'call')}"
    if shutdown.is_finishing:
        logger.info(f"{shutdown.failure} Still answered: {running}.")
    elif shutdown.failure is None or in_flight or calls:
        cause = shutdown.cause or f"The task has failed ({type(shutdown.failure).__name__})"
        logger.warning(
            f"{cause}: {running} in flight have {shutdown.drain_seconds:g} s to be "
            "answered; a further signal, or cancellation, ends the wait at once."
        )


async def _drain(requests: RankContext, models: list[RankModel]) -> None:
    """Waits until no request or call is in flight, and every document waits to begin one."""
    requests.checkpoint.flush_placement()
    # This must hold in two polls: a new answer may not have reached its rollout yet.
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
