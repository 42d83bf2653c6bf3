"""Several answers to one prompt: the best one is the result, and all of them are kept beside it."""

# No postponed annotations: the YAML loader checks values by them, also those of fields that another module defines.

import re
from collections import Counter
from dataclasses import KW_ONLY, dataclass
from functools import partial

from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.chunked import sum_usage
from datatrove_ckpt.rollouts.interface import Generate, Payload, chat_payload, generate_all
from datatrove_ckpt.rollouts.media import with_media
from datatrove_ckpt.rollouts.prompt import PromptRollout
from datatrove_ckpt.rollouts.templates import fill, parse, prompt_source

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@dataclass
class BestOfRollout(PromptRollout):
    """Several answers to one prompt. A judge or a vote chooses the best one; all of them are kept.

    The result is a mapping with ``text``, ``finish_reason``, ``usage`` and ``reasoning`` of the best answer (``usage``
    of all requests together), and ``candidates``: each answer's ``text``, ``finish_reason`` and ``score``.

    Attributes:
        candidates: answers per document.
        judge_prompt: a user message that is sent once for each candidate, as ``{answer}``. The first number in the
            judge's answer is its score; the highest wins, the first one of several. None: the most frequent answer
            wins.
        judge_params: payload keys of the judge's requests; they override ``default_generation_params``. None: a
            temperature of 0.
        vote_pattern: a regular expression. Its last match in an answer (its first group, if it has one) is voted on,
            instead of the whole answer.

    All other settings are those of PromptRollout. Invalid answers are no candidates.

    Raises:
        ConfigError: as PromptRollout, or settings that could not tell the candidates apart.
    """

    _: KW_ONLY
    candidates: int = 4
    judge_prompt: str | None = None
    judge_params: Payload | None = None
    vote_pattern: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < 2:
            raise ConfigError(f"candidates: must be >= 2; it is {self.candidates!r}.")
        if self.judge_prompt is not None and ("", "metadata", "answer") not in parse(self.judge_prompt, "judge_prompt"):
            raise ConfigError("judge_prompt: has no {answer}, so every candidate would get the same score.")
        if self.judge_prompt is not None and self.vote_pattern is not None:
            raise ConfigError("vote_pattern: is set together with judge_prompt; set only one of them.")
        if self.judge_params is not None and self.judge_prompt is None:
            raise ConfigError("judge_params: there is no judge; set judge_prompt.")
        self._check_params("judge_params", self.judge_params)
        try:
            re.compile(self.vote_pattern or "")
        except re.error as error:
            raise ConfigError(f"vote_pattern: {self.vote_pattern!r} is not a regular expression: {error}.") from None
        self._refuse_cold({})

    def _refuse_cold(self, defaults: Payload) -> None:
        if {**defaults, **self._params()}.get("temperature") == 0:
            raise ConfigError("candidates: at temperature 0 they would all be the same; set a higher one.")

    def _fit(self, config: InferenceConfig) -> None:
        super()._fit(config)
        self._refuse_cold(config.default_generation_params)

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> object:
        async with self._media(document) as parts:
            return await self._best(document, generate, parts)

    async def _best(self, document: Document, generate: Generate, parts: list[Payload]) -> object:
        payload = await self._payload(document, parts)
        results = [one for one in await self._ask(generate, [payload] * self.candidates) if one is not None]
        if not results:
            return None
        asked: list[InferenceResult] = []
        if self.judge_prompt is None:
            scores: list[float | None] = [*self._votes(results)]
        else:
            asked = await generate_all(
                generate, [await self._judged(document, str(one.text), parts) for one in results]
            )
            found = [_NUMBER.search(str(one.text)) for one in asked]
            scores = [float(one[0]) if one else None for one in found]
        # max takes the first one of several
        best = max(range(len(results)), key=lambda index: (scores[index] is not None, scores[index] or 0.0))
        chosen = results[best]
        return {
            "text": chosen.text,
            "finish_reason": chosen.finish_reason,
            "usage": sum_usage(one.usage for one in [*results, *asked]),
            "reasoning": chosen.reasoning,
            "candidates": [
                {"text": one.text, "finish_reason": one.finish_reason, "score": score}
                for one, score in zip(results, scores, strict=True)
            ],
        }

    async def _judged(self, document: Document, answer: str, parts: list[Payload]) -> Payload:
        assert self.judge_prompt is not None
        source = prompt_source(document, self.prompt_column)
        text = source if isinstance(source, str) else document.text
        filled = partial(fill, self.judge_prompt, document, answer=answer)
        content = filled(await self._cut(self.judge_prompt, filled, text, None))
        params = {"temperature": 0} if self.judge_params is None else self.judge_params
        return with_media(chat_payload(None, content, params), parts)

    def _votes(self, results: list[InferenceResult]) -> list[int]:
        """How many answers say the same as each of them. One in which nothing matches has its own voice."""
        said = [self._said(str(one.text)) or index for index, one in enumerate(results)]
        counts = Counter(said)
        return [counts[one] if isinstance(one, str) else 0 for one in said]

    def _said(self, text: str) -> str:
        if self.vote_pattern is None:
            return text.strip()
        found = list(re.finditer(self.vote_pattern, text))
        return (found[-1][1 if found[-1].re.groups else 0] or "").strip() if found else ""
