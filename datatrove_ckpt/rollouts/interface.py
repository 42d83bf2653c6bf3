"""What a rollout is: the types of its arguments, and the simplest one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import numpy as np
import numpy.typing as npt

from datatrove_ckpt.common import JsonObject

Payload = JsonObject
"""The JSON body of one request."""
FIELDS = ("text", "id", "media")
"""A document's fields besides its metadata."""

if TYPE_CHECKING:  # datatrove has no types

    class Document(Protocol):
        """What a rollout receives: datatrove's Document."""

        __dataclass_fields__: ClassVar[dict[str, Any]]
        text: str
        id: str
        media: list[object]
        metadata: JsonObject

    class InferenceResult(Protocol):
        """What ``generate`` returns: datatrove's InferenceResult, and what else the server gave.

        Attributes:
            usage: numbers of tokens, as the server says.
            tool_calls, logprobs: of the first choice, as the server sent them.
            choices: all of ``n``, each with text, finish_reason, reasoning, tool_calls and
                logprobs, and with its refusal if it is one; empty for one choice that is none.
            answer: of a path that is no completion, the whole JSON answer without its id and time;
                else None.
            response_id, model: as the server sent them. They are not in the output: two runs never
                have the same.
            endpoint: the endpoint that answered, if the config has ``endpoints``; else "".
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
        label: the most probable one.
        score: its probability; of a model with one class, such as a grade, the model's number.
        scores: the same of each label.
    """

    label: str
    score: float
    scores: dict[str, float]


class CallFailed(Exception):
    """A call of ``generate.once`` that has failed, now or in an earlier attempt.

    ``kind``: the name of the error's class.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Generate(Protocol):
    """The second argument of a rollout: sends one request.

    Its methods ask for what is no text. A server_type that lacks one stops the task with a
    ConfigError. Each raises as the call itself does, and its answer is cached and retried like one
    of the call. ``params`` are further keys of the payload, such as ``dimensions``;
    default_generation_params are for completions.
    """

    async def __call__(
        self, payload: Payload, *, path: str | None = None, whole: bool = False
    ) -> InferenceResult:
        """Returns the answer to the payload, to which the model and ``default_generation_params``
        are added.

        ``extra_body``, ``extra_headers`` and ``extra_query`` become what the OpenAI client makes of
        them. Header fields do not count for the cache: an access token may change.

        ``path``: another one of the server, such as "/v1/embeddings" or "/tokenize"; "/v1/..." is
        below the API's URL, any other one below the server's. An answer that is no completion is a
        JSON object, in ``answer``, and has no text; no defaults are added to its payload. A payload
        has another answer for each path.

        ``whole``: a payload's own model stays, and ``answer`` is all that the server sent, with id
        and time.

        To be awaited before the rollout returns: a later answer is not counted, and may be lost.

        Raises:
            datatrove's InferenceError: this request cannot be answered.
            datatrove's ServerError: no request can be answered; the task stops, whatever the
            rollout does.
        """

    def __getattr__(self, name: str, /) -> Generate:
        """``generate.judge``: the same for the model of that name, where ``config`` names
        several.
        """

    async def embed(self, texts: str | Sequence[str], /, **params: object) -> Floats:
        """Returns a vector of each text, as an array of the shape (texts, dimensions); of one text
        (dimensions,).

        Each text is a request of its own, or shares one with others: see
        ``InferenceConfig.texts_per_request``.
        """

    async def classify(
        self, text: str, /, labels: Sequence[str] | None = None, **params: object
    ) -> Classification:
        """Returns the class of a text. ``labels``: names of the model's classes in its order
        (``id2label``).

        vLLM and SGLang name the most probable one only. So without ``labels`` the keys of
        ``scores`` are "0", "1", ...; of a model whose classes have no names, "LABEL_0", "LABEL_1",
        ....
        """

    async def score(self, query: str, texts: Sequence[str], /) -> Floats:
        """Returns how well each text fits the query, as a cross-encoder or reranker says: an array
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
        """Calls ``function(*args, **kwargs)``, a coroutine function or a plain one, which runs in a
        thread. Its result is saved like an answer, and is not asked for again after a kill; but a
        call that was in flight is made again.

        Args:
            name: of the call. Name, arguments and the rollout's code tell calls apart; equal ones
                of a rollout, their order.
            args, kwargs: JSON values.
            time_limit: in seconds. A thread cannot be stopped: its result is thrown away.
            keep_errors: these errors of the function are saved, too, and raised as ``CallFailed``.

        Returns:
            The result as JSON has it: a tuple comes back as a list. At most 100 MB.

        Raises:
            CallFailed: an error that is kept.
            TimeoutError: the call took too long.
            DocumentNotSerializable: the result is too large, or no JSON.
        """

    def url(self) -> AbstractAsyncContextManager[str]:
        """Serves an OpenAI-compatible address, for agents that take a ``base_url``; any key will
        do. What is asked there (chat, completions, other paths) is a request of this document for
        the model of the run. Streams are replayed from whole answers.

        An agent that blocks belongs into a thread (``asyncio.to_thread``). One that puts the time
        into its prompts asks, and pays, again after a kill.
        """


Rollout = Callable[..., Awaitable[object]]
"""``async def rollout(document, generate, **shared)``.

It returns an InferenceResult, JSON values or None.
"""


# Never change the source of this function: it is part of the identity of runs.
async def chat(document: Document, generate: Generate, **shared: Any) -> InferenceResult:
    """Returns the document's text as one user message."""
    return await generate({"messages": [{"role": "user", "content": document.text}]})


async def generate_all(generate: Generate, payloads: Sequence[Payload]) -> list[InferenceResult]:
    """Returns all answers. If a request fails, waits for the others: the request cache keeps their
    answers for a retry.
    """
    results = await asyncio.gather(
        *(generate(payload) for payload in payloads), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[InferenceResult]", results)


def chat_payload(system_prompt: str | None, content: str, params: Payload | None) -> Payload:
    messages = [{"role": "user", "content": content}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return {"messages": messages} | (params or {})
