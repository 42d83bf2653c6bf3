"""Base classes of the ready-made rollouts: settings, and requests for answers in a form (a JSON
schema, a regular expression, or a list of texts).

Each engine gets the form in its own field (``Engine.form_fields``). Every answer is also checked,
because it may be cut off, and an endpoint may ignore the field.
"""


# No postponed annotations: the YAML loader evaluates them.

import asyncio
import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import orjson
from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.counts import CUT_OFF
from datatrove_ckpt.common.exact_json import loads
from datatrove_ckpt.common.formatting import missing_package
from datatrove_ckpt.common.setting_types import Count, Positive, check, check_value, one_of
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.generation_params import TOKEN_LIMITS, check_generation_params
from datatrove_ckpt.config.inference_config import ENGINES, dashed_names
from datatrove_ckpt.config.templates import fill, lacks, times_text
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.interface import Generate, Payload
from datatrove_ckpt.rollouts.token_counter import (
    TokenCounter,
    cut_to_chars,
    cut_to_tokens,
    fits_for_sure,
    load_counter,
)

CANNED = "canned"
"""The "engine" of ``server_type: dummy``, whose answers have no form and are not checked."""
_WITH_FIELDS = [
    engine.name for engine in ENGINES.values() if engine.is_known and not engine.is_canned
]

FENCE = re.compile(r"```\w*\n(.*)\n```", re.DOTALL)
_THOUGHTS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))


def is_cut_off(finish_reason: str | None) -> bool:
    return finish_reason is not None and finish_reason.lower() in CUT_OFF


def without_thoughts(text: str) -> str:
    """Returns what follows the thoughts, or comes before thoughts without an end."""
    for start, end in _THOUGHTS:
        text = text.rpartition(end)[2].partition(start)[0]
    return text


def parsed_json(text: str) -> object:
    """Raises ValueError if the text is no JSON, or is too deep."""
    value = loads(text.encode(errors="surrogatepass"))
    if "N" in text or "I" in text:
        json.dumps(value, allow_nan=False)
    return value


class InvalidAnswer(ValueError):
    """Reports that no answer to a request had the required form."""


class AnswerForm(NamedTuple):
    """The required form of an answer.

    Attributes:
        kind: json_schema, regex or choice; "": any form.
    """

    kind: str
    value: Any

    def check(self) -> None:
        """Raises ConfigError if no answer could have this form, or a package is missing."""
        if self.kind == "json_schema":
            _validator(orjson.dumps(self.value))
        elif self.kind == "regex":
            try:
                re.compile(self.value)
            except re.error as error:
                raise ConfigError(
                    f"regex: {self.value!r} is not a regular expression: {error}."
                ) from None
        elif self.kind == "choice":
            texts = self.value
            if not texts or not all(map(str.strip, texts)):
                raise ConfigError(f"choice: {texts!r} is not a list of texts.")

    def fields(self, engine: str) -> Payload:
        """Returns the payload keys that enforce the form.

        Raises:
            ConfigError: the engine has no keys for the form.
        """
        check_value("engine", one_of([*_WITH_FIELDS, "openai", "none"]), engine)
        if not self.kind or engine == "none":
            return {}
        if engine == "openai":
            engine = "endpoint"
        keys = ENGINES[engine].form_fields(self.kind, self.value)
        if isinstance(keys, str):
            raise ConfigError(
                f"{self.kind}: {keys}, or set engine: none, so that answers are only checked."
            )
        return keys

    def read(self, answer: InferenceResult) -> tuple[str, str]:
        """Returns the text, if needed without thoughts and a code fence, and its problem or ""."""
        text = str(answer.text).strip().removeprefix("\ufeff")
        problem = self._problem(text)
        for unwrapped in (without_thoughts, _without_fence):
            inner = unwrapped(text).strip()
            if problem and inner != text:
                text = inner
                problem = self._problem(text)
        return text, problem

    def _problem(self, text: str) -> str:
        if self.kind == "json_schema":
            return _problem(_validator(orjson.dumps(self.value)), text)
        if self.kind == "regex" and re.fullmatch(self.value, text) is None:
            return f"it does not match the regular expression {self.value}"
        if self.kind == "choice" and text not in [choice.strip() for choice in self.value]:
            return f"it is not one of {', '.join(self.value)}"
        return ""


def _without_fence(text: str) -> str:
    fenced = FENCE.fullmatch(text)
    return fenced[1] if fenced else text


def engine_of(server_type: str, form: AnswerForm) -> str:
    """Raises ConfigError if the engine must be known."""
    if ENGINES[server_type].is_known:
        return server_type
    if form.kind == "json_schema":
        return "openai"  # vLLM, SGLang and llama.cpp also take its field
    fields_by_engine = {
        name: ENGINES[name].form_fields(form.kind, form.value) for name in _WITH_FIELDS
    }
    *first, last = (name for name, fields in fields_by_engine.items() if isinstance(fields, dict))
    raise ConfigError(
        f"{form.kind}: needs engine with server_type {server_type!r}. Set engine: "
        f"{', '.join(first)} or {last}; or none, so that answers are only checked."
    )


def ends_in_blanks(text: str) -> bool:
    return len(text) - len(text.rstrip()) >= 64


@lru_cache(maxsize=16)
def _validator(schema: bytes) -> object:
    try:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError:
        raise ConfigError(f"json_schema: {missing_package('jsonschema')}") from None
    parsed = orjson.loads(schema)
    kind = validator_for(parsed)
    try:
        kind.check_schema(parsed)
    except SchemaError as error:
        raise ConfigError(
            f"json_schema: is not a JSON schema: {error.json_path}: {error.message}."
        ) from None
    return kind(parsed, registry=Registry())  # without a registry, a $ref would be downloaded


def _problem(validator: Any, text: str) -> str:
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        error = best_match(validator.iter_errors(parsed_json(text)))
    except ValueError as problem:
        return f"it is not JSON: {problem}"
    except RecursionError:
        return "it is nested too deep for its schema"
    except Unresolvable as problem:
        raise ConfigError(f"json_schema: a $ref leads outside of the schema: {problem}.") from None
    if error is None:
        return ""
    return f"{error.json_path}: {error.message}"[:500]


# what is sent ------------------------------------------------------------------------------------

Messages = list[JsonObject]


class MessagesText(str):
    """A list of messages as JSON, for the output, which keeps the list for further rollouts."""

    messages: Messages

    @classmethod
    def of(cls, messages: Messages) -> "MessagesText":
        text = cls(orjson.dumps(messages, option=orjson.OPT_NON_STR_KEYS).decode())
        text.messages = messages
        return text


def prompt_source(document: Document, column: str | None) -> str | Messages:
    """Returns the document's text, or the value of a metadata column: a text or a list of messages.

    A list in ``document.text`` becomes JSON: the text of an output must be a text.

    Raises:
        ConfigError: the column is missing or null, or a list holds other items than messages.
    """
    if column is None:
        text: object = document.text
        if isinstance(text, list):
            document.text = text = MessagesText.of(_checked(document, "text", text))
        if isinstance(text, MessagesText):
            return text.messages
        return str(text)
    if column not in document.metadata:
        raise lacks(document, "prompt_column", column)
    value = document.metadata[column]
    if isinstance(value, list):
        return _checked(document, column, value)
    if value is None or isinstance(value, dict):
        kind = "a mapping"
        if value is None:
            kind = "null"
        raise ConfigError(
            f"prompt_column: {column!r} of document {document.id!r} is {kind}, and neither a "
            "text nor a list of messages. Filter such documents out."
        )
    return str(value)


def chat_in(text: str) -> Messages | None:
    """Parses messages from a JSON text, as in CSV files; returns None if it has none."""
    if not text.lstrip().startswith("["):
        return None
    try:
        messages = orjson.loads(text)
    except ValueError:
        return None
    if messages and all(_is_message(message) for message in messages):
        return list(messages)
    return None


def _checked(document: Document, column: str, value: Messages) -> Messages:
    for number, message in enumerate(value):
        if not _is_message(message):
            raise ConfigError(
                f"{column!r} of document {document.id!r} is a list, but item {number} is no "
                "message with role and content."
            )
    if not value:
        raise ConfigError(f"{column!r} of document {document.id!r} is an empty list.")
    return value


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


@dataclass(kw_only=True)
class ReadyMade:
    """The settings that all ready-made rollouts share. Subclasses document them.

    Keyword-only settings came after the first release. ``vars`` omits their defaults, so that the
    identity of earlier runs stays.
    """

    prompt_column: str | None = None
    chars_per_token: Positive | None = None
    tokenizer: str | None = None
    # set by for_config
    tokenizer_hash: str | None = field(default=None, init=False)
    counted_by: list[str | None] | None = field(default=None, init=False)

    uses_chat: ClassVar[bool | None] = True
    """The ``use_chat`` that the config must have; None: either."""
    _token_setting: ClassVar[str]
    _unread: ClassVar[tuple[str, ...]] = ()  # parameters whose results the rollout does not use
    _set_elsewhere: ClassVar[tuple[str, ...]] = ("messages", "prompt", "model", "stream")

    def __post_init__(self) -> None:
        check(type(self), vars(self))
        self._check_params("generation_params", getattr(self, "generation_params", None))
        if self.tokenizer is not None and self.chars_per_token is not None:
            raise ConfigError(
                "tokenizer: is set together with chars_per_token; set only one of them."
            )
        if (self.tokenizer or self.chars_per_token) and not self._counts_tokens():
            raise ConfigError(
                f"tokenizer: nothing is measured in tokens; set {self._token_setting}."
            )
        if "{text}" in (getattr(self, "system_prompt", None) or ""):
            warn_once("system_prompt: has {text}, but only prompts are filled.")
        self._leave_out_defaults()

    @property
    def first_template(self) -> str:
        return "prompt"

    def _check_params(self, setting: str, params: Payload | None) -> None:
        for name in self._set_elsewhere:
            if name in (params or {}):
                raise ConfigError(
                    f"{setting}: {name!r} cannot be given here; the rollout or the server sets it."
                )
        check_generation_params(setting, params or {})

    def _refuse_unread(self, names: Sequence[str], setting: str, params: Payload) -> None:
        for name in names:
            if params.get(name) not in (None, 1, []):
                raise ConfigError(
                    f"{setting}: {type(self).__name__} reads one text of each answer. Leave "
                    f"{name!r} out, also of default_generation_params."
                )

    def _counts_tokens(self) -> bool:
        return getattr(self, self._token_setting) is not None

    def _leave_out_defaults(self) -> None:
        values = vars(self)
        for setting in fields(self):
            may_omit = setting.kw_only or not setting.init
            if may_omit and values.get(setting.name, setting) == setting.default:
                del values[setting.name]

    def for_config(self, config: InferenceConfig) -> Self:
        """Returns a copy that fits the config and the model's files, which are then in its
        identity.

        Raises:
            ConfigError: a file of the model is missing, or the settings contradict each other.
        """
        fitted = copy.copy(self)
        fitted._fit(config)
        fitted._leave_out_defaults()
        return fitted

    def _fit(self, config: InferenceConfig) -> None:
        flags = dashed_names(config.model_kwargs)
        if self._counts_tokens() and self.chars_per_token is None:
            if self.tokenizer is not None:
                self.counted_by = [self.tokenizer, None]
            elif "tokenizer" in flags:
                self.counted_by = [flags["tokenizer"], flags.get("tokenizer-revision")]
            else:
                revision = flags.get("tokenizer-revision", flags.get("revision"))
                self.counted_by = [config.model_name_or_path, revision]
            self.tokenizer_hash = load_counter(*self.counted_by).digest  # type: ignore[arg-type]
        self._refuse_unread(self._unread, "generation_params", self._all_params(config))

    def prepare(self) -> None:
        """Reads the tokenizer before any document, so that its errors are not a document's.

        Raises:
            ConfigError: the tokenizer cannot be read, or has changed.
        """
        if self.counted_by is not None:
            self._counter()

    def _counter(self) -> TokenCounter:
        """May read a file, so call this in a thread."""
        if self.counted_by is None:
            if self.tokenizer is None:
                raise ConfigError(
                    "tokenizer: is not known outside of an InferenceRunner; call "
                    "for_config(config)."
                )
            return load_counter(self.tokenizer, None)
        name, revision = self.counted_by
        return load_counter(str(name), revision, self.tokenizer_hash)

    def _text_of(self, document: Document) -> str:
        """Raises ConfigError if the document has messages instead of a text."""
        source = prompt_source(document, self.prompt_column)
        if isinstance(source, list):
            raise ConfigError(
                f"prompt_column: document {document.id!r} holds a list of messages; use "
                f"PromptRollout, not {type(self).__name__}."
            )
        return source

    def _all_params(self, config: InferenceConfig) -> Payload:
        return {**config.default_generation_params, **self._params()}

    def _params(self) -> Payload:
        # Subclasses have ``generation_params`` as a positional field.
        return {**(getattr(self, "generation_params", None) or {})}

    def value_of(self, result: object) -> object:
        return value_of(result)


@dataclass(kw_only=True)
class WholeText(ReadyMade):
    """The settings of rollouts whose requests are whole documents."""

    max_prompt_tokens: Count | Literal["auto"] | None = None
    # set by for_config
    prompt_tokens: int | None = field(default=None, init=False)

    _token_setting = "max_prompt_tokens"

    def _fit(self, config: InferenceConfig) -> None:
        super()._fit(config)
        if self.max_prompt_tokens == "auto":
            self.prompt_tokens = self._left_for_the_prompt(config)

    def _left_for_the_prompt(self, config: InferenceConfig) -> int:
        """By default, answers take no tokens."""
        return max(1, config.model_max_context - 8)  # 8 for special tokens, such as [CLS]

    async def _filled_text(self, template: str, document: Document) -> str:
        filled = partial(fill, template, document)
        return filled(await self._cut(template, filled, self._text_of(document)))

    async def _cut(
        self, template: str, filled: Callable[[str], str], text: str, system_prompt: str = ""
    ) -> str:
        """Returns the text, cut to ``max_prompt_tokens``. ``filled`` fills it into the template."""
        limit = self.max_prompt_tokens
        if limit == "auto":
            limit = self.prompt_tokens
            if limit is None:
                raise ConfigError(
                    "max_prompt_tokens: auto needs the config; call for_config(config)."
                )
        if limit is None:
            return text
        times = times_text(template)
        if self.chars_per_token is not None:
            chars = int(limit * self.chars_per_token) - len(system_prompt)
            return cut_to_chars(filled, text, times, chars)
        if fits_for_sure(system_prompt + filled(text), limit):
            return text

        def cut() -> str:
            counter = self._counter()
            room = limit - counter.count(system_prompt)
            return cut_to_tokens(filled, text, times, room, counter)

        # Counting takes milliseconds, loading a tokenizer a second.
        return await asyncio.to_thread(cut)


@dataclass(kw_only=True)
class OneRequest(WholeText):
    """The settings of rollouts whose answers are texts, which may have a form."""

    json_schema: JsonObject | None = None
    regex: str | None = None
    choice: list[str] | None = None
    answer_attempts: Count = 3
    show_error: bool = False
    invalid_answer: Literal["fail", "drop", "keep"] = "fail"
    engine: str | None = None
    # set by for_config
    form_for: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.form.check()
        if self.engine is not None:
            self.form.fields(self.engine)

    @property
    def form(self) -> AnswerForm:
        forms = ("json_schema", "regex", "choice")
        names = [name for name in forms if getattr(self, name) is not None]
        if len(names) > 1:
            raise ConfigError(
                f"{names[0]}: is set together with {names[1]}; an answer has one form."
            )
        name = names[0] if names else ""
        return AnswerForm(name, getattr(self, name, None))

    def _fit(self, config: InferenceConfig) -> None:
        super()._fit(config)
        if self.form.kind:
            if config.engine.is_canned:
                self.form_for = CANNED
            else:
                self.form_for = self.engine or engine_of(config.server_type, self.form)
                self.form.fields(self.form_for)
            if self.json_schema is not None:
                config.answer_schema = orjson.dumps(self.json_schema).decode()
            self._refuse_unread(("n",), "generation_params", self._all_params(config))

    def prepare(self) -> None:
        super().prepare()
        self.form.check()

    def _left_for_the_prompt(self, config: InferenceConfig) -> int:
        params = self._all_params(config)
        answer = next((params[name] for name in TOKEN_LIMITS if params.get(name)), None)
        if answer is None:
            raise ConfigError(
                "max_prompt_tokens: auto needs a limit of the answer. Set max_tokens."
            )
        room = config.model_max_context - int(answer)
        if config.use_chat:
            room -= 64
        if room < 1:
            raise ConfigError(
                f"max_prompt_tokens: max_tokens of {answer} leaves no room for a prompt in "
                f"model_max_context {config.model_max_context}."
            )
        return room

    def _params(self) -> Payload:
        if not self.form.kind or self.form_for == CANNED:
            return super()._params()
        return {**super()._params(), **self.form.fields(self.form_for or self.engine or "none")}

    async def _ask(self, generate: Generate, payload: Payload) -> InferenceResult | None:
        """Returns a valid answer; if no answer is valid, None where ``invalid_answer`` is "drop",
        and the last answer where it is "keep".
        """
        if not self.form.kind or self.form_for == CANNED:
            return await generate(payload)
        return await self._ask_until(
            self.form.read, self.form.kind, self.show_error, generate, payload
        )

    async def value(self, generate: Generate, payload: Payload) -> Any:
        """Returns the value of a valid answer to any payload; of a canned answer, the text.

        Raises:
            InvalidAnswer: no answer is valid.
        """
        return self.value_of(await self._ask(generate, {**payload, **self._params()}))

    def value_of(self, result: object) -> object:
        if is_invalid(result):
            return None
        value = super().value_of(result)
        if self.json_schema is None or not isinstance(value, str):
            return value
        try:
            return parsed_json(value)
        except ValueError:
            return value

    async def _ask_until(
        self,
        read: Callable[[InferenceResult], tuple[str, str]],
        form: str,
        shows: bool,
        generate: Generate,
        payload: Payload,
    ) -> InferenceResult | None:
        last = ""
        result = None
        for _ in range(self.answer_attempts):
            result = await generate(payload)
            text, problem = read(result)
            if not problem:
                result.text = text
                return result
            result.is_invalid = True  # type: ignore[attr-defined]  # a field of our Result
            cut_off = is_cut_off(result.finish_reason)
            if cut_off and ends_in_blanks(result.text):
                problem = "it ends in blanks up to max_tokens"
            last = f"{problem} (finish_reason {result.finish_reason})"
            if shows and not cut_off:
                payload = _with_error(payload, str(result.text), problem)
        if self.invalid_answer == "fail":
            raise InvalidAnswer(
                f"{form}: none of {self.answer_attempts} answers is valid. The last problem: "
                f"{last}."
            )
        if self.invalid_answer == "keep":
            return result
        return None


def is_invalid(result: object) -> bool:
    return getattr(result, "is_invalid", False)


def value_of(result: object) -> object:
    if isinstance(result, InferenceResult):
        return getattr(result, "answer", None) or result.text
    return result


def _with_error(payload: Payload, answer: str, problem: str) -> Payload:
    if "messages" not in payload:
        return payload
    request = (
        f"That answer is not valid: {problem}. Answer again, correctly and completely, and "
        "write nothing else."
    )
    more = [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": request},
    ]
    return {**payload, "messages": [*payload["messages"], *more]}
