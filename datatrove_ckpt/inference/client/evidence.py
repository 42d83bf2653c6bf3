"""Keeps what a server has answered, which shows whose fault a failure is.

A server works if it answers a request of the same kind, by API and model, that was sent after the
failure. Where no such answer comes, ``CompletionClient`` sends a probe: the shortest request of the
kind that this server has answered, or, if it has answered none, the failed request with one word in
place of each text.
"""

import asyncio
import math
from collections import defaultdict
from dataclasses import dataclass, field

import orjson

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.inference.client.body import AnyBody
from datatrove_ckpt.inference.client.responses import Api

PROBE_INTERVAL = 60.0
"""Seconds between the probes of a server, at least."""

# The fields of all APIs that hold a document's text.
_TEXTS = frozenset({"content", "text", "prompt", "input", "query", "documents", "text_1", "text_2"})
_WORD = "JSON"  # OpenAI rejects a request for JSON that lacks this word


@dataclass(eq=False)
class AnsweredRequests:
    """The requests of one kind that a server has answered.

    Attributes:
        probed_at: time at which the last answered probe was sent.
        refusal: refusal of the last probe; None once a request was answered after it.
    """

    number: int = 0
    sent_at: float = -math.inf
    probed_at: float = -math.inf
    shortest: AnyBody = b""
    api: Api | None = None
    refusal: ServerRefused | None = None

    def add(self, body: AnyBody, api: Api, sent_at: float) -> None:
        self.number += 1
        self.refusal = None
        if sent_at > self.sent_at:
            self.sent_at = sent_at
        if self.api is None or len(body) < len(self.shortest):
            self.shortest = body
            self.api = api


@dataclass(eq=False)
class Evidence:
    """What one server has answered.

    Attributes:
        deciding: held by the rejected request that waits for an answer or a probe.
        probe_at: time from which a probe may be sent; inf while one is in flight.
    """

    deciding: asyncio.Lock = field(default_factory=asyncio.Lock)
    probe_at: float = -math.inf
    _kinds: defaultdict[tuple[str, str], AnsweredRequests] = field(
        default_factory=lambda: defaultdict(AnsweredRequests)
    )

    def of(self, api: Api) -> AnsweredRequests:
        return self._kinds[api.path, api.model]


def with_one_word(body: AnyBody) -> bytes:
    payload: JsonObject = orjson.loads(body if isinstance(body, bytes) else b"".join(body))
    return orjson.dumps(_with_one_word(payload, ""))


def _with_one_word(value: object, name: str) -> object:
    if isinstance(value, dict):
        return {key: _with_one_word(member, key) for key, member in value.items()}
    if isinstance(value, list) and name == "content":  # a picture may be at fault
        return _WORD
    if isinstance(value, list) and name in _TEXTS and value and type(value[0]) is int:  # tokens
        return _WORD
    if isinstance(value, list):
        return [_with_one_word(member, name) for member in value]
    if isinstance(value, str) and name in _TEXTS:
        return _WORD
    return value
