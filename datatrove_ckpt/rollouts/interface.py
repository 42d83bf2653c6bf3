"""The types of a rollout and its arguments, and the simplest rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from datatrove_ckpt.common import JsonObject

T = TypeVar("T")
Payload = JsonObject
"""The JSON body of one request."""
FIELDS = ("text", "id", "media")
"""A document's fields besides its metadata."""

if TYPE_CHECKING:  # datatrove has no types

    class Document(Protocol):
        """datatrove's Document, the first argument of a rollout."""

        __dataclass_fields__: ClassVar[dict[str, Any]]
        text: str
        id: str
        media: list[object]
        metadata: JsonObject

    class InferenceResult(Protocol):
        """The result of ``generate``: datatrove's InferenceResult with more fields of the answer.

        Attributes:
            usage: the server's numbers of tokens.
            tool_calls: calls of the first choice; their arguments are JSON texts.
            logprobs: field of the first choice, unchanged.
            choices: all ``n`` choices, each with text, finish_reason, reasoning, tool_calls and
                logprobs, and with its refusal if there is one; empty for a single choice without a
                refusal.
            answer: JSON answer without id and time, for a path that is no completion; else None.
            response_id, model: the server's values. They are not in the output: they differ in each
                run.
            endpoint: name of the endpoint that answered, if the config has ``endpoints``; else "".
        """

        __dataclass_fields__: ClassVar[dict[str, Any]]
        text: str
        reasoning: str | None
        finish_reason: str
        usage: JsonObject
        tool_calls: Sequence[JsonObject]
        logprobs: JsonObject | None
        choices: Sequence[JsonObject]
        answer: JsonObject | None
        response_id: str
        model: str
        endpoint: str

else:
    from datatrove.data import Document
    from datatrove.pipeline.inference.types import InferenceResult

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Classification:
    """The answer of ``generate.classify``.

    Attributes:
        score: its probability; for a model with one class, such as a grade, the model's number.
    """

    label: str
    score: float
    scores: dict[str, float]


class CallFailed(Exception):
    """Reports a call of ``generate.once`` that failed, now or in an earlier attempt."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Generate(Protocol):
    """The second argument of a rollout: sends one request.

    Its methods request other answers than texts. A method that the server_type lacks stops the task
    with a ConfigError. Methods raise the errors of the call itself, and their answers are cached
    and retried in the same way. ``params`` are further keys of the payload, such as ``dimensions``;
    default_generation_params are for completions.
    """

    @overload
    async def __call__(
        self, payload: Payload, *, path: str | None = None, whole: bool = False
    ) -> InferenceResult: ...

    @overload
    async def __call__(
        self, payload: Payload, *, json_schema: JsonObject, attempts: int = 3
    ) -> Any: ...

    async def __call__(self, payload: Payload, **options: Any) -> Any:
        """Returns the answer to the payload, after adding the model and
        ``default_generation_params``.

        ``extra_body``, ``extra_headers`` and ``extra_query`` have the effect that they have in the
        OpenAI client. Header fields do not count for the cache: an access token may change.

        Await the call before the rollout returns: a later answer is not counted, and may be lost.

        Args:
            path: another path of the server, such as "/v1/embeddings" or "/tokenize". "/v1/..." is
                below the API's URL, all other paths are below the server's. If the answer is no
                completion, it is a JSON object in ``answer``, without a text, and its payload gets
                no defaults. A payload has a separate answer for each path.
            whole: keep a payload's own model, and put the server's whole answer into ``answer``,
                with id and time.
            json_schema: request JSON of this schema, and return its value, parsed.
            attempts: answers to request until one fits the schema. Each is cached.

        Raises:
            InvalidAnswer: no answer fits the schema.
            datatrove's InferenceError: this request cannot be answered.
            datatrove's ServerError: no request can be answered; the task stops, whatever the
            rollout does.
        """

    def __getattr__(self, name: str, /) -> Generate:
        """Returns ``generate`` for the model of this name (``generate.judge``), if ``config`` names
        several models.
        """

    async def embed(self, texts: str | Sequence[str], /, **params: object) -> Floats:
        """Returns a vector of each text, as an array of the shape (texts, dimensions); for one text
        (dimensions,).

        Each text has its own request, or shares it with other texts
        (``InferenceConfig.texts_per_request``).
        """

    async def classify(
        self, text: str, /, labels: Sequence[str] | None = None, **params: object
    ) -> Classification:
        """Returns the class of a text. ``labels``: names of the model's classes in its order
        (``id2label``).

        vLLM and SGLang name only the most probable class. So without ``labels`` the keys of
        ``scores`` are "0", "1", ...; if the model's classes have no names, "LABEL_0", "LABEL_1",
        ....
        """

    async def score(self, query: str, texts: Sequence[str], /) -> Floats:
        """Returns the scores of a cross-encoder or reranker for each text and the query: an array
        of the shape (texts,).
        """

    async def once(
        self,
        name: str,
        function: Callable[..., object],
        /,
        *args: object,
        time_limit: float | None = None,
        keep_errors: type[Exception] | tuple[type[Exception], ...] = (),
        **kwargs: object,
    ) -> Any:
        """Calls ``function(*args, **kwargs)``: a coroutine function, or a plain function, which
        runs in a thread. The result is saved like an answer. After a kill, only a call that was in
        flight is made again.

        Args:
            name: name of the call. Calls are identified by name, arguments and the rollout's code,
                and equal calls of a rollout by their order.
            args, kwargs: JSON values.
            time_limit: limit in seconds. A thread cannot be stopped: its result is dropped.
            keep_errors: errors of the function that are also saved, and raised as ``CallFailed``.

        Returns:
            The result after a conversion to JSON and back: a tuple becomes a list. At most 100 MB.

        Raises:
            CallFailed: the function raised an error of ``keep_errors``.
            TimeoutError: the call took too long.
            DocumentNotSerializable: the result is too large, or no JSON.
        """

    def url(self) -> AbstractAsyncContextManager[str]:
        """Serves an OpenAI-compatible address, for agents that take a ``base_url``, with any key.
        Each call of the agent (chat, completions, other paths) becomes a request of this document
        to the run's model. Streams are replayed from whole answers.

        An agent that blocks must run in a thread (``asyncio.to_thread``). If an agent puts the time
        into its prompts, its requests are sent, and paid for, again after a kill.
        """


Rollout = Callable[..., Awaitable[object]]
"""``async def rollout(document, generate, **shared)``.

It returns an InferenceResult, JSON values or None.
"""


# Never change the source of this function: it is part of the identity of runs.
async def chat(document: Document, generate: Generate, **shared: Any) -> InferenceResult:
    """Returns the document's text as one user message."""
    return await generate({"messages": [{"role": "user", "content": document.text}]})


async def gather_all(requests: Iterable[Awaitable[T]]) -> list[T]:
    """Returns all answers. If a request fails, first waits for the others: the request cache saves
    their answers for a retry.
    """
    answers = await asyncio.gather(*requests, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast("list[T]", answers)


def chat_payload(system_prompt: str | None, content: str, params: Payload | None) -> Payload:
    messages = [{"role": "user", "content": content}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return {"messages": messages} | (params or {})
