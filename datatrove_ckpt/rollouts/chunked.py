"""Sends a request for each part of a document.

The text is split after paragraphs, sentences or words, in this order.
"""

import asyncio
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.common.setting_types import Count
from datatrove_ckpt.config.templates import check_template, fill, times_text
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.interface import Generate, Payload, chat_payload, gather_all
from datatrove_ckpt.rollouts.settings import ReadyMade, is_cut_off

# Boundaries at which a text may be split, best first: blank line, sentence, word.
_BOUNDARIES = (
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]"),  # noqa: RUF001 (ends of Chinese and Japanese sentences)
    re.compile(r"\s+"),
)


@dataclass
class _Splitter:
    """Splits a text at ``limit`` units, such as tokens. ``starts``: start of each unit."""

    _text: str
    _limit: int
    _starts: Sequence[int]

    def fits(self, start: int, end: int) -> bool:
        while end > start and self._text[end - 1].isspace():
            end -= 1
        return bisect_left(self._starts, end) - bisect_left(self._starts, start) <= self._limit

    def end(self, start: int) -> int:
        """Returns the end of the longest fitting stretch from ``start``; at least one character."""
        last = bisect_left(self._starts, start) + self._limit
        end = len(self._text)
        if last < len(self._starts):
            end = self._starts[last]
        return max(end, start + 1)

    def pieces(
        self, start: int, end: int, boundaries: Sequence[re.Pattern[str]]
    ) -> Iterator[tuple[int, int]]:
        if self.fits(start, end):
            yield start, end
        elif not boundaries:
            while start < end:
                cut = min(end, self.end(start))
                yield start, cut
                start = cut
        else:
            stretch = self._text[start:end]
            for cut in [*(start + match.end() for match in boundaries[0].finditer(stretch)), end]:
                yield from self.pieces(start, cut, boundaries[1:])
                start = cut


def split_text(text: str, limit: int, starts: Sequence[int] | None = None) -> list[str]:
    """Returns the text in parts of at most ``limit`` units: at least one part, which may be empty.

    Args:
        starts: start of each token, if the limit is in tokens; None: the limit is in characters.
    """
    splitter = _Splitter(text, limit, range(len(text)) if starts is None else starts)
    parts: list[tuple[int, int]] = []
    for start, end in splitter.pieces(0, len(text), _BOUNDARIES):
        if parts and splitter.fits(parts[-1][0], end):
            parts[-1] = (parts[-1][0], end)
        else:
            parts.append((start, end))
    stripped = [text[start:end].strip() for start, end in parts]
    return list(filter(None, stripped)) or [text[: splitter.end(0)]]


@dataclass
class ChunkedRollout(ReadyMade):
    """Splits long documents into parts, sends one chat message per part, and joins the answers.

    Parts end at paragraphs. A paragraph that is too long is split after a sentence, a sentence that
    is too long after a word, a word that is too long anywhere.

    Attributes:
        prompt: the user message; ``{text}`` is the part.
        system_prompt: the system message of each request.
        max_chars_per_part: longest part, in characters.
        separator: text between the joined answers.
        parallel: send the requests of all parts at once, unless ``carry`` is set.
        generation_params: payload keys; they override ``default_generation_params``.
        max_tokens_per_part: longest part, in tokens, instead.
        carry: what a part's request knows of the ones before it. "conversation": the last
            ``carried_parts``, with their answers, as messages. "continue": the part before; the
            model continues its answer (vLLM and SGLang).
        carried_parts: parts that a conversation goes back.

    ``prompt_column``, ``tokenizer`` and ``chars_per_token`` are those of PromptRollout.

    Raises:
        ConfigError: a template that cannot be filled in or lacks ``{text}``, a size below 1, or
            another setting that cannot work.
    """

    prompt: str = "{text}"
    system_prompt: str | None = None
    max_chars_per_part: Count = 8000
    separator: str = "\n\n"
    parallel: bool = True
    generation_params: Payload | None = None
    _: KW_ONLY
    max_tokens_per_part: Count | None = None
    carry: Literal["conversation", "continue"] | None = None
    carried_parts: Count = 1

    _token_setting = "max_tokens_per_part"
    _unread = ("n", "tools")

    def __post_init__(self) -> None:
        check_template(self.prompt)
        if not times_text(self.prompt):
            raise ConfigError("prompt: has no {text}, where the part belongs.")
        super().__post_init__()

    async def __call__(
        self, document: Document, generate: Generate, **shared: object
    ) -> InferenceResult:
        parts = await self._parts(self._text_of(document))
        if self.carry is not None:
            return self._join(await self._in_turn(document, generate, parts))
        payloads = [self._payload(document, part) for part in parts]
        if self.parallel:
            return self._join(await gather_all(map(generate, payloads)))
        return self._join([await generate(payload) for payload in payloads])

    async def _parts(self, text: str) -> list[str]:
        limit = self.max_tokens_per_part
        if limit is None:
            return split_text(text, self.max_chars_per_part)
        if self.chars_per_token is not None:
            return split_text(text, max(1, int(limit * self.chars_per_token)))
        return await asyncio.to_thread(
            lambda: split_text(text, limit, self._counter().starts(text))
        )

    async def _in_turn(
        self, document: Document, generate: Generate, parts: list[str]
    ) -> list[InferenceResult]:
        results: list[InferenceResult] = []
        for index, part in enumerate(parts):
            if self.carry == "continue" and results:
                before = f"{parts[index - 1]}{self.separator}{part}"
                payload = self._payload(document, before)
                payload["messages"].append({"role": "assistant", "content": results[-1].text})
                payload |= {"continue_final_message": True, "add_generation_prompt": False}
            else:
                payload = self._payload(document, part)
                first = max(0, index - self.carried_parts)
                for earlier, result in zip(parts[first:index], results[first:], strict=True):
                    question = {"role": "user", "content": fill(self.prompt, document, earlier)}
                    payload["messages"][-1:-1] = [
                        question,
                        {"role": "assistant", "content": result.text},
                    ]
            results.append(await generate(payload))
        return results

    def _payload(self, document: Document, part: str) -> Payload:
        return chat_payload(self.system_prompt, fill(self.prompt, document, part), self._params())

    def _join(self, results: list[InferenceResult]) -> InferenceResult:
        reasons = [result.finish_reason for result in results]
        return InferenceResult(
            text=self.separator.join(result.text for result in results),
            finish_reason=next(filter(is_cut_off, reasons), reasons[-1]),
            usage=sum_usage(result.usage for result in results),
            reasoning=self.separator.join(
                result.reasoning for result in results if result.reasoning
            ),
        )


def sum_usage(usages: Iterable[dict[str, object] | None]) -> dict[str, object]:
    total: dict[str, object] = {}
    for usage in usages:
        for name, value in (usage or {}).items():
            before = total.get(name)
            if isinstance(value, dict):
                total[name] = sum_usage([before if isinstance(before, dict) else None, value])
            elif isinstance(value, int | float):
                total[name] = value + (before if isinstance(before, int | float) else 0)
    return total
