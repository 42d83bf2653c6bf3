"""One call of a rollout's ``generate``: the answer comes from the request cache, or from the server and is then kept.

Everything here runs on the event loop of ``scheduler.py``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import orjson
from datatrove.pipeline.inference.types import InferenceError, InferenceResult
from datatrove.pipeline.inference.types import ServerError as RolloutServerError

from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey, payload_hash
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.documents import trim
from datatrove_ckpt.errors import RequestFailed, RequestPoisoned, RequestRejected, ServerError, TooManyOpenFiles
from datatrove_ckpt.generation.drain import Drain
from datatrove_ckpt.generation.failures import unanswered
from datatrove_ckpt.inference.client.answers import Completion
from datatrove_ckpt.inference.client.client import CompletionClient
from datatrove_ckpt.inference.client.transport import REJECTED
from datatrove_ckpt.inference.servers.interface import wait_until_cancelled
from datatrove_ckpt.process.event_loop import call_soon
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.rollouts import Payload

# OPT_NON_STR_KEYS because the keys of logit_bias are integers.
_PAYLOAD = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


class AnswerStore(Protocol):
    """Where answers are kept. See ``OpenCheckpoint``."""

    def lookup(self, ordinal: int, receive: Callable[[dict[AnswerKey, Answer]], None]) -> None: ...
    def put_answer(self, slot: ChunkSlot, doc_id: str, key: AnswerKey, answer: Answer) -> None: ...


class RequestObserver(Protocol):
    """Gets a call when a request ends."""

    def answered(self, completion: Completion) -> None: ...
    def request_failed(self) -> None: ...


class RankContext(Protocol):
    """What a request needs from its rank. See ``Scheduler``."""

    @property
    def config(self) -> InferenceConfig: ...
    @property
    def checkpoint(self) -> AnswerStore: ...
    @property
    def observer(self) -> RequestObserver: ...
    @property
    def client(self) -> asyncio.Future[CompletionClient]: ...
    @property
    def drain(self) -> Drain: ...
    @property
    def shutdown(self) -> Shutdown: ...
    async def wait_for_storage(self) -> None: ...


class Answers:
    """One document's cached answers."""

    def __init__(self, rank: RankContext, slot: ChunkSlot, doc_id: str) -> None:
        self.slot = slot
        self.doc_id = doc_id
        self._rank = rank
        self._cached: asyncio.Future[dict[AnswerKey, Answer]] | None = None
        self._pending = 0

    async def cached(self, key: AnswerKey) -> Answer | None:
        if not self.slot.cached:
            return None
        if self._cached is None:
            loop = asyncio.get_running_loop()
            future = self._cached = loop.create_future()
            receive = lambda rows: call_soon(loop, future.set_result, rows)  # noqa: E731
            with _storage_failures(self._rank):
                self._rank.checkpoint.lookup(self.slot.ordinal, receive)
        return (await asyncio.shield(self._cached)).get(key)

    def request_started(self) -> None:
        """A request of the document starts to wait for the server."""
        self._pending += 1
        if self._pending == 1:
            self._rank.drain.request_started()

    def request_finished(self) -> None:
        """A request of the document has its answer or its error."""
        self._pending -= 1
        if not self._pending:
            self._rank.drain.request_finished()


class Requests:
    """The ``generate`` callback of one rollout. See ``rollouts.Generate``."""

    def __init__(self, rank: RankContext, answers: Answers, rollout_idx: int) -> None:
        self.count = 0
        self.last_hash = ""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._rank = rank
        self._answers = answers
        self._rollout_idx = rollout_idx
        self._occurrences: Counter[str] = Counter()

    async def __call__(self, payload: Payload, /) -> InferenceResult:
        """Returns the cached answer, or sends the payload.

        Raises:
            InferenceError: the request cannot be answered; ``error`` says why.
            datatrove's ServerError: no request can be answered.
        """
        if self._rank.shutdown.aborted:
            # A rollout that swallows its cancellation and tries again must not keep the event loop busy.
            await wait_until_cancelled()
        config = self._rank.config
        payload = {**config.default_generation_params, **payload, "model": config.model_name_or_path}
        try:
            body = trim(orjson.dumps(payload, option=_PAYLOAD))
        except TypeError as error:
            raise InferenceError(None, error, payload=payload) from error
        self.last_hash = digest = payload_hash(body)
        key = AnswerKey(self._rollout_idx, digest, self._occurrences[digest])
        self._occurrences[digest] += 1
        self.count += 1
        answer = await self._answers.cached(key)
        result = None if answer is None else _from_cache(answer, payload)
        if result is None:
            result = await self._send(key, body, payload)
        self.prompt_tokens += result.usage.get("prompt_tokens") or 0
        self.completion_tokens += result.usage.get("completion_tokens") or 0
        return result

    async def _send(self, key: AnswerKey, body: bytes, payload: Payload) -> InferenceResult:
        rank = self._rank
        try:
            completion = await self._complete(body)
        except RequestRejected as error:
            rank.observer.request_failed()
            await self._keep(key, Answer(None, f"{error.status} {error.body}"))
            raise InferenceError(None, error, payload=payload) from error
        except RequestPoisoned as error:
            rank.observer.request_failed()
            raise InferenceError(None, error, payload=payload) from error
        except (RequestFailed, ServerError, TooManyOpenFiles) as error:
            rank.observer.request_failed()
            # The rank stops, whatever the rollout does with the error that it sees.
            rank.shutdown.abort(unanswered(self._answers.doc_id, self._answers.slot, error))
            if not isinstance(error, RequestFailed):
                raise RolloutServerError(error) from error
            raise InferenceError(None, error, payload=payload) from error
        rank.observer.answered(completion)
        await self._keep(key, Answer(_to_json(completion), None))
        return InferenceResult(completion.text, completion.finish_reason, completion.usage, completion.reasoning)

    async def _complete(self, body: bytes) -> Completion:
        self._answers.request_started()
        try:
            client = await asyncio.shield(self._rank.client)
            return await client.complete(body)
        finally:
            self._answers.request_finished()

    async def _keep(self, key: AnswerKey, answer: Answer) -> None:
        # Queue the answer first, then wait: kill -9 would lose an answer that waits here outside of the queue.
        with _storage_failures(self._rank):
            self._rank.checkpoint.put_answer(self._answers.slot, self._answers.doc_id, key, answer)
        await self._rank.wait_for_storage()


@contextmanager
def _storage_failures(rank: RankContext) -> Iterator[None]:
    """A failure of the storage thread stops the rank. It passes through the rollout, and is not the rollout's."""
    try:
        yield
    except BaseException as error:
        rank.shutdown.abort(error)
        raise


def _from_cache(answer: Answer, payload: Payload) -> InferenceResult | None:
    """The cached answer; None if it must be requested again.

    Raises:
        InferenceError: the cached answer is a rejection.
    """
    if answer.result is not None:
        return InferenceResult(**orjson.loads(answer.result))
    status, _, body = (answer.error_message or "").partition(" ")
    if int(status) not in REJECTED:  # 0.1 kept a 402 or a 405 like a 400
        return None
    rejected = RequestRejected(int(status), body, remembered=True)
    raise InferenceError(None, rejected, payload=payload) from rejected


def _to_json(completion: Completion) -> bytes:
    fields = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": completion.usage,
        "reasoning": completion.reasoning,
    }
    return trim(orjson.dumps(fields))
