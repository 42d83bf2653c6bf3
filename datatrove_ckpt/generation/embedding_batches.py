"""Lets texts of several documents share embedding requests (``texts_per_request``).

Each text has its own cache key, row, counters and errors, as if it were alone.

    what happens to a shared request                          then
    it is full, or 5 ms old                                   it is sent
    answered                                                  each text has its vector, by index,
                                                              and its share of the tokens: the sum
                                                              is the request's
    rejected (HTTP 400, 413, 422), or fails while others      its halves are sent, until the text at
    are answered                                              fault is alone
    in flight at several deaths of its server                 its texts are sent alone, in
                                                              quarantine
    no request can be answered                                each text has the error, and the first
                                                              stops the rank
    a document is cancelled                                   its text leaves; a request without
                                                              texts is cancelled
"""

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import orjson

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.config.generation_params import PAYLOAD_JSON
from datatrove_ckpt.errors import RequestFailed, RequestRejected
from datatrove_ckpt.inference.client.client import CompletionClient
from datatrove_ckpt.inference.client.responses import Api, Completion, parse_embeddings
from datatrove_ckpt.inference.client.routing import MustDivide, Request
from datatrove_ckpt.output.document_codec import trim
from datatrove_ckpt.rollouts import Payload

_LONGEST = 0.005  # seconds that a text waits for others


@dataclass(eq=False)
class _Text:
    text: str
    order: int
    answer: asyncio.Future[Completion]

    def give(self, answer: Completion | Exception) -> None:
        if self.answer.done():  # cancelled
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


@dataclass(eq=False)
class _TextBatch:
    """The texts of one shared request. ``payload``: without its input."""

    client: CompletionClient
    payload: JsonObject
    api: Api
    texts: list[_Text]
    waiting: int = 0
    task: asyncio.Task[None] | None = None


class EmbeddingBatches:
    def __init__(self, max_texts: int) -> None:
        self._max_texts = max_texts
        self._filling: dict[bytes, _TextBatch] = {}

    async def complete(
        self, client: CompletionClient, payload: Payload, api: Api, order: int
    ) -> Completion:
        """Returns the answer to one text, with the errors of ``CompletionClient.complete``."""
        loop = asyncio.get_running_loop()
        key = orjson.dumps([api.path, {**payload, "input": None}, api.extras], option=PAYLOAD_JSON)
        # A copy of the rest: the rollout may change its payload.
        if (batch := self._filling.get(key)) is None:
            batch = self._filling[key] = _TextBatch(client, orjson.loads(key)[1], api, [])
            loop.call_later(_LONGEST, self._send, key, batch)
        text = _Text(payload["input"], order, loop.create_future())
        batch.texts.append(text)
        batch.waiting += 1
        if len(batch.texts) >= self._max_texts:
            self._send(key, batch)
        try:
            return await text.answer
        finally:
            batch.waiting -= 1
            if not batch.waiting and batch.task is not None:
                batch.task.cancel()

    def _send(self, key: bytes, batch: _TextBatch) -> None:
        if self._filling.get(key) is not batch:  # it was full before
            return
        del self._filling[key]
        if batch.waiting:
            request = Request(batch.client.sender, order=batch.texts[0].order)
            batch.task = asyncio.get_running_loop().create_task(_run(batch, batch.texts, request))


async def _run(batch: _TextBatch, texts: list[_Text], request: Request) -> None:
    texts = [text for text in texts if not text.answer.done()]
    if not texts:
        return
    request.is_shared = len(texts) > 1
    api = replace(batch.api, parse=partial(parse_embeddings, count=len(texts)))
    inputs: str | list[str] = texts[0].text
    if request.is_shared:
        inputs = [text.text for text in texts]
    request.body = trim(orjson.dumps({**batch.payload, "input": inputs}))
    try:
        completion = await batch.client.complete(request.body, api, request)
    except (RequestRejected, RequestFailed, MustDivide) as error:
        if request.is_shared:
            await asyncio.gather(
                *(_run(batch, part, each) for part, each in _parts(texts, request))
            )
        else:
            texts[0].give(error)
    except Exception as error:
        for text in texts:
            text.give(error)
    else:
        for text, answer in zip(texts, _shares(completion, texts), strict=True):
            text.give(answer)


def _parts(texts: list[_Text], request: Request) -> list[tuple[list[_Text], Request]]:
    if request.is_quarantined:  # the next death must show whose fault it is
        return [([text], request.copy()) for text in texts]
    middle = len(texts) // 2
    halves = (texts[:middle], texts[middle:])
    return [(half, Request(request.sender, order=request.order)) for half in halves]


def _shares(completion: Completion, texts: list[_Text]) -> list[Completion]:
    assert completion.answer is not None
    ends = list(accumulate((len(text.text) or 1 for text in texts), initial=0))
    usages: list[JsonObject] = [{} for _ in texts]
    for name, value in completion.usage.items():
        if type(value) is int:
            shares = [value * end // ends[-1] for end in ends]
            for usage, (start, end) in zip(usages, pairwise(shares), strict=True):
                usage[name] = end - start
    return [
        replace(completion, usage=usage, answer={"embeddings": [vector]})
        for usage, vector in zip(usages, completion.answer["embeddings"], strict=True)
    ]
