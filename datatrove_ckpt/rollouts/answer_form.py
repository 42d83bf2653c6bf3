"""Requests and checks answers in a form: a JSON schema, a regular expression, or a list of texts.

Each engine gets the form in its own field (``Engine.form_fields``). Every answer is also checked,
because it may be cut off, and an endpoint may ignore the field.
"""

import re
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import orjson

from datatrove_ckpt.common.exact_json import loads
from datatrove_ckpt.common.finish_reasons import CUT_OFF
from datatrove_ckpt.common.formatting import missing_package
from datatrove_ckpt.common.setting_types import check_value, one_of
from datatrove_ckpt.config.inference_config import ENGINES
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.interface import InferenceResult, Payload

_DEEPEST = 200  # of the 254 that a document may have

CANNED = "canned"
"""The "engine" of ``server_type: dummy``, whose answers have no form and are not checked."""
_WITH_FIELDS = [
    engine.name for engine in ENGINES.values() if engine.is_known and not engine.is_canned
]

FENCE = re.compile(r"```\w*\n(.*)\n```", re.DOTALL)
_THOUGHTS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))


def is_cut_off(finish_reason: str | None) -> bool:
    """Returns whether an answer reached max_tokens, or the end of the model's context."""
    return finish_reason is not None and finish_reason.lower() in CUT_OFF


def without_thoughts(text: str) -> str:
    """Returns what follows the thoughts, or comes before thoughts without an end."""
    for start, end in _THOUGHTS:
        text = text.rpartition(end)[2].partition(start)[0]
    return text


def parsed_json(text: str) -> Any:
    """Returns the value of an answer in JSON. Raises ValueError if it is none, or is too deep."""
    value = loads(text.encode(errors="surrogatepass"), _refuse_constant)
    if text.count("[") + text.count("{") > _DEEPEST:
        level = [value]
        for _ in range(_DEEPEST):
            level = [part for whole in level for part in _containers_in(whole)]
        if level:
            raise ValueError(f"more than {_DEEPEST} lists and objects are in each other")
    return value


def _containers_in(value: Any) -> list[object]:
    parts = value.values() if isinstance(value, dict) else value
    return [part for part in parts if isinstance(part, dict | list)]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


class InvalidAnswer(ValueError):
    """Reports that no answer to a request had the required form."""


class AnswerForm(NamedTuple):
    """The required form of an answer.

    Attributes:
        kind: json_schema, regex or choice; "": any form.
        value: value of the setting ``kind``.
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
    """Returns the engine for the form. Raises ConfigError if the engine must be known."""
    if ENGINES[server_type].is_known:
        return server_type
    if form.kind == "json_schema":
        return "openai"  # vLLM, SGLang and llama.cpp also take its field
    fields_by_engine = {
        name: ENGINES[name].form_fields(form.kind, form.value) for name in _WITH_FIELDS
    }
    *first, last = (name for name, fields in fields_by_engine.items() if isinstance(fields, dict))
    raise ConfigError(
        f"{form.kind}: engines have different fields for it, and behind server_type "
        f"{server_type!r} may be any of them. Set engine: {', '.join(first)} or {last}; or none, "
        "so that answers are only checked."
    )


def ends_in_blanks(text: str) -> bool:
    """Returns whether an answer ends in a long run of whitespace."""
    return len(text) - len(text.rstrip()) >= 64


@lru_cache(maxsize=16)
def _validator(schema: bytes) -> Any:
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
