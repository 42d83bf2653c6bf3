"""Records the requests of a rollout, for ``run --sample`` and the checks of prompts."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from datatrove.data import Document

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.counts import Tokens
from datatrove_ckpt.generation.requests import question_of
from datatrove_ckpt.inference.client.responses import token_counts
from datatrove_ckpt.rollouts import Generate, PromptRollout, ReadyMade, Rollout
from datatrove_ckpt.rollouts.media import media_key


@dataclass
class RecordedRequest:
    """A request.

    Attributes:
        prompt: all messages as JSON, with hashes of the media.
        usage: ``usage`` of an ``InferenceResult``; empty for other answers.
        started, ended: monotonic times of the wait for the answer.
    """

    question: str
    prompt: str = ""
    answer_text: str = ""
    usage: JsonObject = field(default_factory=dict)
    started: float = 0.0
    ended: float = 0.0
    model: str = ""
    endpoint: str = ""

    @property
    def tokens(self) -> Tokens:
        return token_counts(self.usage)


NotedRequests = dict[int, list[RecordedRequest]]
"""The requests of each document, by ``id(document)``: ids of the input may repeat."""


async def unsent_prompts(rollout_fn: Rollout, documents: Iterable[Document]) -> list[str]:
    """Returns the prompts of the documents' first requests, and sends none.

    Calls ready-made rollouts only: a user's function may do anything before its first request.
    """
    prompts = []

    async def note(payload: object, **settings: object) -> object:
        prompts.append(_prompt(payload))
        raise NotImplementedError

    if getattr(rollout_fn, "__module__", "") == ReadyMade.__module__:
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):  # for media and tokenizers
                for document in documents:
                    with suppress(Exception):  # documents without a request raise their own errors
                        await rollout_fn(document, note)
    return prompts


def noting(rollout_fn: Rollout, recorded: NotedRequests, seconds: float = math.inf) -> Rollout:
    """Returns a rollout that records its requests, and fails ``seconds`` after the first result."""
    of_rollout = {}  # for ResultEncoder
    deadline = _Deadline(seconds)
    if isinstance(rollout_fn, ReadyMade):
        rollout_fn.prepare()
        of_rollout["value_of"] = rollout_fn.value_of
    if isinstance(rollout_fn, PromptRollout):
        of_rollout["drop_sent"] = rollout_fn.drop_sent

    async def rollout(document: Document, generate: Generate, **shared: object) -> object:
        noted = _RecordingGenerate(generate, recorded.setdefault(id(document), []))
        async with deadline.applied():
            return await rollout_fn(document, noted, **shared)

    vars(rollout).update(of_rollout)
    return rollout


class _Deadline:
    """Ends blocks with TimeoutError, some seconds after the first has ended."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = math.inf
        self._blocks = set[asyncio.Timeout]()

    @asynccontextmanager
    async def applied(self) -> AsyncIterator[None]:
        async with asyncio.timeout_at(self._end) as block:
            self._blocks.add(block)
            try:
                yield
            finally:
                self._blocks.discard(block)
        if math.isinf(self._end):
            self._end = asyncio.get_running_loop().time() + self._seconds
            for block in self._blocks:
                block.reschedule(self._end)


@dataclass
class _RecordingGenerate:
    _generate: Any
    _recorded: list[RecordedRequest]
    _model: str = ""

    async def __call__(self, payload: Any, /, *more: object, **settings: object) -> object:
        if settings.get("json_schema") is not None:  # each attempt is recorded
            return await self._generate.form(**settings).value(self, payload)
        request = RecordedRequest(_question(payload), _prompt(payload), model=self._model)
        request.started = time.monotonic()
        self._recorded.append(request)
        answer: object
        try:
            answer = await self._generate(payload, *more, **settings)
        finally:
            request.ended = time.monotonic()
        request.answer_text = str(getattr(answer, "text", "") or answer)
        request.usage = getattr(answer, "usage", {})
        request.endpoint = getattr(answer, "endpoint", "")
        return answer

    def url(self) -> Any:
        from datatrove_ckpt.generation.agent_url import serve

        return serve(self, self._generate.model_name)

    def __getattr__(self, name: str) -> Any:
        if name == "once":  # sends no request
            return self._generate.once
        return _RecordingGenerate(
            getattr(self._generate, name), self._recorded, self._model or name
        )


def _question(payload: Any) -> str:
    # Errors mean that the payload will be refused.
    with suppress(AttributeError, LookupError, TypeError):
        if isinstance(payload, Mapping):
            return question_of({**payload})
        return payload if isinstance(payload, str) else str(payload[0])
    return ""


def _prompt(payload: Any) -> str:
    with suppress(AttributeError, LookupError, TypeError):
        prompt = payload.get("messages") or payload["prompt"]
        return orjson.dumps(prompt, default=media_key).decode()
    return ""
