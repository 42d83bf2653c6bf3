"""Ready-made rollouts for YAML files: what is asked about a document, without writing Python.

A rollout's attributes are plain values, because the run's identity is made of its class and ``vars(rollout)``:
another prompt is another run. Nothing compiled is kept on the object; templates are parsed once per process.

Only the template is parsed, never a document, so braces in a document are just braces.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.errors import ConfigError

Generate = Callable[[dict[str, Any]], Awaitable[InferenceResult]]

_FIELD = re.compile(r"text|id|metadata\[([^\[\]{}]+)\]")
_ALLOWED = "allowed are {text}, {id} and {metadata[KEY]}, and {{ or }} for a brace"
_SET_ELSEWHERE = ("messages", "prompt", "model", "stream")


async def chat(document: Document, generate: Generate, **shared: Any) -> InferenceResult:
    """The document's text as one user message."""
    return await generate({"messages": [{"role": "user", "content": document.text}]})


@dataclass
class PromptRollout:
    """One chat message per document, made from a template.

    Attributes:
        prompt: the user message; ``{text}``, ``{id}`` and ``{metadata[KEY]}`` are filled in from the document.
        system_prompt: sent before it as it stands, nothing is filled in.
        generation_params: payload keys such as ``temperature``; they override ``default_generation_params``.

    Raises:
        ConfigError: a template that cannot be filled in, or a generation parameter that is not one.
    """

    prompt: str = "{text}"
    system_prompt: str | None = None
    generation_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_template(self.prompt)
        _check_params(self.generation_params)

    async def __call__(self, document: Document, generate: Generate, **shared: Any) -> InferenceResult:
        return await generate(self._payload(document, document.text))

    def _payload(self, document: Document, text: str) -> dict[str, Any]:
        return _chat_payload(self.system_prompt, _fill(self.prompt, document, text), self.generation_params)


@dataclass
class CompletionRollout:
    """One plain completion per document, for base models and servers with ``use_chat: false``.

    Attributes:
        prompt: what the model continues, with the same names as in PromptRollout.
        generation_params: payload keys such as ``max_tokens``; they override ``default_generation_params``.

    Raises:
        ConfigError: a template that cannot be filled in, or a generation parameter that is not one.
    """

    prompt: str = "{text}"
    generation_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_template(self.prompt)
        _check_params(self.generation_params)

    async def __call__(self, document: Document, generate: Generate, **shared: Any) -> InferenceResult:
        return await generate({"prompt": _fill(self.prompt, document, document.text)} | (self.generation_params or {}))


@dataclass
class ChunkedRollout:
    """Long documents in parts: each part is asked about by itself, and the answers are joined.

    Parts end at paragraphs; a paragraph that is too long is cut after a sentence, a sentence that is too long anywhere.

    Attributes:
        prompt: the user message, with the same names as in PromptRollout; ``{text}`` is the part.
        system_prompt: sent before each part as it stands.
        max_chars_per_part: longest part, in characters (some four per token in English).
        separator: what stands between the joined answers.
        parallel: ask about all parts at once (True) or one after the other.
        generation_params: payload keys; they override ``default_generation_params``.

    Raises:
        ConfigError: a template that cannot be filled in or lacks ``{text}``, or a size below 1.
    """

    prompt: str = "{text}"
    system_prompt: str | None = None
    max_chars_per_part: int = 8000
    separator: str = "\n\n"
    parallel: bool = True
    generation_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_template(self.prompt)
        _check_params(self.generation_params)
        if self.max_chars_per_part < 1:
            raise ConfigError(f"max_chars_per_part must be >= 1; it is {self.max_chars_per_part!r}.")
        if ("", "text", "") not in _parse(self.prompt):
            raise ConfigError(
                "prompt: has no {text}, so every part would be asked the same; write {text} where it goes."
            )

    async def __call__(self, document: Document, generate: Generate, **shared: Any) -> InferenceResult:
        payloads = [self._payload(document, part) for part in split_text(document.text, self.max_chars_per_part)]
        if self.parallel:
            return self._join(await _all(generate, payloads))
        return self._join([await generate(payload) for payload in payloads])

    def _payload(self, document: Document, part: str) -> dict[str, Any]:
        return _chat_payload(self.system_prompt, _fill(self.prompt, document, part), self.generation_params)

    def _join(self, results: list[InferenceResult]) -> InferenceResult:
        usage: dict[str, Any] = {}
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
    """The text in parts of at most ``limit`` characters, cut where it hurts least. Never empty."""
    parts: list[str] = []
    for piece in _pieces(text, limit, _BOUNDARIES):
        if parts and len((parts[-1] + piece).rstrip()) <= limit:
            parts[-1] += piece
        else:
            parts.append(piece)
    return [part.strip() for part in parts if part.strip()] or [text[:limit]]


# Where a text may be cut, best first: after a blank line, after a sentence, after a word.
_BOUNDARIES = (
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]"),  # noqa: RUF001 (Chinese and Japanese sentences end so)
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


async def _all(generate: Generate, payloads: list[dict[str, Any]]) -> list[InferenceResult]:
    """All answers, or the first error once every request has ended.

    Waiting for the others, instead of cancelling them, keeps the answers that are being paid for: they are in the
    request cache when the document is asked again.
    """
    results = await asyncio.gather(*(generate(payload) for payload in payloads), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _chat_payload(system_prompt: str | None, content: str, params: dict[str, Any] | None) -> dict[str, Any]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    return {"messages": [*system, {"role": "user", "content": content}]} | (params or {})


def _sum_usage(total: dict[str, Any], more: dict[str, Any] | None) -> dict[str, Any]:
    """Adds numbers by name, inside nested details too; what is not a number is left out."""
    summed = dict(total)
    for name, value in (more or {}).items():
        if isinstance(value, dict):
            summed[name] = _sum_usage(summed.get(name) or {}, value)
        elif isinstance(value, (int, float)):
            summed[name] = (summed.get(name) or 0) + value
    return summed


@lru_cache(maxsize=64)
def _parse(template: str) -> tuple[tuple[str, str, str], ...]:
    """(literal, name, metadata key) for each stretch of a template. A literal has no name.

    ``str.format`` itself is not used: it would follow ``{text.__class__}`` into Python's objects.
    """
    stretches: list[tuple[str, str, str]] = []
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"prompt: the template is broken ({error}); {_ALLOWED}.") from None
    for literal, field, spec, conversion in parsed:
        if literal:
            stretches.append((literal, "", ""))
        if field is None:
            continue
        match = _FIELD.fullmatch(field)
        if match is None or spec or conversion:
            written = field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ConfigError(f"prompt: {{{written}}} cannot be filled in; {_ALLOWED}.")
        stretches.append(("", field.split("[")[0], match[1] or ""))
    return tuple(stretches)


def _check_template(template: str) -> None:
    if not any(name for _, name, _ in _parse(template)):
        raise ConfigError(f"prompt: nothing is filled in, so every document would be asked the same; {_ALLOWED}.")


def _check_params(params: dict[str, Any] | None) -> None:
    for name in _SET_ELSEWHERE:
        if name in (params or {}):
            raise ConfigError(f"generation_params: {name!r} cannot be given here; the rollout or the server sets it.")


def _fill(template: str, document: Document, text: str) -> str:
    return "".join(literal or _lookup(name, key, document, text) for literal, name, key in _parse(template))


def _lookup(name: str, key: str, document: Document, text: str) -> str:
    if name == "text":
        return text
    if name == "id":
        return str(document.id)
    if key not in document.metadata:
        there = ", ".join(map(str, document.metadata)) or "nothing"
        raise ConfigError(f"prompt: document {document.id!r} has no metadata {key!r}; its metadata holds {there}.")
    return str(document.metadata[key])
