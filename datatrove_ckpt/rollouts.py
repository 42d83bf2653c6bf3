"""What a rollout is, and ready-made rollouts for YAML files.

The attributes of a ready-made rollout are plain values, because its class and ``vars(rollout)`` are part of the run's
identity: another prompt is another run. So the object holds nothing compiled; each process parses a template once.

Only the template is parsed, never a document, so braces in a document have no meaning.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any, Protocol, TypeAlias

from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.config.generation_params import check_generation_params
from datatrove_ckpt.errors import ConfigError

Payload: TypeAlias = dict[str, Any]
"""The JSON body of one request. Any, because a dict is invariant: a user's dict[str, int] is no dict[str, object]."""


class Generate(Protocol):
    """The second argument of a rollout: sends one request."""

    async def __call__(self, payload: Payload, /) -> InferenceResult:
        """The answer to the payload, to which the model and ``default_generation_params`` are added.

        To be awaited before the rollout returns: a later answer is not counted, and may be lost.

        Raises:
            datatrove's InferenceError: this request cannot be answered.
            datatrove's ServerError: no request can be answered; the rank stops, whatever the rollout does.
        """


Rollout: TypeAlias = Callable[..., Awaitable[object]]
"""``async def rollout(document, generate, **shared)``. It returns an InferenceResult, JSON values or None."""

_FIELD = re.compile(r"text|id|metadata\[([^\[\]{}]+)\]")
_ALLOWED = "allowed are {text}, {id} and {metadata[KEY]}, and {{ or }} for a brace"
_SET_ELSEWHERE = ("messages", "prompt", "model", "stream")


# The source of this function is part of a run's identity: a change would refuse every checkpoint made with it.
async def chat(document: Document, generate: Generate, **shared: Any) -> InferenceResult:
    """The document's text as one user message."""
    return await generate({"messages": [{"role": "user", "content": document.text}]})


@dataclass
class PromptRollout:
    """One chat message per document, made from a template.

    Attributes:
        prompt: the user message; ``{text}``, ``{id}`` and ``{metadata[KEY]}`` are filled in from the document.
        system_prompt: the system message, sent unchanged: nothing is filled in.
        generation_params: payload keys such as ``temperature``; they override ``default_generation_params``.

    Raises:
        ConfigError: a template that cannot be filled in, or a generation parameter that is not one.
    """

    prompt: str = "{text}"
    system_prompt: str | None = None
    generation_params: Payload | None = None

    def __post_init__(self) -> None:
        _check_template(self.prompt)
        _check_params(self.generation_params)

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> InferenceResult:
        return await generate(self._payload(document, document.text))

    def _payload(self, document: Document, text: str) -> Payload:
        return _chat_payload(self.system_prompt, _fill(self.prompt, document, text), self.generation_params)


@dataclass
class CompletionRollout:
    """One plain completion per document, for base models and servers with ``use_chat: false``.

    Attributes:
        prompt: the text that the model continues, with the same names as in PromptRollout.
        generation_params: payload keys such as ``max_tokens``; they override ``default_generation_params``.

    Raises:
        ConfigError: a template that cannot be filled in, or a generation parameter that is not one.
    """

    prompt: str = "{text}"
    generation_params: Payload | None = None

    def __post_init__(self) -> None:
        _check_template(self.prompt)
        _check_params(self.generation_params)

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> InferenceResult:
        return await generate({"prompt": _fill(self.prompt, document, document.text)} | (self.generation_params or {}))


@dataclass
class ChunkedRollout:
    """Splits long documents into parts, sends one chat message per part, and joins the answers.

    Parts end at paragraphs. A paragraph that is too long is split after a sentence, a sentence that is too long after a
    word, a word that is too long anywhere.

    Attributes:
        prompt: the user message, with the same names as in PromptRollout; ``{text}`` is the part.
        system_prompt: the system message of each request, sent unchanged.
        max_chars_per_part: longest part, in characters (about four per token in English).
        separator: text between the joined answers.
        parallel: send the requests of all parts at once (True), or one after the other.
        generation_params: payload keys; they override ``default_generation_params``.

    Raises:
        ConfigError: a template that cannot be filled in or lacks ``{text}``, or a size below 1.
    """

    prompt: str = "{text}"
    system_prompt: str | None = None
    max_chars_per_part: int = 8000
    separator: str = "\n\n"
    parallel: bool = True
    generation_params: Payload | None = None

    def __post_init__(self) -> None:
        _check_template(self.prompt)
        _check_params(self.generation_params)
        if self.max_chars_per_part < 1:
            raise ConfigError(f"max_chars_per_part must be >= 1; it is {self.max_chars_per_part!r}.")
        if ("", "text", "") not in _parse(self.prompt):
            raise ConfigError(
                "prompt: has no {text}, so every part would get the same prompt. Put {text} where the part belongs."
            )

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> InferenceResult:
        payloads = [self._payload(document, part) for part in split_text(document.text, self.max_chars_per_part)]
        if self.parallel:
            return self._join(await _all(generate, payloads))
        return self._join([await generate(payload) for payload in payloads])

    def _payload(self, document: Document, part: str) -> Payload:
        return _chat_payload(self.system_prompt, _fill(self.prompt, document, part), self.generation_params)

    def _join(self, results: list[InferenceResult]) -> InferenceResult:
        usage: dict[str, object] = {}
        for result in results:
            usage = _sum_usage(usage, result.usage)
        reasons = [result.finish_reason for result in results]
        return InferenceResult(
            text=self.separator.join(result.text for result in results),
            finish_reason="length" if "length" in reasons else reasons[-1],
            usage=usage,
            reasoning=self.separator.join(result.reasoning for result in results if result.reasoning),
        )


def split_text(text: str, limit: int) -> list[str]:
    """The text in parts of at most ``limit`` characters. At least one part, which may be empty."""
    parts: list[str] = []
    for piece in _pieces(text, limit, _BOUNDARIES):
        if parts and len((parts[-1] + piece).rstrip()) <= limit:
            parts[-1] += piece
        else:
            parts.append(piece)
    return [part.strip() for part in parts if part.strip()] or [text[:limit]]


# Where a text may be split, best first: after a blank line, after a sentence, after a word.
_BOUNDARIES = (
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]"),  # noqa: RUF001 (ends of Chinese and Japanese sentences)
    re.compile(r"\s+"),
)


def _pieces(text: str, limit: int, boundaries: tuple[re.Pattern[str], ...]) -> Iterator[str]:
    if len(text.rstrip()) <= limit:
        yield text
    elif not boundaries:
        yield from (text[start : start + limit] for start in range(0, len(text), limit))
    else:
        start = 0
        for end in [*(match.end() for match in boundaries[0].finditer(text)), len(text)]:
            yield from _pieces(text[start:end], limit, boundaries[1:])
            start = end


async def _all(generate: Generate, payloads: list[Payload]) -> list[InferenceResult]:
    """All answers. If a request fails, waits for the others, then raises its error.

    Cancelling the others would waste their answers. As it is, the request cache has them when the document is retried.
    """
    results = await asyncio.gather(*(generate(payload) for payload in payloads), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _chat_payload(system_prompt: str | None, content: str, params: Payload | None) -> Payload:
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    return {"messages": [*system, {"role": "user", "content": content}]} | (params or {})


def _sum_usage(total: dict[str, object], more: dict[str, object] | None) -> dict[str, object]:
    """Adds numbers by name, nested ones too. Other values are left out."""
    summed = dict(total)
    for name, value in (more or {}).items():
        before = summed.get(name)
        if isinstance(value, dict):
            summed[name] = _sum_usage(before if isinstance(before, dict) else {}, value)
        elif isinstance(value, (int, float)):
            summed[name] = value + (before if isinstance(before, (int, float)) else 0)
    return summed


@lru_cache(maxsize=64)
def _parse(template: str) -> tuple[tuple[str, str, str], ...]:
    """(literal, name, metadata key) for each part of a template. A literal has no name.

    ``str.format`` is not used: ``{text.__class__}`` would reach Python's objects.
    """
    parts: list[tuple[str, str, str]] = []
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"prompt: the template is broken ({error}); {_ALLOWED}.") from None
    for literal, field, spec, conversion in parsed:
        if literal:
            parts.append((literal, "", ""))
        if field is None:
            continue
        match = _FIELD.fullmatch(field)
        if match is None or spec or conversion:
            written = field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ConfigError(f"prompt: {{{written}}} cannot be filled in; {_ALLOWED}.")
        parts.append(("", field.split("[")[0], match[1] or ""))
    return tuple(parts)


def _check_template(template: str) -> None:
    if not any(name for _, name, _ in _parse(template)):
        raise ConfigError(f"prompt: nothing is filled in, so every document would get the same prompt; {_ALLOWED}.")


def check_use_chat(rollout_fn: Rollout, use_chat: bool) -> None:
    """Refuses one of the rollouts here whose payloads are for the other kind of request.

    Raises:
        ConfigError: every request would be rejected.
    """
    if use_chat and isinstance(rollout_fn, CompletionRollout):
        raise ConfigError("use_chat: CompletionRollout sends plain completions; set use_chat to false.")
    if not use_chat and (rollout_fn is chat or isinstance(rollout_fn, PromptRollout | ChunkedRollout)):
        name = getattr(rollout_fn, "__name__", type(rollout_fn).__name__)
        raise ConfigError(f"use_chat: {name} sends chat messages; set use_chat to true, or use CompletionRollout.")


def _check_params(params: Payload | None) -> None:
    for name in _SET_ELSEWHERE:
        if name in (params or {}):
            raise ConfigError(f"generation_params: {name!r} cannot be given here; the rollout or the server sets it.")
    check_generation_params("generation_params", params or {})


def _fill(template: str, document: Document, text: str) -> str:
    return "".join(literal or _lookup(name, key, document, text) for literal, name, key in _parse(template))


def _lookup(name: str, key: str, document: Document, text: str) -> str:
    if name == "text":
        return text
    if name == "id":
        return str(document.id)
    if key not in document.metadata:
        keys = ", ".join(map(str, document.metadata)) or "none"
        raise ConfigError(f"prompt: document {document.id!r} has no metadata {key!r}; its metadata keys: {keys}.")
    return str(document.metadata[key])
