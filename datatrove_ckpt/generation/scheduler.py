"""Runs one rank: documents from the reader go through the rollout function, and the results to the
checkpoint.

Everything here runs on one event loop, which never waits on a disk or a reader. Three limits hold
back new documents: ``max_concurrent_documents``, the bounded queue of the storage thread, and the
number of complete chunks that wait to be published.

A failing document or server stops the rank with a drain (``Shutdown.fail``), even if a rollout
swallows the error, which must not turn an outage into dropped documents. If nothing can be saved,
all work ends at once (``Shutdown.abort``).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.checkpoint.numbers import WHY_DROPPED, Outcome
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.memory import ByteBudget
from datatrove_ckpt.common.redaction import note_sent
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import FIRST_LIMIT
from datatrove_ckpt.errors import (
    CheckpointError,
    CkptError,
    ConfigError,
    DocumentNotSerializable,
    RequestFailed,
    causes,
    named,
)
from datatrove_ckpt.generation.failures import Failures, RetriedDocument, drops
from datatrove_ckpt.generation.generate import Answers, Model, Parked, RankRequests, Requests
from datatrove_ckpt.generation.prefetch import DocumentSource, SourceDocument
from datatrove_ckpt.generation.results import DROPPED, Results
from datatrove_ckpt.generation.user_code import exit_error, name_of
from datatrove_ckpt.inference.client.routing import WINDOW, Router, Sender
from datatrove_ckpt.inference.servers.host import ServerHost
from datatrove_ckpt.process.event_loop import end_fork, in_own_thread
from datatrove_ckpt.process.host_loop import host_loop
from datatrove_ckpt.process.open_files import requests_at_once
from datatrove_ckpt.process.shutdown import wait_until_cancelled
from datatrove_ckpt.rollouts import Rollout

# How many documents may be in work at once: as many as have places for their requests, and a few
# more, so that there is a choice for each server. Rollouts that do other work between requests need
# more, so the number grows by one whenever a request could be sent, none waits, and no document may
# start, as in TCP's slow start. Large documents also share a budget of bytes.


_SMALL = 1 << 16  # bytes of a document that count for nothing
_IDLE_SECONDS = 1.0


def most_documents(config: InferenceConfig, *others: InferenceConfig) -> int:
    """Returns the most documents in work: as many as all models have room for."""
    if config.limits_documents and config.max_concurrent_documents is not None:
        return config.max_concurrent_documents
    texts = [
        one.texts_for(requests_at_once(one.max_concurrent_generations, one.servers))
        for one in (config, *others)
    ]
    documents = max(1, sum(texts) // config.rollouts_per_document)
    if any(one.servers > 1 for one in (config, *others)):
        documents += WINDOW
    return documents


class DocumentLimit:
    """Holds back documents: ``acquire`` before each, in one task; ``release`` after each.

    Args:
        media: the budget of bytes of all ranks that share this process.
    """

    def __init__(
        self, config: InferenceConfig, *others: InferenceConfig, media: ByteBudget
    ) -> None:
        self._most = most_documents(config, *others)
        self._rollouts = config.rollouts_per_document
        self._models: list[tuple[InferenceConfig, Router]] = []
        self._size = self._most
        self._is_fixed = config.limits_documents
        self._elsewhere = 0  # documents that do other work than requests
        if not self._is_fixed:
            self._size = min(self._most, max(1, FIRST_LIMIT // self._rollouts))
        self._in_work = 0
        self._room: asyncio.Future[None] | None = None
        self._bytes = media

    async def acquire(self, size: int) -> None:
        if size > _SMALL:
            await self._bytes.acquire(size)
        while self._in_work >= self._size:
            # One wake-up for each turn of the event loop: a semaphore has one for each document.
            self._room = asyncio.get_running_loop().create_future()
            if self._is_idle():
                # Rollouts may wait for more documents, to send their requests together.
                ended, _ = await asyncio.wait([self._room], timeout=_IDLE_SECONDS)
                if not ended and self._is_idle():
                    self._elsewhere += self._size
                    self._size = min(self._most, 2 * self._size)
            else:
                await self._room
        self._room = None
        self._in_work += 1

    def release(self, size: int) -> None:
        if size > _SMALL:
            self._bytes.release(size)
        self._in_work -= 1
        self._wake()

    def follow(self, config: InferenceConfig, router: Router, sender: Sender) -> None:
        """Follows the places at the servers of a model, up and down."""
        self._models.append((config, router))
        if not self._is_fixed:
            sender.on_change = partial(self._follow, router, sender)
            self._follow(router, sender)

    def _is_idle(self) -> bool:
        """Whether no server has a request, and none waits."""
        routers = [router for _, router in self._models]
        busy = any(router.in_flight or router.waiting for router in routers)
        return bool(routers) and not self._is_fixed and not busy

    def _follow(self, router: Router, sender: Sender) -> None:
        is_full = self._in_work >= self._size or self._room is not None
        if is_full and not router.waiting and router.in_flight < router.capacity:
            self._elsewhere += 1
        texts = sum(config.texts_for(each.capacity) for config, each in self._models)
        places = texts // self._rollouts
        if any(len(each.targets) > 1 for _, each in self._models):
            places += WINDOW
        self._size = min(self._most, max(1, places) + self._elsewhere)
        sender.may_grow = self._size < self._most
        if self._in_work < self._size:
            self._wake()

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


# How often the loop looks at what other threads do for the rank. Being told of each change would
# cost more: the disk writes hundreds of groups in a second.
_LOOK_SECONDS = 0.01
_SHORTEST_LOOK_SECONDS = 0.001  # of a small task, whose commits take milliseconds
_MANY = 100  # documents of which one at least should be kept


@dataclass(eq=False)
class Scheduler(RankRequests):
    """Runs the rollout function on one rank's documents. ``rollout_fn``: the step's, bound."""

    rank: int
    rollout_fn: Rollout
    servers: ServerHost
    failures: Failures
    results: Results

    def __post_init__(self) -> None:
        super().__post_init__()
        first, *others = self.configs.values()
        self._rollouts = range(first.rollouts_per_document)
        self.parked = 0
        self._dropped = 0
        self._document_limit = DocumentLimit(first, *others, media=self.servers.media)
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
            serving = [background.create_task(self._serve(model)) for model in self.models.values()]
            watch = background.create_task(self._watch())
            stop = background.create_task(stop_when_requested(self, serving, watch))
            await self._run_documents(documents)
            await self._save(documents)
            if self.shutdown.has_failed:  # or the stop has begun to close the checkpoint
                await wait_until_cancelled()
            self.has_ended = True
            for task in (*serving, watch, stop):
                task.cancel()

    async def _run_documents(self, documents: DocumentSource) -> None:
        # An error that ends a wait must abort before any document is cancelled.
        try:
            await self._admit_all(documents)
            if documents.error is not None:
                self.shutdown.fail(documents.error)
                await wait_until_cancelled()
            self.all_started = True
            host = host_loop()
            if host is not None:
                host.has_admitted = True
            while self.documents:
                await asyncio.wait([*self.documents.values()])
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
        left = [*self.documents.values()]
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
                self.documents[slot.ordinal] = self._loop.create_task(work)

    async def _wait_for_goal(self) -> None:
        # With nothing in work, a kill has left finished documents in chunks that lack others.
        while self.limits.may_suffice() and (self.documents or self.checkpoint.publishing):
            self.checkpoint.hurry()
            await self.next_look()
            self.limits.look()
            if self.shutdown.is_stopping:
                return

    # background ----------------------------------------------------------------------------------

    async def _serve(self, model: Model) -> None:
        # A finished rank, or one without documents, loads no model.
        await self._server_needed.wait()
        observer = self.observer
        host = host_loop()
        order = 0 if host is None else host.order
        sender = Sender(self.shutdown, order, observer.server, observer.own)
        configs = [*self.configs.values()]
        served = self.servers.lend(
            model.config,
            configs,
            self.rank,
            sender,
            observer.outages.append,
            is_new=not self.checkpoint.run_has_answers(),
        )
        try:
            async with served as (client, watch):
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
                self.storage_free.set()
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
            self.documents.pop(slot.ordinal, None)
            self._document_limit.release(source.size)

    async def _run_document(self, source: SourceDocument, slot: ChunkSlot) -> Finished:
        document = source.document
        answers = Answers(self, slot, source.id, len(self._rollouts))
        if isinstance(document, RetriedDocument):
            answers.is_suspect = document.letter["kind"] == RequestFailed.__name__
        requests = [Requests(self, answers, index) for index in self._rollouts]
        taken = self.failures.taken_letter(source, slot.ordinal)
        if taken is not None:
            return answers.finished("dead", source.fingerprint, taken)
        try:
            self.results.check(document)
            results: Sequence[object]
            if source.finished is not None:
                document.metadata = source.finished
                results = self.results.of_finished(document)
                for request, result in zip(requests, results, strict=False):
                    request.count_finished(result)
            elif len(requests) == 1:
                results = [await self._run_rollout(document, requests[0])]
            else:
                results = await self._run_rollouts(document, requests)
            self._raise_if_stopping(answers)
            if answers.parked:
                raise self._not_repeatable()
            kept = [result for result in results if result is not None]
            self.results.put_quality(document, answers)
            data = await self.results.encode(document, kept, slot.chunk.index, source.id)
            if self.results.may_wait:
                self._raise_if_stopping(answers)
        except (Exception, asyncio.CancelledError) as raised:
            self._raise_if_stopping(answers)
            error: BaseException = raised
            if answers.parked:
                error = self._not_repeatable()
            note_sent(answers.payloads)
            note_sent([getattr(cause, "payload", None) for cause in causes(error)])
            letter = self.failures.letter_or_raise(
                source, slot, error, answers.hashes, answers.rejections
            )
            return answers.finished("dead", source.fingerprint, letter)
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

    def _not_repeatable(self) -> ConfigError:
        return ConfigError(
            f"{name_of(self.rollout_fn)} did not use an answer of its last "
            "pass, and sent other requests, so each pass would be paid for. With "
            "provider_batches, a rollout must send the same requests for a document each time: "
            "no random numbers, no time in its prompts (a seed may come from document.id)",
            setting="rollout_fn",
        )

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
            result = await self.rollout_fn(document, request)
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


# Seconds between two cancellations. A rollout has their sum for its clean-up.
_PATIENCE = (0.2, 0.8, 2.0, 2.0)
_PATIENCE_FAST = (0.2, 0.8)

# An early stop, in order -------------------------------------------------------------------------
#

_PUBLISH_WAIT_SECONDS = 5.0  # of a drain, for complete chunks
_GRACE_SECONDS = 2.0  # for rollouts that compute or sleep


async def stop_when_requested(
    rank: Scheduler, serving: Sequence[asyncio.Task[None]], watch: asyncio.Task[NoReturn]
) -> NoReturn:
    """Waits until the rank is to stop, and stops it.

    Args:
        serving: start, watch and, when they are cancelled, stop the servers; one for each model.
        watch: raises failures of the checkpoint.

    Raises:
        Preempted: a stop was requested.
        BaseException: the rank's failure. Then the caller closes the checkpoint.
    """
    shutdown = rank.shutdown
    checkpoint = rank.checkpoint
    await shutdown.requested()
    # No document is admitted, and the router sends no request: both look at the shutdown.
    models = [model for model in rank.models.values() if model.client.done()]
    clients = [model.client.result() for model in models]
    in_flight = sum(client.in_flight for client in clients)
    running = f"{in_flight} requests"
    if rank.calls.running:
        running += f" and {plural(rank.calls.running, 'call')}"
    if not clients:
        for task in serving:  # a model may need minutes to load
            task.cancel()
    elif shutdown.is_finishing:
        logger.info(f"{shutdown.failure} Still answered: {running}.")
    elif shutdown.failure is None or in_flight or rank.calls.running:
        why = shutdown.cause or f"The task has failed ({type(shutdown.failure).__name__})"
        logger.warning(
            f"{why}: {running} in flight have {shutdown.drain_seconds:g} s to be "
            "answered; a further signal, or cancellation, ends the wait at once."
        )
    own = rank.observer.own
    lost = own.lost
    # 1. Requests in flight are answered, and complete chunks published, until the deadline.
    try:
        shutdown.late = not await shutdown.wait_for(_drained(rank, models))
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
    await rank.end_documents()
    # 3. Everything handed over is written, the mirror gets its last version, and the rank is
    # released.
    with shutdown.closing():
        await asyncio.wait(serving)
        watch.cancel()  # what fails now is in ``checkpoint.error``
        await in_own_thread(checkpoint.close, False, rank.observer.last_records)
    # 4. Servers end, by themselves if the drain was in time, else they are killed: see ``_Run``.
    # 5. The old signal handlers get the signals: see process/preemption.py.
    shutdown.raise_preempted()


async def _drained(rank: Scheduler, models: Sequence[Model]) -> None:
    rank.checkpoint.hurry()
    # Over when no request or call is in flight, none begins any more, and every document waits for
    # one. Twice: an answer that has just come still has to be passed to its rollout.
    quiet = 0.0
    while quiet < _GRACE_SECONDS:
        await rank.next_look()
        in_flight = any(model.client.result().in_flight and not model.is_dead for model in models)
        if in_flight or rank.calls.running:
            quiet = 0.0
        elif quiet and rank.waiting == len(rank.documents):
            break
        else:
            quiet += _LOOK_SECONDS
    with suppress(TimeoutError):  # an upload may take minutes; its chunk's journal is safe
        async with asyncio.timeout(_PUBLISH_WAIT_SECONDS):
            while rank.checkpoint.publishing:
                await rank.next_look()
