"""Several answers to one prompt: the best one is the result, and all of them are kept beside it."""

# No postponed annotations: the YAML loader checks values by them, also those of fields that another module defines.

from collections import Counter
from dataclasses import KW_ONLY, dataclass

from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.chunked import sum_usage
from datatrove_ckpt.rollouts.interface import Generate, Payload, generate_all
from datatrove_ckpt.rollouts.judge import Judged, check_pattern, last_match


@dataclass
class BestOfRollout(Judged):
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
        judge: the judge's name among several models.
        score_pattern: as that of JudgeRollout.
        vote_pattern: a regular expression. Its last match in an answer (its first group, if it has one) is voted on.

    All other settings are those of PromptRollout. Invalid answers are no candidates.

    Raises:
        ConfigError: as PromptRollout, or settings that could not tell the candidates apart.
    """

    _: KW_ONLY
    candidates: int = 4
    vote_pattern: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < 2:
            raise ConfigError(f"candidates: must be >= 2; it is {self.candidates!r}.")
        self._check_shows_answer("every candidate would get the same score")
        if self.judge_prompt is not None and self.vote_pattern is not None:
            raise ConfigError("vote_pattern: is set together with judge_prompt; set only one of them.")
        check_pattern("vote_pattern", self.vote_pattern)
        self._refuse_cold({})

    def _refuse_cold(self, defaults: Payload) -> None:
        if {**defaults, **self._params()}.get("temperature") == 0:
            raise ConfigError("candidates: at temperature 0 they would all be the same; set a higher one.")

    def _fit(self, config: InferenceConfig) -> None:
        super()._fit(config)
        self._refuse_cold(config.default_generation_params)

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> object:
        async with self.media_parts(document) as parts:
            return await self._best(document, generate, parts)

    async def _best(self, document: Document, generate: Generate, parts: list[Payload]) -> object:
        judge, payload = self._judge(generate), await self._payload(document, parts)
        results = [one for one in await self._ask(generate, [payload] * self.candidates) if one is not None]
        if not results:
            return None
        asked: list[InferenceResult] = []
        if self.judge_prompt is None:
            scores: list[float | None] = [*self._votes(results)]
        else:
            payloads = [await self._to_judge(document, parts, answer=str(one.text)) for one in results]
            asked = await generate_all(judge, payloads)
            scores = [self._score(str(one.text)) for one in asked]
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

    def _votes(self, results: list[InferenceResult]) -> list[int]:
        """How many answers say the same as each of them. One in which nothing matches has its own voice."""
        said = [self._said(str(one.text)) or index for index, one in enumerate(results)]
        counts = Counter(said)
        return [counts[one] if isinstance(one, str) else 0 for one in said]

    def _said(self, text: str) -> str:
        return (text if self.vote_pattern is None else last_match(self.vote_pattern, text)).strip()
