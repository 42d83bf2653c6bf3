"""Sends one request per document, made from a template; with ``JudgeRollout``, for its scores."""


# No postponed annotations: the YAML loader evaluates them.

import copy
import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Self

from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.common.setting_types import Count
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.templates import BARE, check_template, fill, parse, times_text
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.chunked import sum_usage
from datatrove_ckpt.rollouts.interface import Generate, Payload, Rollout, chat, chat_payload
from datatrove_ckpt.rollouts.media import (
    MEDIA,
    check_media,
    check_message_urls,
    check_pillow,
    parts_of,
    with_media,
    without_bytes,
)
from datatrove_ckpt.rollouts.settings import (
    CANNED,
    OneRequest,
    ReadyMade,
    chat_in,
    is_cut_off,
    is_invalid,
    prompt_source,
    without_thoughts,
)
from datatrove_ckpt.rollouts.token_counter import cut_to_chars


@dataclass
class PromptRollout(OneRequest):
    """One chat message per document, made from a template.

    Attributes:
        prompt: the user message, with ``{text}``, ``{id}``, ``{KEY}`` and ``{metadata[KEY]}`` of
            the document, or a part of a value: ``{KEY[0].NAME}``. Or with ``[[DOCUMENT]]`` for the
            text: then braces have no meaning.
        system_prompt: the system message, sent unchanged.
        generation_params: payload keys; they override ``default_generation_params``.
        max_chars: longest user message, in characters. The text is cut, after a line if there is
            one.
        prompt_column: metadata key whose value takes the text's place. A list of messages, also
            as JSON, is sent as it is, after ``system_prompt`` unless it has one of its own.
        chars_per_token: characters of a token: an estimate instead of a tokenizer.
        tokenizer: name or path of a model with a ``tokenizer.json``. None: the model's own.
        max_prompt_tokens: longest system and user message together, in tokens; the text is cut, a
            list of messages is not. "auto": what ``model_max_context`` leaves beside ``max_tokens``
            and 64 for the chat template.
        json_schema: the answer is JSON of this schema.
        regex: the answer matches this regular expression as a whole.
        choice: the answer is one of these texts.
        answer_attempts: attempts to get an answer of that form, each a new sample: the temperature
            should not be 0.
        show_error: a further attempt shows the model its answer and what is wrong with it.
        invalid_answer: "fail": a document without a valid answer fails. "drop": the rollout gives
            None. "keep": the ``answer`` is null, and the results have the last one.
        engine: whose request fields to use for the form: an engine, "openai" or "none". None: those
            of the ``server_type``.
        images: what goes into the message after the text: "media", the document's media (pictures,
            sound, PDFs); or the metadata key of bytes, a path, an http(s) or data URL, a mapping
            with ``bytes`` or ``path``, or a list.
        max_image_side: longest side of a picture, in pixels; a larger one is made smaller. None:
            sent as it is.
        media_folder: the folder or URL below which files that documents name may be read and sent.
        media_urls: hosts whose URLs documents may name, for the server to fetch; ["*"]: all. None:
            no host.

    Raises:
        ConfigError: a template that cannot be filled in, a generation parameter that is not one,
            ``max_chars`` that leaves no room for the text, or another setting that cannot work.
    """

    prompt: str = "{text}"
    system_prompt: str | None = None
    generation_params: Payload | None = None
    max_chars: int | None = None
    _: KW_ONLY
    images: str | None = None
    max_image_side: Count | None = None
    media_folder: str | None = None
    media_urls: list[str] | None = None
    chat_texts: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        name = self.first_template
        template = getattr(self, name)
        if self.images is None:
            check_template(template, name)
        else:
            parse(template, name)
        for setting in ("max_image_side", "media_folder"):
            if self.images is None and getattr(self, setting) is not None:
                raise ConfigError(
                    f'{setting}: nothing but text is sent; set images, such as "media".'
                )
        if self.max_image_side is not None:
            check_pillow()
        super().__post_init__()
        if self.max_chars is None:
            del (
                self.max_chars
            )  # the class has the default, and the identity of older runs stays the same
        elif self.max_chars <= sum(len(literal) for literal, _, _ in parse(template)):
            raise ConfigError(
                f"max_chars: must be greater than the length of {name}; it is {self.max_chars!r}."
            )

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> object:
        if self.images is None:
            return await self._ask(generate, await self._payload(document))
        async with self.media_parts(document) as parts:
            return await self._ask(generate, await self._payload(document, parts))

    def _fit(self, config: InferenceConfig) -> None:
        super()._fit(config)
        if self.prompt_column is not None and self.prompt in BARE:
            self.chat_texts = True

    def as_before(self) -> Self:
        """Returns a copy that sends the JSON of a chat as one message, as earlier releases did."""
        copied = copy.copy(self)
        vars(copied).pop("chat_texts", None)
        return copied

    def prepare(self) -> None:
        super().prepare()
        check_media(self)

    def media_parts(self, document: Document) -> AbstractAsyncContextManager[list[Payload]]:
        """Returns the media parts of the message. The bytes of their files count until the end."""
        if self.images is None:
            return nullcontext([])
        return parts_of(document, self)

    def drop_sent(self, document: Document) -> None:
        if self.images not in (None, MEDIA) and self.images in document.metadata:
            document.metadata[self.images] = without_bytes(document.metadata[self.images])

    async def _payload(self, document: Document, parts: Sequence[Payload] = ()) -> Payload:
        source = prompt_source(document, self.prompt_column)
        if self.chat_texts and isinstance(source, str):
            source = chat_in(source) or source
        if isinstance(source, list):
            if self.prompt not in BARE:
                raise ConfigError(
                    f"prompt: document {document.id!r} holds a list of messages. Leave prompt out."
                )
            check_message_urls(source, self.media_urls)
            if self.system_prompt is not None and source[0]["role"] != "system":
                source = [{"role": "system", "content": self.system_prompt}, *source]
            return with_media({"messages": source, **self._params()}, parts)
        content = await self._filled(self.prompt, document, source, self.system_prompt or "")
        return with_media(chat_payload(self.system_prompt, content, self._params()), parts)

    async def _filled(
        self, template: str, document: Document, text: str, system_prompt: str = "", **values: str
    ) -> str:
        def filled(part: str) -> str:
            return fill(template, document, part, **values)

        if self.max_chars is not None:
            text = cut_to_chars(filled, text, times_text(template), self.max_chars)
        return filled(await self._cut(template, filled, text, system_prompt))


@dataclass
class CompletionRollout(OneRequest):
    """One plain completion per document, for base models and servers with ``use_chat: false``.

    Attributes:
        prompt: the text that the model continues, with the same names.
        generation_params: payload keys such as ``max_tokens``; they override
            ``default_generation_params``.

    The other settings are those of PromptRollout, without ``system_prompt`` and ``max_chars``.

    Raises:
        ConfigError: a template that cannot be filled in, or a generation parameter that is not one.
    """

    prompt: str = "{text}"
    generation_params: Payload | None = None

    uses_chat = False

    def __post_init__(self) -> None:
        check_template(self.prompt)
        super().__post_init__()

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> object:
        content = await self._filled_text(self.prompt, document)
        return await self._ask(generate, {"prompt": content} | self._params())


def for_config(rollout_fn: Rollout, config: InferenceConfig) -> Rollout:
    """Returns the rollout that a run with this config calls.

    Raises:
        ConfigError: its payloads are for the other kind of request, or ``ReadyMade.for_config``
            refuses the config.
    """
    chats = None
    if rollout_fn is chat:
        chats = True
    elif isinstance(rollout_fn, ReadyMade):
        chats = rollout_fn.uses_chat
    name = getattr(rollout_fn, "__name__", type(rollout_fn).__name__)
    if config.use_chat and chats is False:
        raise ConfigError(f"use_chat: {name} sends plain completions; set use_chat to false.")
    if not config.use_chat and chats:
        raise ConfigError(
            f"use_chat: {name} sends chat messages; set use_chat to true, or use CompletionRollout."
        )
    if isinstance(rollout_fn, ReadyMade):
        return rollout_fn.for_config(config)
    return rollout_fn


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
            raise ConfigError("judge_prompt: is missing.")
        shows_answer = _ANSWER in parse(self.judge_prompt, "judge_prompt")
        if self.prompt is None:
            for name in ("system_prompt", "generation_params", "json_schema", "regex", "choice"):
                if getattr(self, name):
                    raise ConfigError(f"{name}: is for the answer that is judged; also set prompt.")
            if shows_answer:
                raise ConfigError(
                    "judge_prompt: {answer} is the answer to prompt; set prompt (or "
                    "{metadata[answer]})."
                )
        elif not shows_answer:
            raise ConfigError("judge_prompt: has no {answer}, which the judge would not see.")
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
            raise ConfigError("judge: is the first model; name the writer first in config.")
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
                if answer is None or is_invalid(answer):
                    return answer
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
        score = None if is_invalid(judged) else self._score(str(judged.text))
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
            return super().value_of(result)
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
        """A <think> block is skipped, unless the pattern contains "think>"."""
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
