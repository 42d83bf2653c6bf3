"""Several requests per document, one for each of its parts.

Splits a text where it hurts least, and joins answers that repeat each other.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.interface import Generate, Payload, chat_payload, generate_all
from datatrove_ckpt.rollouts.settings import ReadyMade
from datatrove_ckpt.rollouts.templates import check_template, fill, prompt_source, times_text

# Where a text may be split, best first: after a blank line, after a sentence, after a word.
_BOUNDARIES = (
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]"),  # noqa: RUF001 (ends of Chinese and Japanese sentences)
    re.compile(r"\s+"),
)
_SHORTEST_REPEAT = 16
"""Characters. Shorter ends of one answer may begin the next one by chance."""
_LONGEST_REPEAT = 4000
"""Characters that are compared: two milliseconds."""


class Ruler:
    """Measures stretches of one text: in characters, or in tokens if it is known where each of them begins."""

    def __init__(self, text: str, starts: Sequence[int] | None) -> None:
        self._length = len(text)
        self._starts = starts

    def size(self, start: int, end: int) -> int:
        if self._starts is None:
            return end - start
        return bisect_left(self._starts, end) - bisect_left(self._starts, start)

    def end(self, start: int, limit: int) -> int:
        """The end of the longest stretch from ``start`` that has at most this size; at least one character."""
        if self._starts is None:
            return start + limit
        last = bisect_left(self._starts, start) + limit
        return max(self._starts[last] if last < len(self._starts) else self._length, start + 1)


def split_text(text: str, limit: int, overlap: int = 0, starts: Sequence[int] | None = None) -> list[str]:
    """The text in parts of at most this size. At least one part, which may be empty.

    Args:
        starts: where each token begins: the limit is in tokens. None: it is in characters.
        overlap: characters of the end of a part with which the next one begins again; they add to its size. Fewer, so
            that it begins at a sentence or a word.
    """
    ruler = Ruler(text, starts)
    parts: list[tuple[int, int]] = []
    for start, end in _pieces(text, 0, len(text), limit, ruler, _BOUNDARIES):
        if parts and ruler.size(parts[-1][0], _trimmed(text, parts[-1][0], end)) <= limit:
            parts[-1] = (parts[-1][0], end)
        else:
            parts.append((start, end))
    shown = [(start, end) for start, end in parts if text[start:end].strip()]
    if not shown:
        return [text[: ruler.end(0, limit)]]
    first = shown[0][0]
    return [text[_earlier(text, start, overlap, first) : end].strip() for start, end in shown]


def stitch(answers: Sequence[str], separator: str, parts: Sequence[str], overlap: int) -> str:
    """The answers, joined. Where one begins with the end of the one before it, that is written once.

    Only about as much as the parts repeat is taken for a repetition, because a text may repeat itself.

    Args:
        parts: what the answers are to.
        overlap: characters that a part repeats at most.
    """
    joined = answers[0] if answers else ""
    for index, answer in enumerate(answers[1:], 1):
        part = parts[index]
        shared = max(_repeated(parts[index - 1], part, overlap), default=0)
        expected = shared * len(answer) / max(1, len(part))  # a translation may be longer
        found = [size for size in _repeated(joined, answer, int(1.5 * expected)) if size >= _SHORTEST_REPEAT]
        repeated = min(found, key=lambda size: abs(size - expected), default=0)
        joined += answer[repeated:] if repeated else separator + answer
    return joined


def _pieces(
    text: str, start: int, end: int, limit: int, ruler: Ruler, boundaries: tuple[re.Pattern[str], ...]
) -> Iterator[tuple[int, int]]:
    if ruler.size(start, _trimmed(text, start, end)) <= limit:
        yield start, end
    elif not boundaries:
        while start < end:
            cut = min(end, ruler.end(start, limit))
            yield start, cut
            start = cut
    else:
        stretch = text[start:end]
        for cut in [*(start + match.end() for match in boundaries[0].finditer(stretch)), end]:
            yield from _pieces(text, start, cut, limit, ruler, boundaries[1:])
            start = cut


def _trimmed(text: str, start: int, end: int) -> int:
    """The end without white space. Looks at little of a long text."""
    while end > start and text[end - 1].isspace():
        end -= 1
    return end


def _earlier(text: str, start: int, overlap: int, first: int) -> int:
    """Where a part begins if it repeats so many characters of what stands before it."""
    begin = max(first, start - overlap)
    if begin in (first, start):
        return begin
    for boundary in _BOUNDARIES[1:]:
        if (match := boundary.search(text, begin - 1, start)) and match.end() < start:
            return match.end()
    return begin


def _repeated(before: str, after: str, most: int) -> list[int]:
    """How many characters at the beginning of a text are also at the end of the one before it: each number that fits,
    the largest first."""
    size = min(len(before), len(after), most, _LONGEST_REPEAT)
    return [number for number in range(size, 0, -1) if before.endswith(after[:number])]


@dataclass
class ChunkedRollout(ReadyMade):
    """Splits long documents into parts, sends one chat message per part, and joins the answers.

    Parts end at paragraphs. A paragraph that is too long is split after a sentence, a sentence that is too long after a
    word, a word that is too long anywhere.

    Attributes:
        prompt: the user message; ``{text}`` is the part.
        system_prompt: the system message of each request.
        max_chars_per_part: longest part, in characters.
        separator: text between the joined answers.
        parallel: send the requests of all parts at once, unless ``carry`` is set.
        generation_params: payload keys; they override ``default_generation_params``.
        max_tokens_per_part: longest part, in tokens, instead.
        overlap_chars: characters of a part's end with which the next one begins again. Where an answer begins with the
            end of the one before it, the joined text has that once.
        carry: what a part's request knows of the ones before it. "conversation": the last ``carried_parts``, with their
            answers, as messages. "continue": the part before; the model continues its answer (vLLM and SGLang).
        carried_parts: parts that a conversation goes back.

    ``prompt_column``, ``tokenizer``, ``tokenizer_revision``, ``chars_per_token`` and ``generation_config`` are those of
    PromptRollout.

    Raises:
        ConfigError: a template that cannot be filled in or lacks ``{text}``, a size below 1, or another setting that
            cannot work.
    """

    prompt: str = "{text}"
    system_prompt: str | None = None
    max_chars_per_part: int = 8000
    separator: str = "\n\n"
    parallel: bool = True
    generation_params: Payload | None = None
    _: KW_ONLY
    max_tokens_per_part: int | None = None
    overlap_chars: int = 0
    carry: Literal["conversation", "continue"] | None = None
    carried_parts: int = 1

    _token_setting: ClassVar[str] = "max_tokens_per_part"
    _unread: ClassVar[tuple[str, ...]] = ("n", "tools")

    def __post_init__(self) -> None:
        check_template(self.prompt)
        for name in ("max_chars_per_part", "max_tokens_per_part", "carried_parts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1; it is {value!r}.")
        if self.overlap_chars < 0:
            raise ConfigError(f"overlap_chars must be >= 0; it is {self.overlap_chars!r}.")
        if not times_text(self.prompt):
            raise ConfigError(
                "prompt: has no {text}, so every part would get the same prompt. Put {text} where the part belongs."
            )
        super().__post_init__()

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> InferenceResult:
        source = prompt_source(document, self.prompt_column)
        if isinstance(source, list):
            raise ConfigError(
                f"prompt_column: document {document.id!r} holds a list of messages, which cannot be split; use "
                "PromptRollout."
            )
        parts = await self._parts(source)
        if self.carry is not None:
            return self._join(await self._in_turn(document, generate, parts), parts)
        payloads = [self._payload(document, part) for part in parts]
        if self.parallel:
            return self._join(await generate_all(generate, payloads), parts)
        return self._join([await generate(payload) for payload in payloads], parts)

    async def _parts(self, text: str) -> list[str]:
        limit = self.max_tokens_per_part
        if limit is not None and self.chars_per_token is None:
            return await asyncio.to_thread(
                lambda: split_text(text, limit, self.overlap_chars, self._counter().starts(text))
            )
        chars = self.max_chars_per_part if limit is None else max(1, int(limit * (self.chars_per_token or 1)))
        return split_text(text, chars, self.overlap_chars)

    async def _in_turn(self, document: Document, generate: Generate, parts: list[str]) -> list[InferenceResult]:
        results: list[InferenceResult] = []
        for index, part in enumerate(parts):
            if self.carry == "continue":
                payload = self._continued(document, parts[index - 1], part, results)
            else:
                payload = self._payload(document, part)
                first = max(0, index - self.carried_parts)
                for earlier, result in zip(parts[first:index], results[first:], strict=True):
                    asked = {"role": "user", "content": fill(self.prompt, document, earlier)}
                    payload["messages"][-1:-1] = [asked, {"role": "assistant", "content": result.text}]
            results.append(await generate(payload))
        return results

    def _continued(self, document: Document, before: str, part: str, results: list[InferenceResult]) -> Payload:
        if not results:
            return self._payload(document, part)
        payload = self._payload(document, f"{before}{self.separator}{part}")
        payload["messages"].append({"role": "assistant", "content": results[-1].text})
        return {**payload, "continue_final_message": True, "add_generation_prompt": False}

    def _payload(self, document: Document, part: str) -> Payload:
        return chat_payload(self.system_prompt, fill(self.prompt, document, part), self._params())

    def _join(self, results: list[InferenceResult], parts: list[str]) -> InferenceResult:
        reasons = [result.finish_reason for result in results]
        texts = [result.text for result in results]
        overlap = self.overlap_chars
        return InferenceResult(
            text=stitch(texts, self.separator, parts, overlap) if overlap else self.separator.join(texts),
            finish_reason="length" if "length" in reasons else reasons[-1],
            usage=sum_usage(result.usage for result in results),
            reasoning=self.separator.join(result.reasoning for result in results if result.reasoning),
        )


def sum_usage(usages: Iterable[dict[str, object] | None]) -> dict[str, object]:
    """The usage of several answers together: the sums of numbers of one name, nested ones too. Others are left out."""
    total: dict[str, object] = {}
    for usage in usages:
        for name, value in (usage or {}).items():
            before = total.get(name)
            if isinstance(value, dict):
                total[name] = sum_usage([before if isinstance(before, dict) else None, value])
            elif isinstance(value, (int, float)):
                total[name] = value + (before if isinstance(before, (int, float)) else 0)
    return total
