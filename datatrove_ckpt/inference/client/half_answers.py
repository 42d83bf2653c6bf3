"""Continues half-written answers with their next token.

vLLM has three paths for it. ``/v1/chat/completions/render`` turns a request into the ids of its
prompt and sampling parameters, ``/inference/v1/generate`` continues any ids, and
``/v1/chat/completions/derender`` turns all ids of an answer into the message. A request takes these
three steps at each attempt; the ids that earlier attempts got are continued.

    render -> compare with the saved pieces -> generate (a stream of pieces, each saved) -> derender

A piece belongs to what is before it: it has the hash of the piece before, the first piece that of
the prompt's ids, the sampling parameters and the engine's version. Pieces that do not fit are not
used, and overwritten. The last piece has the end of the answer.

Only requests whose next token depends on the ids before it, and on nothing else, are continued: no
seed, stop texts, grammars, penalties that count the answer alone, several choices or logprobs. The
names of fields are listed that are fine, so an unknown field is sent as usual.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import orjson
import xxhash

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.counts import USUAL, WorkCounts
from datatrove_ckpt.inference.client.body import LARGE_ANSWER_BYTES
from datatrove_ckpt.inference.client.responses import (
    RetryableError,
    UnexpectedResponse,
    read_json,
    unfinished,
)

GENERATE = "/inference/v1/generate"
STREAM_INTERVAL = 64
"""Tokens of a piece: a kill loses at most as many of each answer."""
_LONG = 2048  # tokens of ``max_tokens``: shorter answers lose little
_LONG_MEAN = 1000
_LIMITS = ("max_completion_tokens", "max_tokens")
_PAYLOAD = frozenset(
    """
    add_generation_prompt chat_template_kwargs ignore_eos include_reasoning logit_bias
    max_completion_tokens max_tokens messages metadata min_p min_tokens model prompt
    reasoning_effort repetition_penalty stop_token_ids temperature tools top_k top_p user
    """.split()  # noqa: SIM905
)
# Also of the server's own defaults. ``output_kind`` and the next are not about the answer.
_PARAMS = frozenset(
    """
    ignore_eos logit_bias max_tokens min_p min_tokens output_kind repetition_penalty skip_clone
    skip_special_tokens spaces_between_special_tokens stop_token_ids temperature top_k top_p
    """.split()  # noqa: SIM905
)
_ZERO = frozenset({"frequency_penalty", "presence_penalty"})


class CannotContinue(Exception):
    """Reports an answer that must be requested as usual."""


@dataclass(frozen=True)
class Continuation:
    """A server that continues answers.

    Attributes:
        version: version of the engine, and its model.
        usage: the names of a whole answer's usage, which every answer gets, in their order.
    """

    version: str
    usage: tuple[str, ...]


class PieceStore(Protocol):
    """The saved pieces of one answer, by the number of their first token. A dict has this form."""

    def get(self, number: int, /) -> bytes | None: ...

    def __setitem__(self, number: int, piece: bytes, /) -> None: ...


def may_continue(payload: JsonObject) -> bool:
    prompt = payload.get("prompt", "")
    if not isinstance(prompt, str) or payload.get("tool_choice") not in (None, "auto", "none"):
        return False
    messages = payload.get("messages", [])
    if not isinstance(messages, list) or not all(map(_is_text, messages)):
        return False
    return all(
        name in _PAYLOAD or value is None or name == "tool_choice" or (name in _ZERO and not value)
        for name, value in payload.items()
    )


def _is_text(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def is_long(payload: JsonObject, mean: float) -> bool:
    """Returns whether an answer may be long. ``mean``: tokens of the answers so far."""
    limits = [payload[name] for name in _LIMITS if payload.get(name) is not None]
    if limits:
        return isinstance(limits[0], int) and limits[0] >= _LONG
    return mean > _LONG_MEAN


class HalfAnswer:
    """One answer, over all its attempts. It is a ``Stream`` of its next ids.

    Attributes:
        is_refused: whether a server could not continue it, so that it is requested as usual.
        end: finish_reason and stop_reason; None: there is no end yet.
    """

    def __init__(self, pieces: PieceStore, work: WorkCounts) -> None:
        self.is_refused = False
        self.has_grown = False
        self.end: list[object] | None = None
        self._pieces = pieces
        self._work = work
        self.prompt: list[int] = []
        self._first = ""  # hash of what the first piece belongs to
        self._last = ""  # hash of what the next piece belongs to
        self._number = 0
        self._limit = 0
        self._counted = 0  # tokens of the last attempt that were continued
        self._id = ""
        self._rest = b""

    def continued(self, rendered: bytes, version: str) -> bytes | None:
        """Returns the request for the next ids; None if the answer has ended.

        Raises:
            CannotContinue: the next token depends on more than the ids before it.
            UnexpectedResponse: the answer has another form.
        """
        try:
            fields = orjson.loads(rendered)
            if isinstance(fields, list):  # of completions
                (fields,) = fields
            prompt = [*fields["token_ids"]]
            params = fields["sampling_params"]
            self._limit = limit = int(params["max_tokens"])
            media = fields["features"]
            self._id = fields["request_id"]
        except (ValueError, TypeError, KeyError) as error:
            raise UnexpectedResponse(f"a rendered request has another form: {error!r}") from None
        unfit = [name for name, value in params.items() if value and name not in _PARAMS]
        if unfit or media:
            raise CannotContinue(f"the rendered request has {', '.join(unfit) or 'media'}")
        self.prompt = prompt
        self._first = _digest([version, prompt, params])
        ids = self._read()
        self._rest = b""
        if self.end is None and len(ids) >= limit:
            self.end = ["length", None]
        if len(ids) > self._counted:
            self._counted = len(ids)
            self._work.continued += 1
            self._work.continued_tokens += len(ids)
        if self.end is not None:
            return None
        changed = {**params, "max_tokens": limit - len(ids), "stream_interval": STREAM_INTERVAL}
        if params.get("min_tokens"):
            changed["min_tokens"] = max(0, params["min_tokens"] - len(ids))
        if ids and params.get("temperature") != 0:
            # A restarted engine begins its random numbers anew: those that chose the first ids.
            changed["seed"] = int(self._last, 16) >> 33
        fields |= {"token_ids": prompt + ids, "sampling_params": changed, "stream": True}
        return orjson.dumps(fields)

    def feed(self, data: bytes) -> bool:
        """Takes bytes of the stream, and saves the pieces in it. Returns whether ids have come.

        Raises:
            RetryableError: the server reports an error, or has given the answer up.
            UnexpectedResponse: the stream has another form.
        """
        before = self._number
        # Gateways add lines of their own, also to an event.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            value = value.strip()
            if name == b"data" and value not in (b"", b"[DONE]"):
                self._take(value)
        if len(self._rest) > LARGE_ANSWER_BYTES:
            raise UnexpectedResponse("a stream of ids has a line without an end")
        return self._number > before

    def _take(self, event: bytes) -> None:
        fields = read_json(event)
        try:
            choices = fields["choices"]  # type: ignore[index]  # see below
            for choice in choices:
                self._keep(choice["token_ids"] or [], choice.get("finish_reason"), choice)
        except (TypeError, KeyError, AttributeError) as error:
            raise UnexpectedResponse(f"a stream of ids has another form: {error!r}") from None

    def _keep(self, ids: list[int], reason: str | None, choice: Mapping[str, object]) -> None:
        if self.end is not None or not all(type(number) is int for number in ids):
            raise UnexpectedResponse("a stream of ids has other values, or ids after its end")
        if self._number + len(ids) > self._limit:
            raise UnexpectedResponse("a stream has more ids than max_tokens")
        is_end = reason in USUAL
        end = [reason, choice.get("stop_reason")] if is_end else None
        if ids or is_end:
            piece = b"%b" % orjson.dumps({"half": ids, "after": self._last, "end": end})
            self._pieces[self._number] = piece
            self._number += len(ids)
            self._last = xxhash.xxh3_64_hexdigest(piece)
            self.end = end
            self.has_grown = True
        if reason is not None and not is_end:
            raise unfinished(reason)

    def _read(self) -> list[int]:
        ids: list[int] = []
        self.end = None
        self._last = self._first
        while self.end is None and (piece := self._pieces.get(len(ids))) is not None:
            fields = orjson.loads(piece)
            if fields["after"] != self._last:
                break
            ids += fields["half"]
            self.end = fields["end"]
            self._last = xxhash.xxh3_64_hexdigest(piece)
        self._number = len(ids)
        return ids

    def derender(self, payload: JsonObject) -> bytes:
        if self.end is None:
            raise RetryableError("the stream ended before the answer")
        reason, stop_reason = self.end
        ids = self._read()
        # The token that ends an answer is not shown; ``derender`` shows it.
        shown = ids[:-1] if reason == "stop" else ids
        if not shown:
            raise CannotContinue("the answer has no text")
        choice = {
            "index": 0,
            "token_ids": shown,
            "finish_reason": reason,
            "stop_reason": stop_reason,
        }
        generated = {"request_id": self._id, "choices": [choice], "prompt_token_ids": self.prompt}
        number = len(self.prompt)
        fields: JsonObject = {"model": payload.get("model")}
        if "messages" in payload:
            fields |= {
                "generate_response": generated,
                "prompt_tokens": number,
                "prompt_token_ids": self.prompt,
                "chat_request": payload,
            }
        else:
            fields |= {
                "generate_responses": [generated],
                "prompt_tokens": [number],
                "prompt_token_ids": [self.prompt],
                "completion_request": payload,
            }
        return orjson.dumps(fields)

    def answer(self, derendered: bytes, usage: tuple[str, ...]) -> bytes:
        prompt = len(self.prompt)
        counts = {
            "prompt_tokens": prompt,
            "completion_tokens": self._number,
            "total_tokens": prompt + self._number,
        }
        try:
            answer = orjson.loads(derendered)
            answer["usage"] = {name: counts.get(name) for name in usage}
            (choice,) = answer["choices"]
            if (choice.get("message") or {}).get("tool_calls"):
                choice["finish_reason"] = "tool_calls"
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnexpectedResponse(f"a derendered answer has another form: {error!r}") from None
        return orjson.dumps(answer)


def _digest(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))
