"""The async core: documents -> rollouts -> answers -> checkpoint.

Everything here runs on one event loop, which never waits on a disk or a reader: documents come in batches from the
reader's thread, and what is done is handed to the storage thread. Admission waits for three things: a free place
among ``max_concurrent_documents``, room in the storage thread's queue, and complete chunks to become files when too
many of them wait for it.

A document whose rollout met a dead or refusing server is never recorded, whatever the rollout made of the error:
``except Exception: return None`` in a user's code must not turn a crash into dropped documents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.journal import Finished, Outcome
from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.documents import encode
from datatrove_ckpt.generation.drain import Drain
from datatrove_ckpt.generation.failures import Failures
from datatrove_ckpt.generation.generate import Answers, AnswerStore, RequestObserver, Requests, call_soon
from datatrove_ckpt.generation.prefetch import DocumentSource, SourceDocument
from datatrove_ckpt.inference.client.client import CompletionClient
from datatrove_ckpt.inference.servers.interface import wait_until_cancelled
from datatrove_ckpt.process.preemption import Preemption

# Seconds that the end of a drain waits for complete chunks to become files.
_PUBLISHING_PATIENCE = 5.0

Rollout = Callable[..., Awaitable[Any]]
Connect = Callable[[], AbstractAsyncContextManager[tuple[CompletionClient, Callable[[], Awaitable[None]]]]]
"""Starts the server; gives a client and a coroutine function that ends, with an error, when the server dies."""


class Checkpoint(AnswerStore, Protocol):
    """One rank's checkpoint, open. See ``OpenCheckpoint`` and ``OpenNullCheckpoint``."""

    resumed: ResumePoint
    error: BaseException | None
    on_change: Callable[[], None]

    def admit(self, fingerprint: str, position: Callable[[], dict[str, Any] | None] = ...) -> ChunkSlot | None: ...
    def finish(self, place: ChunkSlot, finished: Finished) -> None: ...
    def end_of_input(self) -> None: ...
    def raise_failure(self) -> None: ...
    def fast_stop(self) -> None: ...
    def close(self, completed: bool = ...) -> None: ...
    @property
    def has_locks(self) -> bool: ...
    @property
    def counts(self) -> DocumentCounts: ...
    @property
    def congested(self) -> bool: ...
    @property
    def publishing(self) -> int: ...
    @property
    def publishing_behind(self) -> bool: ...
    @property
    def all_committed(self) -> bool: ...


class Openable(Protocol):
    """One rank's checkpoint, not open yet. See ``CheckpointManager`` and ``NullCheckpoint``."""

    def open(self) -> Checkpoint: ...


class Observer(RequestObserver, Protocol):
    """Is told what happens, for stats and progress."""

    def serving(self) -> None: ...
    def finished(self, outcome: Outcome, successful_rollouts: int, requests: list[int]) -> None: ...


class Scheduler:
    """One rank's documents through the rollout function."""

    def __init__(
        self,
        rollout_fn: Rollout,
        config: InferenceConfig,
        checkpoint: Checkpoint,
        connect: Connect,
        observer: Observer,
        metadata_key: str,
        failures: Failures,
        preemption: Preemption,
    ) -> None:
        self.rollout_fn = rollout_fn
        self.config = config
        self.checkpoint = checkpoint
        self.observer = observer
        self._connect = connect
        self._metadata_key = metadata_key
        self._failures = failures
        self._preemption = preemption
        self.drain = Drain()
        self._rollouts = config.rollouts_per_document
        self._places = asyncio.Semaphore(config.max_concurrent_documents or 1)
        self._needed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False

    async def run(self, source: DocumentSource) -> None:
        """Returns once every document of the source is committed.

        Raises:
            BaseExceptionGroup: of whatever failed first, and perhaps of what failed with it. ``Preempted`` when the
                rank was told to end early.
        """
        loop = asyncio.get_running_loop()
        self.client: asyncio.Future[CompletionClient] = loop.create_future()
        self._change: asyncio.Future[None] = loop.create_future()
        self._freed: asyncio.Future[None] = loop.create_future()
        self.checkpoint.on_change = lambda: call_soon(loop, self._changed)
        if self.checkpoint.resumed.interrupted:
            self._needed.set()  # the server loads its model while a reader that cannot seek counts
        async with asyncio.TaskGroup() as background:
            serving = background.create_task(self._serve())
            tasks = [
                serving,
                background.create_task(self._watch_checkpoint()),
                background.create_task(self._end_early(serving)),
            ]
            async with asyncio.TaskGroup() as documents:
                # All waiting is done in here, so that whatever ends it is seen before it cancels the documents.
                try:
                    await self._admit_all(source, documents)
                    await self._idle.wait()
                except BaseException:
                    self._stopping = True
                    raise
            self.checkpoint.end_of_input()
            while not self.checkpoint.all_committed:
                await self._next_change()
            for task in tasks:
                task.cancel()

    async def _admit_all(self, source: DocumentSource, documents: asyncio.TaskGroup) -> None:
        async for batch in source.batches(self.checkpoint.resumed):
            for read in batch:
                place = self.checkpoint.admit(read.fingerprint, read.position)
                if place is None:
                    continue
                self._needed.set()
                while self.checkpoint.congested or self.checkpoint.publishing_behind:
                    await self._next_change()
                await self._places.acquire()
                self._raise_if_stopping()  # nothing above need have waited, and so noticed
                if self.drain.on:
                    await wait_until_cancelled()
                self.drain.document_started()
                self._idle.clear()
                documents.create_task(self._process(read, place))

    # background --------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        # Not before something is to be asked: a finished rank, or one without documents, loads no model.
        await self._needed.wait()
        async with self._connect() as (client, watch):
            self.observer.serving()
            self.client.set_result(client)
            await watch()

    async def _watch_checkpoint(self) -> None:
        while True:
            self.checkpoint.raise_failure()
            await self._next_change()

    async def _end_early(self, serving: asyncio.Task[None]) -> None:
        """Once the rank is told to end: nothing new is begun, and what is in flight has a while.

        Raises:
            Preempted: always.
        """
        with self._preemption.listening() as told:
            await told.wait()
            if self.client.done():
                await self._answer_what_is_in_flight(self.client.result())
            else:
                serving.cancel()  # a model may need minutes to load
                await self._preemption.wait_for(self._drained(None))
        self._stopping = True  # before anything is cancelled: what that does to a rollout is no failure of its document
        self._preemption.raise_preempted()

    async def _answer_what_is_in_flight(self, client: CompletionClient) -> None:
        stats, preemption = client.stats, self._preemption
        lost = stats.lost
        logger.warning(
            f"{preemption.cause}: {stats.in_flight} requests in flight have {preemption.drain_seconds:g} s to be "
            "answered; a second signal ends them at once."
        )
        client.fast_stop = not await preemption.wait_for(self._drained(client))
        preemption.given_up = stats.in_flight + stats.lost - lost

    async def _drained(self, client: CompletionClient | None) -> None:
        await self.drain.until_over(client)
        with suppress(TimeoutError):  # an upload may take minutes; its chunk's journal is safe
            async with asyncio.timeout(_PUBLISHING_PATIENCE):
                while self.checkpoint.publishing:
                    await self._next_change()

    def _changed(self) -> None:
        loop = asyncio.get_running_loop()
        done, self._change = self._change, loop.create_future()
        done.set_result(None)
        if not self.checkpoint.congested:
            freed, self._freed = self._freed, loop.create_future()
            freed.set_result(None)

    async def _next_change(self) -> None:
        await asyncio.shield(self._change)

    async def room(self) -> None:
        """Waits while the storage thread is behind."""
        # Not for every change: thousands may wait here, and a slow disk has a change every few milliseconds.
        while self.checkpoint.congested:
            await asyncio.shield(self._freed)

    # one document ------------------------------------------------------------------------------------------------

    async def _process(self, read: SourceDocument, place: ChunkSlot) -> None:
        try:
            self.checkpoint.finish(place, await self._finish(read, place))
        except BaseException:
            self._stopping = True
            raise
        finally:
            self._places.release()
            self.drain.document_finished()
            if not self.drain.documents:
                self._idle.set()

    async def _finish(self, read: SourceDocument, place: ChunkSlot) -> Finished:
        document = read.document
        answers = Answers(self, place, str(document.id))
        requests = [Requests(self, answers, index) for index in range(self._rollouts)]
        try:
            results = await self._run_rollouts(document, requests)
            answers.raise_fatal()
            self._raise_if_stopping()
            kept = [result for result in results if result is not None]
            document.metadata[self._metadata_key] = kept
            data = encode(document) if kept else b"null"
        except (Exception, asyncio.CancelledError) as error:
            answers.raise_fatal()
            self._raise_if_stopping()
            letter = self._failures.letter_or_raise(read, place, error, [request.last_hash for request in requests])
            return self._finished(read, place, "dead", letter, requests)
        return self._finished(read, place, "written" if kept else "dropped", data, requests, len(kept))

    def _raise_if_stopping(self) -> None:
        """The document is being cancelled with its rank, whatever its rollout made of that.

        A rollout that cancelled something itself, and let that out, has failed like any other. ``Task.cancelling``
        does not tell the two apart: in Python 3.11 a TaskGroup of the rollout's own leaves it raised.
        """
        if self._stopping:
            raise asyncio.CancelledError

    async def _run_rollouts(self, document: Document, requests: list[Requests]) -> list[Any]:
        if len(requests) == 1:
            return [await self.rollout_fn(document, requests[0])]
        # The first rollout that raises ends its siblings: their document is lost to this run, so they would be paid
        # for nothing. What they were answered so far is in the cache.
        tasks = [asyncio.ensure_future(self.rollout_fn(document, request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _finished(
        self,
        read: SourceDocument,
        place: ChunkSlot,
        outcome: Outcome,
        document: bytes,
        requests: list[Requests],
        kept: int = 0,
    ) -> Finished:
        self.observer.finished(outcome, kept, [request.count for request in requests])
        return Finished(
            ordinal=place.ordinal,
            outcome=outcome,
            fingerprint=read.fingerprint,
            document=document,
            requests=sum(request.count for request in requests),
            prompt_tokens=sum(request.prompt_tokens for request in requests),
            completion_tokens=sum(request.completion_tokens for request in requests),
        )
