"""Parses completions, as datatrove parses them.

A dying server answers 200 with half a text, so an unfinished completion raises ``RetryableError``.

Embeddings, classes and scores are parsed in the forms of all engines.

    API       OpenAI, vLLM                  SGLang                     llama.cpp
    embed     data[] index, embedding       the same                   the same
    classify  data[] index, label, probs    the same
    score     data[] index, score           [] index, score (rerank)   results[] index,
                                                                       relevance_score (rerank)

Arrays are saved exactly, as base64 of little-endian float32 values. An answer that lacks a value,
or has NaN or infinity (null in JSON), is retried.
"""

import base64
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from datatrove_ckpt.common import JsonObject, retrying
from datatrove_ckpt.common.counts import ENDINGS, Tokens
from datatrove_ckpt.common.redaction import excerpt
from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.inference.client.urls import Extras

_FAILURE = re.compile(
    r"error|fail|abort|cancel|timeout|timed_out|resource|unavailable|not_finished|load|incomplete"
    r"|in_progress|interrupt|exception|shutdown|kill|preempt|disconnect|^\s*(?:none|null|unknown)\s*$",
    re.IGNORECASE,
)
_REASON = (str, type(None))
# All fields of a choice that has no answer: thinking took all tokens, or a filter removed it.
_NO_ANSWER = frozenset(
    """
    content_filter_results finish_reason index logprobs message native_finish_reason stop_reason
    text token_ids
    """.split()  # noqa: SIM905
)
_CHOICE = ("text", "finish_reason", "reasoning", "tool_calls", "logprobs")
_TEXTS = ("text", "output_text")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
_MEDIA = re.compile("image|audio|video|file")
_Text = str | list[object]
_Read = Callable[[JsonObject], tuple[_Text, object, object, object]]
"""Text, reasoning, tool calls and refusal of a choice."""
_SHOWN = 200  # characters

_ASKS = frozenset({"n", "logprobs", "tool_choice"})  # fields that an answer must follow


@dataclass(slots=True)
class Completion:
    """One answer.

    Attributes:
        text: text; or the server's list, if the content has pictures or other media.
        finish_reason: None or empty may mean that the server cut the answer off.
        usage: the server's token counts; values that are no counts are removed.
        choices: all ``n`` choices; empty for a single choice without a refusal.
        answer: JSON values except id and time, if the request is no completion.
    """

    text: _Text
    finish_reason: str | None
    usage: JsonObject
    reasoning: str = ""
    tool_calls: list[object] = field(default_factory=list)
    logprobs: JsonObject | None = None
    choices: list[JsonObject] = field(default_factory=list)
    refusal: str = ""
    response_id: str = ""
    model: str = ""
    service_tier: str = ""
    answer: JsonObject | None = None
    seconds: float = field(default=0.0, compare=False)
    endpoint: str = ""


@dataclass(eq=False, repr=False)
class RetryableError(Exception):
    """Reports a failed attempt; another attempt may succeed.

    Attributes:
        retry_after: seconds of ``retrying.retry_after``.
        unreachable: whether there was no complete HTTP answer.
        unsent: whether there was no connection, so that the request was not sent.
        status: HTTP status; 0 if there was none, or if it was 2xx.
        refusal: error to raise if the server also refuses other requests.
        quoted: part of the answer, which may hold secrets.
    """

    cause: str
    _: KW_ONLY
    retry_after: float | None = None
    unreachable: bool = False
    unsent: bool = False
    status: int = 0
    timed_out: bool = False
    refusal: ServerRefused | None = None
    quoted: str = ""

    def __str__(self) -> str:
        return self.cause

    def quote(self) -> None:
        if self.quoted:
            # Secrets are hidden before escapes could change them.
            self.cause += f": {excerpt(self.quoted, 8 * _SHOWN)!r}"[: _SHOWN + 2]
            self.quoted = ""

    @property
    def kind(self) -> str:
        if self.status:
            return f"HTTP {self.status}"
        if self.timed_out:
            return "timeout"
        if self.unreachable:
            return "connection"
        return "bad answer"

    @property
    def server_is_well(self) -> bool:
        return 400 <= self.status < 500

    @property
    def server_is_limited(self) -> bool:
        return self.status in retrying.SERVER.limited


class UnexpectedResponse(RetryableError):
    """A 200 lacks the form of its API. After ``seconds`` of such answers the server is refused."""

    seconds = 0.0


class NoFinishReason(UnexpectedResponse):
    """The finish_reason is missing: the server may be stopping."""

    seconds = 60.0  # Slurm kills after 30


@dataclass(frozen=True, slots=True)
class Api:
    """A kind of request.

    Attributes:
        path: path below the API's URL ("chat/completions"), or with a leading slash below the
            server's URL ("/tokenize").
        name: separates equal payloads of different APIs.
        is_shared: whether a request may have texts of several payloads, as a list in ``input``.
        tiers: values of ``service_tier``; the next is used if the server has no room for long.
        lacks_model: whether the body has no model, because each endpoint has its own name for it.
    """

    path: str
    parse: Callable[[bytes], Completion]
    name: str
    is_shared: bool = False
    extras: Extras | None = None
    tiers: Sequence[str] = ()
    lacks_model: bool = False
    model: str = ""
    generates: bool = False


def api_for_path(path: str) -> Api:
    if not path.startswith("/"):
        raise ValueError(
            f"path: {path!r} must begin with a slash, such as /v1/embeddings or /tokenize"
        )
    below = path.removeprefix("/v1/").rstrip("/")
    return next(
        (api for api in (CHAT, COMPLETIONS) if api.path == below), Api(below, parse_other, below)
    )


def with_raw_response(api: Api) -> Api:

    def parse(raw: bytes) -> Completion:
        completion = api.parse(raw)
        completion.answer = _answer(raw)
        return completion

    return replace(api, parse=parse, name=f"{api.name} whole")


def parse_other(raw: bytes) -> Completion:
    answer = _answer(raw)
    status = answer.get("status")
    failed = status in ("cancelled", "failed", "in_progress", "queued")
    if failed and answer.get("object") == "response":
        raise RetryableError(f"the answer's status is {status!r}")
    # In the output, id and time would make equal runs differ.
    return other_than_text(
        answer, {name: value for name, value in answer.items() if name not in ("id", "created")}
    )


def listed_models(body: bytes) -> dict[str, object] | None:
    """Returns the names in an answer to GET /v1/models, each with its ``max_model_len`` or None;
    None without a list, as with some gateways.
    """
    try:
        data = orjson.loads(memoryview(body))["data"]
        lengths = {
            str(model["id"]): model.get("max_model_len")
            for model in data
            if isinstance(model, dict) and "id" in model
        }
        if isinstance(data, list):
            return lengths
        return None
    except (ValueError, TypeError, KeyError):
        return None


def unlisted(url: object, model: str, models: Iterable[str]) -> str:
    listed = ", ".join([*models][:5]) or "none"
    return f"{url} does not list the model {model!r}; it lists {listed}."


def other_than_text(answer: JsonObject, values: JsonObject) -> Completion:
    completion = Completion("", "stop", _clean_usage(answer.get("usage")), answer=values)
    _name(completion, answer)
    return completion


def _read_message(choice: JsonObject) -> tuple[_Text, object, object, object]:
    message = choice.get("message")
    if message is None and _has_no_answer(choice):
        message = {}
    if not isinstance(message, dict):
        raise UnexpectedResponse("the answer's choice has no message")
    content = message.get("content")
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    if not calls and isinstance(legacy, dict):
        calls = [{"id": f"call_{legacy.get('name')}", "type": "function", "function": legacy}]
    reasoning = _joined(reasoning) if reasoning else _thoughts(content)
    return _joined(content), reasoning, calls, message.get("refusal")


def _has_no_answer(choice: JsonObject) -> bool:
    texts = choice.get("message"), choice.get("text")
    is_ended = isinstance(choice.get("finish_reason"), str)
    return is_ended and texts == (None, None) and _NO_ANSWER.issuperset(choice)


def _read_text(choice: JsonObject) -> tuple[_Text, object, object, object]:
    if "text" not in choice and not _has_no_answer(choice):
        raise UnexpectedResponse("the answer's choice has no text")
    logprobs = choice.get("logprobs")
    if type(logprobs) is dict and type(logprobs.get("top_logprobs")) is list:
        # As in a chat's answer: a key for each token would become a column of a table.
        choice["logprobs"] = {
            **logprobs,
            "top_logprobs": [_listed(top) for top in logprobs["top_logprobs"]],
        }
    return _joined(choice.get("text")), "", None, None


def _listed(top: object) -> object:
    if isinstance(top, dict):
        return [{"token": token, "logprob": value} for token, value in top.items()]
    return top


def api_for_payload(api: Api, payload: JsonObject) -> Api:
    if _ASKS.isdisjoint(payload):
        return api
    number = payload.get("n")
    logprobs = payload.get("logprobs")
    tool_choice = payload.get("tool_choice")
    several = isinstance(number, int) and number > 1
    must_call = tool_choice not in (None, "auto", "none")

    def parse(raw: bytes) -> Completion:
        completion = api.parse(raw)
        choices = completion.choices or [_as_choice(completion)]
        if several:
            choice_count = len(choices)
            if choice_count == 1:
                raise ServerRefused(
                    f"The payload requests n={number} choices, but the answer has one: the server "
                    "ignores n."
                )
            if choice_count != number:
                raise RetryableError(f"the answer has {choice_count} of {number} choices")
        for choice in choices:
            if logprobs and choice["text"] and not any((choice["logprobs"] or {}).values()):
                raise RetryableError("the payload requests logprobs, but the answer has none")
            if (
                must_call
                and choice["finish_reason"] == "stop"
                and not (choice["tool_calls"] or choice["text"])
            ):
                raise RetryableError(
                    f"the payload has the tool_choice {tool_choice!r}, and the answer no tool_calls"
                )
        return completion

    return replace(api, parse=parse)


def _completion(raw: bytes, read: _Read) -> Completion:
    answer = _answer(raw)
    choices = answer.get("choices")
    usage = _clean_usage(answer.get("usage"))
    if not isinstance(choices, list) or not choices or type(choices[0]) is not dict:
        raise UnexpectedResponse("the answer has no choices")
    if len(choices) == 1:
        completion = _choice(choices[0], usage, read)
        if completion.refusal:
            completion.choices = [_as_choice(completion)]
    else:
        if not all(
            isinstance(choice, dict) and type(choice.get("index")) is int for choice in choices
        ):
            raise UnexpectedResponse("a choice of the answer is null, or has no index")
        in_order = sorted(choices, key=itemgetter("index"))
        if [choice["index"] for choice in in_order] != [*range(len(choices))]:
            raise RetryableError("the answer's choices are not numbered 0, 1, 2, ...")
        all_read = [_choice(choice, usage, read) for choice in in_order]
        completion = all_read[0]
        completion.choices = list(map(_as_choice, all_read))
        if not all(each.finish_reason for each in all_read):
            completion.finish_reason = None
    _name(completion, answer)
    return completion


_CHAT = "chat/completions"
CHAT = Api(_CHAT, partial(_completion, read=_read_message), _CHAT, generates=True)
_TEXT = "completions"
COMPLETIONS = Api(_TEXT, partial(_completion, read=_read_text), _TEXT, generates=True)


def _as_choice(completion: Completion) -> JsonObject:
    choice = {name: getattr(completion, name) for name in _CHOICE}
    if completion.refusal:
        choice["refusal"] = completion.refusal
    return choice


def _name(completion: Completion, answer: JsonObject) -> None:
    response_id = answer.get("id")
    model = answer.get("model")
    tier = answer.get("service_tier")
    if type(response_id) is str:
        completion.response_id = response_id
    if type(model) is str:
        completion.model = model
    if type(tier) is str:
        completion.service_tier = tier[:_SHOWN]


def _choice(choice: JsonObject, usage: JsonObject, read: _Read) -> Completion:
    if choice.get("error"):
        _refuse_error("the answer's choice", choice["error"])
    text, reasoning, tool_calls, refusal = read(choice)
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and reason not in ENDINGS and _FAILURE.search(reason):
        raise unfinished(reason)
    if not (isinstance(reason, _REASON) and isinstance(reasoning, str)):
        raise UnexpectedResponse("the answer's reasoning or finish_reason is not a string")
    if not reason and not text and not usage:
        raise unfinished(reason)
    calls = []
    if tool_calls:
        if not (isinstance(tool_calls, list) and all(map(_is_call, tool_calls))):
            raise RetryableError("the answer's tool_calls are no list of named calls")
        calls = tool_calls
    if reason == "tool_calls" and not calls and not text:
        raise RetryableError("the answer has the finish_reason 'tool_calls' and no tool_calls")
    completion = Completion(text, reason, usage, reasoning, calls)
    logprobs = choice.get("logprobs")
    if type(logprobs) is dict:
        completion.logprobs = logprobs
    if type(refusal) is str:
        completion.refusal = refusal
    return completion


def _is_call(call: object) -> bool:
    """Returns whether a call has a name. Converts its arguments to a JSON text, as most servers
    send them.
    """
    if not isinstance(call, dict):
        return False
    function = call.get("function")
    if isinstance(function, dict):
        function["arguments"] = _arguments(function.get("arguments"))
    parts = [part for part in call.values() if isinstance(part, dict)]
    return any(part.get("name") and isinstance(part["name"], str) for part in parts)


def _arguments(arguments: object) -> str:
    if not isinstance(arguments, str):
        return json.dumps(arguments or {}, ensure_ascii=False)
    if arguments.strip() in ("", "null"):
        return "{}"
    return arguments


def unfinished(finish_reason: str | None) -> RetryableError:
    return RetryableError(f"the answer is not finished (finish_reason {finish_reason!r})")


def _joined(content: object) -> _Text:
    """Returns the text of a content without thoughts and references.

    A content with media stays a list. Other values, which a gateway has parsed, become JSON again.
    """
    if isinstance(content, str):
        return content
    if content is None or content == []:
        return ""
    parts = content if isinstance(content, list) else [content]
    kinds = [_kind(part) for part in parts]
    if all(kinds):
        if isinstance(content, list) and any(map(_MEDIA.search, kinds)):
            return content
        if not {*_TEXTS, *_THOUGHTS}.isdisjoint(kinds):
            texts = [part for part, kind in zip(parts, kinds, strict=True) if kind in _TEXTS]
            return "".join(
                part if isinstance(part, str) else part.get("text") or "" for part in texts
            )
    return json.dumps(content, ensure_ascii=False)


def _kind(part: object) -> str:
    if isinstance(part, str):
        return "text"
    if isinstance(part, dict) and isinstance(part.get("text"), str | None):
        kind = part.get("type")
        if part.keys() == {"text"}:
            kind = "text"
        if isinstance(kind, str):
            return kind
    return ""


def _thoughts(content: object) -> str:
    if not isinstance(content, list):
        return ""
    parts = [part for part in content if isinstance(part, dict)]
    texts = [_joined(part.get(part["type"])) for part in parts if part.get("type") in _THOUGHTS]
    return "".join(text for text in texts if isinstance(text, str))


# Higher counts are wrong, and their sums would overflow 64 bits.
_MAX_COUNT = 1 << 40

_SUMS = frozenset({"prompt_tokens", "completion_tokens", "total_tokens"})


_WRITTEN = ("cache_write_tokens", "cache_creation_tokens", "cache_creation_input_tokens")
"""The fields of OpenRouter and OpenAI, LiteLLM, and any-llm, in the details of a usage."""


def token_counts(usage: JsonObject) -> Tokens:
    prompt = usage.get("prompt_tokens")
    completion = usage.get("completion_tokens") or usage.get("output_tokens") or 0
    if _SUMS.issuperset(usage):
        return Tokens(prompt or 0, completion)
    read = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    # Anthropic counts the three apart, and so do gateways that only rename its fields.
    apart = read + written
    if prompt is None:
        prompt = (usage.get("input_tokens") or 0) + apart
    elif apart > prompt or apart == (usage.get("total_tokens") or 0) - prompt - completion:
        prompt += apart
    flat = (read, usage.get("prompt_cache_hit_tokens"), usage.get("cached_tokens"))
    cached = next(filter(None, flat), 0)
    reasoning = 0
    for name, details in usage.items():
        if name.endswith("_details") and isinstance(details, dict):
            cached = details.get("cached_tokens") or cached
            reasoning = details.get("reasoning_tokens") or reasoning
            written = next(filter(None, map(details.get, _WRITTEN)), written)
    cached = min(cached, prompt)
    return Tokens(prompt, completion, cached, min(written, prompt - cached), reasoning)


def _clean_usage(usage: object) -> JsonObject:
    if not isinstance(usage, dict):
        return {}
    for value in usage.values():
        if value is not None and not (type(value) is int and 0 <= value <= _MAX_COUNT):
            break
    else:
        return usage
    cleaned = {}
    for name, value in usage.items():
        if name.endswith("_tokens"):
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if value is not None and not (type(value) is int and 0 <= value <= _MAX_COUNT):
                continue
        cleaned[name] = _clean_usage(value) if isinstance(value, dict) else value
    return cleaned


def _answer(raw: bytes) -> JsonObject:
    answer = read_json(raw)
    if not isinstance(answer, dict):
        raise UnexpectedResponse("the answer is no JSON object")
    return answer


def read_json(raw: bytes) -> object:
    try:
        answer = parse_json(raw)
    except UnicodeDecodeError:
        # Replacement characters would corrupt a text that looks complete.
        raise UnexpectedResponse("the answer is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        kind: type[RetryableError] = UnexpectedResponse
        is_lines = str(error).startswith("Extra data")
        if raw.lstrip()[:1] in (b"", b"{", b"[") and not is_lines:  # perhaps cut off
            kind = RetryableError
        raise kind("the answer is not JSON", quoted=raw.decode(errors="replace")) from None
    if type(answer) is dict and (answer.get("error") or answer.get("object") == "error"):
        _refuse_error("the answer", answer.get("error") or answer.get("message") or "error")
    return answer


def _refuse_error(subject: str, error: object) -> NoReturn:
    raise RetryableError(
        f"{subject} reports an error", quoted=json.dumps(error, ensure_ascii=False)
    )


def parse_json(raw: bytes) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        # Python's parser accepts more: NaN becomes null, a lone surrogate U+FFFD.
        parsed = json.loads(bytes(raw).decode("utf-8-sig"), parse_constant=lambda name: None)
        text = json.dumps(parsed, ensure_ascii=False).encode("utf-16", "surrogatepass")
        return orjson.loads(text.decode("utf-16", "replace"))


Floats = npt.NDArray[np.float32]
_Number = TypeVar("_Number", np.float32, np.float64)
_FLOAT32 = np.dtype("<f4")  # as in base64


def typed_api(name: str, path: str, count: int) -> Api:
    return Api(
        api_for_path(path).path,
        partial(_PARSERS[name], count=count),
        f"{name}()",
        is_shared=name == "embed",
    )


class Base64(str):
    """Keeps the decoded array, because decoding is slow."""

    __slots__ = ("values",)
    values: Floats


def to_base64(values: Floats, text: str | None = None) -> Base64:
    encoded = Base64(
        base64.b64encode(np.ascontiguousarray(values, _FLOAT32).data).decode()
        if text is None
        else text
    )
    encoded.values = values
    return encoded


def from_base64(text: str) -> Floats:
    """Returns a writable copy."""
    if isinstance(text, Base64):
        return text.values.copy()
    return np.frombuffer(bytearray(base64.b64decode(text)), _FLOAT32)


def parse_embeddings(raw: bytes, *, count: int) -> Completion:
    answer, rows = _rows(raw, count)
    vectors = [_vector(row.get("embedding")) for row in rows]
    if len({len(vector) for vector in vectors}) > 1:
        raise RetryableError("the answer's embeddings have different lengths")
    texts = [row["embedding"] if isinstance(row["embedding"], str) else None for row in rows]
    return other_than_text(answer, {"embeddings": list(map(to_base64, vectors, texts))})


def parse_classes(raw: bytes, *, count: int) -> Completion:
    """Returns ``label``, None if the server does not name it, and ``probabilities`` of all classes
    in the model's order.
    """
    answer, (row,) = _rows(raw, count)
    label = row.get("label")
    if not (label is None or isinstance(label, str)):
        raise RetryableError("the answer's label is no text")
    # Exact: a threshold may be equal.
    probabilities = _numbers(row.get("probs"), "probs", np.float64).tolist()
    return other_than_text(answer, {"label": label, "probabilities": probabilities})


def parse_scores(raw: bytes, *, count: int) -> Completion:
    answer, rows = _rows(raw, count)
    scores = [row.get("relevance_score", row.get("score")) for row in rows]
    return other_than_text(answer, {"scores": to_base64(_numbers(scores, "scores", np.float32))})


_PARSERS: dict[str, Callable[..., Completion]] = {
    "embed": parse_embeddings,
    "classify": parse_classes,
    "score": parse_scores,
}


def _rows(raw: bytes, count: int) -> tuple[JsonObject, list[JsonObject]]:
    """Returns the answer and its ``count`` rows in the order of their indices.

    Without an index, the rows of ``data`` are in order. Other rows, if there are several, are a
    ranking.
    """
    answer, rows = _read(raw)
    indices = list(range(len(rows)))
    in_order = count == 1 or rows is answer.get("data")
    if not in_order or any("index" in row for row in rows):
        indices = [row.get("index", "missing") for row in rows]
    if not all(type(index) is int for index in indices) or sorted(indices) != list(range(count)):
        raise RetryableError(
            f"the answer has {len(rows)} rows with the indices {indices[:9]}, not one for each text"
        )
    return answer, [
        row for _, row in sorted(zip(indices, rows, strict=True), key=lambda pair: pair[0])
    ]


def _read(raw: bytes) -> tuple[JsonObject, list[JsonObject]]:
    parsed = read_json(raw)
    answer: JsonObject = {}
    if isinstance(parsed, list):
        answer = {"results": parsed, "usage": {"prompt_tokens": sum(map(_prompt_tokens, parsed))}}
    elif isinstance(parsed, dict):
        answer = parsed
    rows = next(
        (answer[name] for name in ("data", "results") if isinstance(answer.get(name), list)), None
    )
    if rows is None or not all(isinstance(row, dict) for row in rows):
        raise UnexpectedResponse("the answer has no data")
    return answer, rows


def _prompt_tokens(row: object) -> int:
    meta = row.get("meta_info") if isinstance(row, dict) else None
    tokens = meta.get("prompt_tokens") if isinstance(meta, dict) else 0
    if type(tokens) is int:
        return tokens
    return 0


def _vector(value: object) -> Floats:
    if not isinstance(value, str):
        return _numbers(value, "embedding", np.float32)
    try:
        vector = np.frombuffer(base64.b64decode(value, validate=True), _FLOAT32)
    except ValueError:
        raise RetryableError("the answer's embedding is no base64 of float32 values") from None
    return _checked(vector, "embedding")


def _numbers(value: object, name: str, kind: type[_Number]) -> npt.NDArray[_Number]:
    # numpy would convert True and "1" to numbers, and converts None to NaN.
    kinds = {float, int, type(None)}
    if not isinstance(value, list) or not kinds.issuperset(map(type, value)):
        raise UnexpectedResponse(f"the answer's {name!r} is no list of numbers")
    with np.errstate(over="ignore"):
        return _checked(np.array(value, kind), name)


def _checked(values: npt.NDArray[_Number], name: str) -> npt.NDArray[_Number]:
    if not values.size or not np.isfinite(values).all():
        raise RetryableError(f"the answer's {name!r} is empty, or holds NaN or infinity")
    return values
