"""Runs one rank's documents: from the reader through the rollout function to the checkpoint.

Everything here runs on one event loop, which never waits on a disk or a reader. Three limits hold
back new documents: ``max_concurrent_documents``, the bounded queue of the storage thread, and the
number of complete chunks that wait to be published.

``stop_when_requested`` stops a rank early, in order.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from loguru import logger

from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.errors import (
    CheckpointError,
    CheckpointMismatch,
    CkptError,
    ServerRefused,
    named,
)
from datatrove_ckpt.generation.document_runs import DocumentRuns
from datatrove_ckpt.generation.prefetch import DocumentSource
from datatrove_ckpt.generation.replay import Replays
from datatrove_ckpt.generation.requests import RankContext, RankModel
from datatrove_ckpt.inference.client.routing import Sender
from datatrove_ckpt.inference.servers.host import ServerHost
from datatrove_ckpt.process.event_loop import in_own_thread
from datatrove_ckpt.process.host_loop import host_loop
from datatrove_ckpt.process.shutdown import wait_until_cancelled

# Interval at which the loop polls the work of other threads. A callback for each change would cost
# more: the disk writes hundreds of groups in a second.
LOOK_SECONDS = 0.01
_IDLE_SECONDS = 1.0  # without a request, until a document begins beyond the limits of the run
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
            f"{number} rollouts ignored their cancellation for {sum(waits):g} s and are left "
            "behind. In rollouts, write `except Exception`, not `except BaseException`."
        )


async def stop_when_requested(
    requests: RankContext,
    serving: list[asyncio.Task[None]],
    watch: asyncio.Task[None],
    replays: Replays,
) -> None:
    """Waits until the rank is to stop, and stops it.

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
        _log_drain(requests, models)
    else:
        for task in serving:  # a model may need minutes to load
            task.cancel()
    counts = observer.own
    lost_before = counts.lost
    # 1. Requests in flight are answered, and complete chunks published, until the deadline.
    try:
        shutdown.late = not await shutdown.wait_for(_drain(requests, models, replays))
        if shutdown.parent is not None:
            shutdown.parent.late |= shutdown.late
    finally:
        in_flight = sum(client.must_be_answered for client in clients)
        shutdown.given_up = in_flight + counts.lost - lost_before
    failure = shutdown.failure
    if isinstance(failure, ServerRefused) and failure.status is not None:
        for client in clients:
            failure.advice += await client.unlisted_models()
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


def _awaited(requests: RankContext, model: RankModel) -> int:
    """Returns the number of a model's requests in flight for which a stop waits.

    Half-written answers go on at the next start. A call or an agent has the time of requests.
    """
    client = model.client.result()
    if requests.calls.running or requests.agents or requests.shutdown.is_finishing:
        return client.in_flight
    return client.must_be_answered


def _log_drain(requests: RankContext, models: list[RankModel]) -> None:
    shutdown = requests.shutdown
    calls = requests.calls.running
    in_flight = sum(_awaited(requests, model) for model in models)
    half = sum(model.client.result().in_flight for model in models) - in_flight
    running = f"{in_flight} requests"
    if calls:
        running += f" and {plural(calls, 'call')}"
    if shutdown.is_finishing:
        logger.info(f"{shutdown.failure} Still answered: {running}.")
        return
    cause = shutdown.cause or f"The task has failed ({type(shutdown.failure).__name__})"
    if half:
        logger.info(f"{cause}: {plural(half, 'half-written answer')} will go on after a restart.")
    if in_flight or calls or (shutdown.failure is None and not half):
        logger.warning(
            f"{cause}: {running} in flight have {shutdown.drain_seconds:g} s; a further signal, "
            "or cancellation, ends the wait."
        )


async def _drain(requests: RankContext, models: list[RankModel], replays: Replays) -> None:
    requests.checkpoint.flush_placement()
    # This must hold in two polls: a new answer may not have reached its rollout yet.
    quiet = 0.0
    while quiet < _GRACE_SECONDS:
        await next_look()
        in_flight = any(_awaited(requests, model) and not model.is_dead for model in models)
        if in_flight or requests.calls.running:
            quiet = 0.0
        elif quiet and requests.waiting == len(requests.documents):
            break
        else:
            quiet += LOOK_SECONDS
    await replays.record()
    with suppress(TimeoutError):  # an upload may take minutes; its chunk's journal is safe
        async with asyncio.timeout(_PUBLISH_WAIT_SECONDS):
            while requests.checkpoint.publishing:
                await next_look()


@dataclass(eq=False)
class Scheduler:
    requests: RankContext
    rank: int
    servers: ServerHost
    runs: DocumentRuns
    replays: Replays

    def __post_init__(self) -> None:
        requests = self.requests
        self.checkpoint = requests.checkpoint
        self.shutdown = requests.shutdown
        self._server_needed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self, documents: DocumentSource) -> None:
        """Returns when every document is committed, or parked.

        Raises:
            BaseExceptionGroup: the first failure, and perhaps others that followed from it. The
                failure is ``Preempted`` if a stop was requested.
        """
        if self.checkpoint.resumed.interrupted:
            # The server loads its model while a reader that cannot seek counts documents.
            self._server_needed.set()
        async with asyncio.TaskGroup() as background:
            serving = [
                background.create_task(self._serve(model))
                for model in self.requests.models.values()
            ]
            watch = background.create_task(self._watch())
            record = background.create_task(self.replays.record_regularly())
            stop = background.create_task(
                stop_when_requested(self.requests, serving, watch, self.replays)
            )
            await self._run_documents(documents)
            await self._save(documents)
            if self.shutdown.has_failed:  # or the stop has begun to close the checkpoint
                await wait_until_cancelled()
            self.requests.has_ended = True
            for task in (*serving, watch, record, stop):
                task.cancel()

    async def _run_documents(self, documents: DocumentSource) -> None:
        # If a wait raises, ``abort`` must come before any document is cancelled.
        try:
            try:
                # Beside the start of the servers.
                await self.replays.refuse_changes(self.checkpoint)
                await self._admit_all(documents)
            except CheckpointMismatch as error:
                self.shutdown.fail(error)
                await wait_until_cancelled()
            if documents.error is not None:
                self.shutdown.fail(documents.error)
                await wait_until_cancelled()
            host = host_loop()
            if host is not None:
                host.has_admitted = True
            while self.requests.documents:
                await asyncio.wait([*self.requests.documents.values()])
            await self.replays.record()
            if self.shutdown.has_failed:
                await wait_until_cancelled()
        except BaseException:
            self.shutdown.abort()
            raise
        finally:
            await end_documents(self.requests)

    async def _save(self, documents: DocumentSource) -> None:
        if self.runs.parked:
            self.checkpoint.flush_placement()
            while self.checkpoint.publishing:
                await next_look()
            # A batch must not be sent before its requests are on the disk.
            await in_own_thread(self.checkpoint.flush)
            self.checkpoint.raise_failure()
        else:
            self.checkpoint.end_of_input(documents.shard())
            seconds = 0.001  # the commits of a small task take milliseconds
            while not self.checkpoint.all_committed:
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, LOOK_SECONDS)

    async def _admit_all(self, documents: DocumentSource) -> None:
        needs_server = self._server_needed.is_set()
        async for batch in documents.batches(self.checkpoint.resumed):
            for source in batch:
                slot = self.checkpoint.admit(source.fingerprint, source.position)
                if slot is None:
                    continue
                if not needs_server and source.finished is None:
                    needs_server = True
                    self.runs.results.look_at_first(source.document)
                    self._server_needed.set()
                while self.checkpoint.congested or self.checkpoint.publishing_behind:
                    await next_look()
                if slot.ordinal == slot.chunk.first_ordinal:
                    await self._wait_for_goal()
                if self.requests.limits.is_paid:
                    await self._wait_for_budget(slot.ordinal)
                if not self.runs.limit.admits(source.size):
                    await self.runs.limit.acquire(source.size)
                # The awaits above may not have yielded.
                if self.shutdown.is_stopping or self.shutdown.aborted:
                    await wait_until_cancelled()
                self.requests.documents[slot.ordinal] = self._loop.create_task(
                    self.runs.run(source, slot)
                )

    async def _wait_for_goal(self) -> None:
        # If nothing runs or is published, no wait helps: after a kill, finished documents may be in
        # chunks that lack others.
        requests = self.requests
        while requests.limits.may_suffice() and (requests.documents or self.checkpoint.publishing):
            self.checkpoint.flush_placement()
            await next_look()
            requests.limits.look()
            if self.shutdown.is_stopping:
                return

    async def _wait_for_budget(self, ordinal: int) -> None:
        requests = self.requests
        idle = 0.0
        while not requests.limits.affords(ordinal):
            if self.shutdown.is_stopping or self.shutdown.aborted:
                return
            if idle >= _IDLE_SECONDS:  # a rollout may wait for more documents
                requests.limits.begin(ordinal)
                return
            await next_look()
            is_busy = requests.waiting or not requests.documents
            idle = 0.0 if is_busy else idle + LOOK_SECONDS

    # background ----------------------------------------------------------------------------------

    async def _serve(self, model: RankModel) -> None:
        # A finished rank, or one without documents, loads no model.
        await self._server_needed.wait()
        observer = self.requests.observer
        host = host_loop()
        order = 0 if host is None else host.order
        limit = self.runs.limit
        sender = Sender(self.shutdown, order, observer.server, observer.own, limit.changed)
        served = self.servers.lend(
            model.config,
            self.rank,
            sender,
            is_new=not self.checkpoint.run_has_answers(),
        )
        try:
            async with served as (client, ready):
                observer.outages.append(client.outage)
                watch = await ready
                observer.serving(client)
                limit.follow(model.config, client.servers.router, sender)
                model.client.set_result(client)
                await watch()  # raises when the servers die
        except CkptError as error:
            named(error, model.config.name)
            if isinstance(error, CheckpointError):
                raise
            model.is_dead = True
            self.shutdown.fail(error)
            await wait_until_cancelled()

    async def _watch(self) -> None:
        """Polls for failures. Raises a failure of the rank once its drain is over."""
        while True:
            self.checkpoint.raise_failure()
            if self.shutdown.aborted and self.shutdown.failure is not None:
                raise self.shutdown.failure
            if not self.checkpoint.congested:
                self.requests.storage_free.set()
            await next_look()
