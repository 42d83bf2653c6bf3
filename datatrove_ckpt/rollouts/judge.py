"""Lets a model, the judge, score documents or answers."""

# No postponed annotations: the YAML loader evaluates them.

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.templates import parse
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.chunked import sum_usage
from datatrove_ckpt.rollouts.interface import Generate, Payload, chat_payload
from datatrove_ckpt.rollouts.media import with_media
from datatrove_ckpt.rollouts.prompt import PromptRollout
from datatrove_ckpt.rollouts.prompt_source import prompt_source
from datatrove_ckpt.rollouts.settings import CANNED, is_cut_off, without_thoughts

_ANSWER = ("", "key", "answer")
# The whole number: no part of "3,5" or "1e-3" is a number.
_FIRST = re.compile(r"[-+−]?(?:(?<![\w.])\.)?\d+(?:[.,'_]\d+)*(?:[eE][-+−]?\d+)?")  # noqa: RUF001 (a minus)
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)")


@dataclass
class JudgeRollout(PromptRollout):
    """A judge scores each document, or an answer that another model gives about it.

    The result has ``text``, ``finish_reason``, ``usage`` and ``reasoning`` of the judge's answer,
    and its ``score``. With ``prompt``, ``text``, ``finish_reason`` and ``reasoning`` are those of
    the answer that is judged, ``usage`` is that of both, and ``judgement`` is the judge's text.

    Attributes:
        prompt: the user message whose answer is judged. None: the document itself is.
        judge_prompt: the judge's user message; ``{answer}`` is the answer.
        judge_params: payload keys of the judge's requests. None: a temperature of 0.
        judge: the judge's name among several models.
        score_pattern: the score is the first number of the answer, or of this regular expression's
            last match (its first group, if it has one). ``<think>`` blocks are skipped.
        lowest, highest: bound of valid scores.
        threshold: documents with a lower score are dropped.
        answer_attempts: attempts to get a valid score; a further one tells the judge what is wrong.

    All other settings are those of PromptRollout, for the answer that is judged.
    ``answer_attempts`` and ``invalid_answer`` are for both.

    Raises:
        ConfigError: a setting that PromptRollout refuses, or with which nothing can be judged.
    """

    prompt: str | None = None  # type: ignore[assignment]
    _: KW_ONLY
    judge_prompt: str | None = None
    judge_params: Payload | None = None
    judge: str | None = "judge"
    score_pattern: str | None = None
    lowest: float | None = None
    highest: float | None = None
    threshold: float | None = None

    _unread = ("n", "tools")

    def __post_init__(self) -> None:
        if self.judge_prompt is None:
            raise ConfigError("judge_prompt: is missing; it is the judge's user message.")
        if self.prompt is None:
            for name in ("system_prompt", "generation_params", "json_schema", "regex", "choice"):
                if getattr(self, name):
                    raise ConfigError(f"{name}: is for the answer that is judged; also set prompt.")
            if _ANSWER in parse(self.judge_prompt, "judge_prompt"):
                raise ConfigError(
                    "judge_prompt: {answer} is the answer to prompt; set prompt (or "
                    "{metadata[answer]})."
                )
        elif _ANSWER not in parse(self.judge_prompt, "judge_prompt"):
            raise ConfigError(
                "judge_prompt: has no {answer}, so the judge would not see the answer."
            )
        super().__post_init__()
        self._check_params("judge_params", self.judge_params)
        try:
            re.compile(self.score_pattern or "")
        except re.error as error:
            raise ConfigError(
                f"score_pattern: {self.score_pattern!r} is not a regular expression: {error}."
            ) from None

    @property
    def first_template(self) -> str:
        if self.prompt is None:
            return "judge_prompt"
        return "prompt"

    def _fit(self, config: InferenceConfig) -> None:
        super()._fit(config)
        if config.engine.is_canned:
            self.form_for = CANNED
        if config.name:
            self.judge = self.judge or "judge"
        else:
            self.judge = None
        if self.judge not in (None, *config.models):
            raise ConfigError(
                f"judge: {self.judge!r} is none of the models, which are "
                f"{', '.join(config.models)}."
            )
        if self.prompt is not None and len(config.models) > 1 and self.judge == config.models[0]:
            raise ConfigError(
                "judge: is the first model, which answers the prompt; name the writer first in "
                "config."
            )
        params = self.judge_params or {}
        if self.judge in (None, config.name):
            params = {**config.default_generation_params, **params}
        self._refuse_unread(self._unread, "judge_params", params)

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> object:
        answer: InferenceResult | None = None
        values = {}
        async with self.media_parts(document) as parts:
            if self.prompt is not None:
                answer = await self._ask(generate, await self._payload(document, parts))
                if answer is None:
                    return None
                values = {"answer": str(answer.text)}
            payload = await self._to_judge(document, parts, values)
            judge = generate
            if self.judge is not None:
                judge = getattr(generate, self.judge)
            if self.form_for == CANNED:
                judged: InferenceResult | None = await judge(payload)
            else:
                judged = await self._ask_until(
                    self._read_score, "judge_prompt", True, judge, payload
                )
        if judged is None:
            return None
        score = self._score(str(judged.text))
        if self.threshold is not None and score is not None and score < self.threshold:
            return None
        seen = answer or judged
        result = {"text": seen.text, "finish_reason": seen.finish_reason, "usage": judged.usage}
        result |= {"reasoning": seen.reasoning, "score": score}
        if answer is not None:
            result |= {"usage": sum_usage([answer.usage, judged.usage]), "judgement": judged.text}
        return result

    def value_of(self, result: object) -> object:
        if not isinstance(result, dict):
            return result
        if self.prompt is None:
            return result["score"]
        return super().value_of(result["text"])

    async def _to_judge(
        self, document: Document, parts: Sequence[Payload], values: dict[str, str]
    ) -> Payload:
        assert self.judge_prompt is not None
        text = prompt_source(document, self.prompt_column)
        if not isinstance(text, str):
            text = document.text
        content = await self._filled(self.judge_prompt, document, text, **values)
        params = self.judge_params
        if params is None:
            params = {"temperature": 0}
        return with_media(chat_payload(None, content, params), parts)

    def _score(self, text: str) -> float | None:
        """Returns the score of a judgement. A <think> block is skipped, unless the pattern contains
        "think>".
        """
        if "think>" not in (self.score_pattern or ""):
            text = without_thoughts(text)
        if self.score_pattern is not None:
            matches = list(re.finditer(self.score_pattern, text))
            text = ""
            if matches:
                text = matches[-1][min(1, matches[-1].re.groups)] or ""
        match = _FIRST.search(text)
        if match is None:
            return None
        number = match[0].replace("−", "-")  # noqa: RUF001
        if _NUMBER.fullmatch(number):
            return float(number)
        return None

    def _read_score(self, answer: InferenceResult) -> tuple[str, str]:
        text = str(answer.text)
        if is_cut_off(answer.finish_reason):
            return text, "it is cut off; the judge needs more max_tokens"
        score = self._score(text)
        if score is None and self.score_pattern is None:
            return text, "it has no number"
        if score is None:
            return text, "it has no number where score_pattern looks for it"
        bounds = []
        if self.lowest is not None:
            bounds.append(f"at least {self.lowest:g}")
        if self.highest is not None:
            bounds.append(f"at most {self.highest:g}")
        is_low = self.lowest is not None and score < self.lowest
        is_high = self.highest is not None and score > self.highest
        if is_low or is_high:
            return text, f"its score is {score:g}, and must be {' and '.join(bounds)}"
        return text, ""
