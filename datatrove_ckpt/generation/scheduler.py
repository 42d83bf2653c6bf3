"""Runs one rank: documents from the reader go through the rollout function, and the results to the
checkpoint.

Everything here runs on one event loop, which never waits on a disk or a reader. Three limits hold
back new documents: ``max_concurrent_documents``, the bounded queue of the storage thread, and the
number of complete chunks that wait to be published.

A failing document or server stops the rank with a drain (``Shutdown.fail``), even if a rollout
swallows the error, which must not turn an outage into dropped documents. If nothing can be saved,
all work ends at once (``Shutdown.abort``).
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.checkpoint.numbers import WHY_DROPPED, Outcome
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.redaction import note_sent
from datatrove_ckpt.errors import (
    CheckpointError,
    CkptError,
    ConfigError,
    DocumentNotSerializable,
    RequestFailed,
    causes,
    named,
)
from datatrove_ckpt.generation.answers import Answers, Parked
from datatrove_ckpt.generation.dead_letters import RetriedDocument
from datatrove_ckpt.generation.document_limit import DocumentLimit
from datatrove_ckpt.generation.failures import Failures, drops
from datatrove_ckpt.generation.generate import BoundGenerate
from datatrove_ckpt.generation.prefetch import DocumentSource, SourceDocument
from datatrove_ckpt.generation.rank_requests import Model, RankRequests
from datatrove_ckpt.generation.requests import Requests
from datatrove_ckpt.generation.results import DROPPED, Results
from datatrove_ckpt.generation.user_rollout import name_of
from datatrove_ckpt.inference.client.routing import Sender
from datatrove_ckpt.inference.servers.host import ServerHost
from datatrove_ckpt.process.event_loop import end_fork, in_own_thread
from datatrove_ckpt.process.exits import exit_error
from datatrove_ckpt.process.host_loop import host_loop
from datatrove_ckpt.process.shutdown import wait_until_cancelled
from datatrove_ckpt.rollouts import Rollout

# How often the loop looks at what other threads do for the rank. Being told of each change would
# cost more: the disk writes hundreds of groups in a second.
_LOOK_SECONDS = 0.01
_SHORTEST_LOOK_SECONDS = 0.001  # of a small task, whose commits take milliseconds
_MANY = 100  # documents of which one at least should be kept
# Seconds between two cancellations. A rollout has their sum for its clean-up.
_PATIENCE = (0.2, 0.8, 2.0, 2.0)
_PATIENCE_FAST = (0.2, 0.8)


@dataclass(eq=False)
class Scheduler:
    """Runs the rollout function on one rank's documents. ``rollout_fn``: the step's, bound."""

    requests: RankRequests
    rank: int
    rollout_fn: Rollout
    servers: ServerHost
    failures: Failures
    results: Results

    def __post_init__(self) -> None:
        requests = self.requests
        self.checkpoint = requests.checkpoint
        self.observer = requests.observer
        self.shutdown = requests.shutdown
        configs = [*requests.configs.values()]
        self._rollouts = range(configs[0].rollouts_per_document)
        self.parked = 0
        self._dropped = 0
        self._document_limit = DocumentLimit(configs, self.servers.media)
        self._server_needed = asyncio.Event()
        self._is_ending = False
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    async def run(self, documents: DocumentSource) -> None:
        """Returns when every document is committed, or ``parked``.

        Raises:
            BaseExceptionGroup: the first failure, and perhaps others that followed from it. The
                failure is ``Preempted`` if a stop was requested.
        """
        self.observer.reading(documents)
        if self.checkpoint.resumed.interrupted:
            # The server loads its model while a reader that cannot seek counts documents.
            self._server_needed.set()
        async with asyncio.TaskGroup() as background:
            models = self.requests.models.values()
            serving = [background.create_task(self._serve(model)) for model in models]
            watch = background.create_task(self._watch())
            stop = background.create_task(stop_when_requested(self, serving, watch))
            await self._run_documents(documents)
            await self._save(documents)
            if self.shutdown.has_failed:  # or the stop has begun to close the checkpoint
                await wait_until_cancelled()
            self.requests.has_ended = True
            for task in (*serving, watch, stop):
                task.cancel()

    async def _run_documents(self, documents: DocumentSource) -> None:
        # An error that ends a wait must abort before any document is cancelled.
        try:
            await self._admit_all(documents)
            if documents.error is not None:
                self.shutdown.fail(documents.error)
                await wait_until_cancelled()
            self.requests.all_started = True
            host = host_loop()
            if host is not None:
                host.has_admitted = True
            while self.requests.documents:
                await asyncio.wait([*self.requests.documents.values()])
            if self.shutdown.has_failed:
                await wait_until_cancelled()
        except BaseException:
            self.shutdown.abort()
            raise
        finally:
            await self.end_documents()

    async def end_documents(self) -> None:
        """Cancels the remaining documents, repeatedly if needed, for five seconds, and in a fast
        stop for one.

        ``asyncio.TaskGroup`` waits forever for a task that swallows its cancellation; a rank leaves
        it behind.
        """
        if self._is_ending:
            return
        self._is_ending = True
        patience = _PATIENCE_FAST if self.shutdown.is_fast else _PATIENCE
        left = [*self.requests.documents.values()]
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

    async def _save(self, documents: DocumentSource) -> None:
        if self.parked:
            self.checkpoint.hurry()
            while self.checkpoint.publishing:
                await self.next_look()
            # Requests that could not be written are not sent as if their files were whole.
            await in_own_thread(self.checkpoint.flush)
            self.checkpoint.raise_failure()
        else:
            self.checkpoint.end_of_input(documents.shard())
            seconds = _SHORTEST_LOOK_SECONDS
            while not self.checkpoint.all_committed:
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, _LOOK_SECONDS)

    async def _admit_all(self, documents: DocumentSource) -> None:
        async for batch in documents.batches(self.checkpoint.resumed):
            for source in batch:
                slot = self.checkpoint.admit(source.fingerprint, source.position)
                if slot is None:
                    continue
                if source.finished is None and not self._server_needed.is_set():
                    self.results.look_at_first(source.document)
                    self._server_needed.set()
                while self.checkpoint.congested or self.checkpoint.publishing_behind:
                    await self.next_look()
                if slot.ordinal == slot.chunk.first_ordinal:
                    await self._wait_for_goal()
                await self._document_limit.acquire(source.size)
                # The awaits above may not have yielded.
                if self.shutdown.is_stopping or self.shutdown.aborted:
                    await wait_until_cancelled()
                work = self._process(source, slot)
                self.requests.documents[slot.ordinal] = self._loop.create_task(work)

    async def _wait_for_goal(self) -> None:
        # With nothing in work, a kill has left finished documents in chunks that lack others.
        requests = self.requests
        while requests.limits.may_suffice() and (requests.documents or self.checkpoint.publishing):
            self.checkpoint.hurry()
            await self.next_look()
            requests.limits.look()
            if self.shutdown.is_stopping:
                return

    # background ----------------------------------------------------------------------------------

    async def _serve(self, model: Model) -> None:
        # A finished rank, or one without documents, loads no model.
        await self._server_needed.wait()
        observer = self.observer
        host = host_loop()
        order = 0 if host is None else host.order
        changed = self._document_limit.changed
        sender = Sender(self.shutdown, order, observer.server, observer.own, changed)
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
                self._document_limit.follow(model.config, client.servers.router, sender)
                model.client.set_result(client)
                await watch()  # raises when they die
        except CkptError as error:
            named(error, model.config.name)
            if isinstance(error, CheckpointError):
                raise
            model.is_dead = True
            self.shutdown.fail(error)
            await wait_until_cancelled()

    async def _watch(self) -> NoReturn:
        """Raises the failure of the rank, once its drain is over."""
        while True:
            self.checkpoint.raise_failure()
            if self.shutdown.aborted and self.shutdown.failure is not None:
                raise self.shutdown.failure
            if not self.checkpoint.congested:
                self.requests.storage_free.set()
            await self.next_look()

    async def next_look(self) -> None:
        await asyncio.sleep(_LOOK_SECONDS)

    # one document --------------------------------------------------------------------------------

    async def _process(self, source: SourceDocument, slot: ChunkSlot) -> None:
        try:
            self.checkpoint.finish(slot, await self._run_document(source, slot))
            self.observer.own.documents += 1
            if self._dropped == _MANY == self.observer.own.documents:
                logger.warning(f"The rollout dropped all of {_MANY} documents. {WHY_DROPPED}")
        except Parked:
            self.parked += 1
        except (asyncio.CancelledError, KeyboardInterrupt):
            self.shutdown.abort()
            raise
        except CheckpointError as error:
            self.shutdown.abort(error)
        except BaseException as error:
            self.shutdown.fail(error)
        finally:
            # A callback of the task would take a turn of the event loop of its own.
            self.requests.documents.pop(slot.ordinal, None)
            self._document_limit.release(source.size)

    async def _run_document(self, source: SourceDocument, slot: ChunkSlot) -> Finished:
        document = source.document
        answers = Answers(self.requests, slot, source.id, len(self._rollouts))
        if isinstance(document, RetriedDocument):
            answers.is_suspect = document.letter["kind"] == RequestFailed.__name__
        taken = self.failures.taken_letter(source, slot.ordinal)
        if taken is not None:
            return answers.finished("dead", source.fingerprint, taken)
        try:
            return await self._finished(source, slot, answers)
        except (Exception, asyncio.CancelledError) as raised:
            self._raise_if_stopping(answers)
            error: BaseException = raised
            if answers.parked:
                error = ConfigError(
                    f"{name_of(self.rollout_fn)} did not use an answer of its last pass, and sent "
                    "other requests, so each pass would be paid for. With provider_batches, a "
                    "rollout must send the same requests for a document each time: no random "
                    "numbers, no time in its prompts (a seed may come from document.id)",
                    setting="rollout_fn",
                )
            note_sent(answers.payloads)
            note_sent([getattr(cause, "payload", None) for cause in causes(error)])
            letter = self.failures.letter_or_raise(
                source, slot.ordinal, error, answers.hashes, answers.rejections
            )
            return answers.finished("dead", source.fingerprint, letter)

    async def _finished(
        self, source: SourceDocument, slot: ChunkSlot, answers: Answers
    ) -> Finished:
        """Runs the rollouts, and adds their results to the document."""
        document = source.document
        self.results.check(document)
        rank_requests = self.requests
        requests = [
            Requests(rank_requests, answers, index, rank_requests.model) for index in self._rollouts
        ]
        results: Sequence[object]
        if source.finished is not None:
            document.metadata = source.finished
            results = self.results.of_finished(document)
            # An old output may hold fewer results than rollouts.
            for request, result in zip(requests, results, strict=False):
                request.count_finished(result)
        elif len(requests) == 1:
            results = [await self._run_rollout(document, requests[0])]
        else:
            results = await self._run_rollouts(document, requests)
        self._raise_if_stopping(answers)
        if answers.parked:
            raise Parked
        kept = [result for result in results if result is not None]
        self.results.put_quality(document, answers)
        data = await self.results.encode(document, kept, slot.chunk.index, source.id)
        if self.results.may_wait:
            self._raise_if_stopping(answers)
        outcome: Outcome = "dropped" if data == DROPPED else "written"
        self._dropped += outcome == "dropped"
        return answers.finished(outcome, source.fingerprint, data, len(kept))

    def _raise_if_stopping(self, answers: Answers) -> None:
        """Raises CancelledError after a stop of the rank, or the document's failure, if the
        document ends unrecorded.

        Any other CancelledError of a rollout is a failure of the document. ``Task.cancelling``
        cannot separate the cases: in Python 3.11 a TaskGroup in the rollout leaves it raised.
        """
        self.checkpoint.raise_failure()
        if self.shutdown.aborted:
            raise asyncio.CancelledError
        if answers.failure is not None:
            raise answers.failure
        if answers.parked and answers.is_repeatable:
            raise Parked

    async def _run_rollouts(self, document: Document, requests: Sequence[Requests]) -> list[object]:
        # The first rollout that raises cancels the others, whose further requests would be wasted.
        tasks = [
            asyncio.ensure_future(self._run_rollout(document, request)) for request in requests
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _run_rollout(self, document: Document, request: Requests) -> object:
        try:
            result = await self.rollout_fn(document, BoundGenerate(request))
        except BaseException as error:
            end_fork(self._pid, error)
            if drops(error):
                return None
            if isinstance(error, Exception | asyncio.CancelledError):
                raise
            if self.shutdown.aborted or self.shutdown.raised(error):
                raise
            raise exit_error(f"the rollout {name_of(self.rollout_fn)}", error) from error
        end_fork(self._pid)
        if document is result:
            text = (
                "returned the document itself. Return what is to be added to it, such as "
                "answer.text"
            )
            raise DocumentNotSerializable(f"The rollout {name_of(self.rollout_fn)} {text}.")
        return result


# An early stop, in order -------------------------------------------------------------------------

_PUBLISH_WAIT_SECONDS = 5.0  # of a drain, for complete chunks
_GRACE_SECONDS = 2.0  # for rollouts that compute or sleep


async def stop_when_requested(
    scheduler: Scheduler, serving: Sequence[asyncio.Task[None]], watch: asyncio.Task[NoReturn]
) -> NoReturn:
    """Waits until the rank is to stop, and stops it.

    Args:
        serving: start, watch and, when they are cancelled, stop the servers; one for each model.
        watch: raises failures of the checkpoint.

    Raises:
        Preempted: a stop was requested.
        BaseException: the rank's failure. Then the caller closes the checkpoint.
    """
    shutdown = scheduler.shutdown
    requests = scheduler.requests
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
    own = scheduler.observer.own
    lost = own.lost
    # 1. Requests in flight are answered, and complete chunks published, until the deadline.
    try:
        shutdown.late = not await shutdown.wait_for(_drained(scheduler, models))
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
    await scheduler.end_documents()
    # 3. Everything handed over is written, the mirror gets its last version, and the rank is
    # released.
    with shutdown.closing():
        await asyncio.wait(serving)
        watch.cancel()  # what fails now is in ``checkpoint.error``
        await in_own_thread(scheduler.checkpoint.close, False, scheduler.observer.last_records)
    shutdown.raise_preempted()


async def _drained(scheduler: Scheduler, models: Sequence[Model]) -> None:
    scheduler.checkpoint.hurry()
    # Over when no request or call is in flight, none begins any more, and every document waits for
    # one. Twice: an answer that has just come still has to be passed to its rollout.
    requests = scheduler.requests
    quiet = 0.0
    while quiet < _GRACE_SECONDS:
        await scheduler.next_look()
        in_flight = any(model.client.result().in_flight and not model.is_dead for model in models)
        if in_flight or requests.calls.running:
            quiet = 0.0
        elif quiet and requests.waiting == len(requests.documents):
            break
        else:
            quiet += _LOOK_SECONDS
    with suppress(TimeoutError):  # an upload may take minutes; its chunk's journal is safe
        async with asyncio.timeout(_PUBLISH_WAIT_SECONDS):
            while scheduler.checkpoint.publishing:
                await scheduler.next_look()
