"""Checks parameters of requests, such as ``temperature``: refuses impossible values, and names with
a typing error. Also parses the policies for bad answers (``on_loop`` and so on).
"""

import difflib
import math
import re
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Literal, NamedTuple

import orjson

from datatrove_ckpt.common import JsonObject, setting_types
from datatrove_ckpt.common.formatting import did_you_mean
from datatrove_ckpt.errors import ConfigError

# OPT_NON_STR_KEYS because the keys of logit_bias are integers.
PAYLOAD_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
# All servers refuse other types. Upper limits of the temperature differ.
_KINDS: dict[str, object] = {
    "max_tokens": setting_types.Count | None,
    "max_completion_tokens": setting_types.Count | None,
    "temperature": setting_types.NotNegative | None,
    "top_p": setting_types.Share | None,
    "service_tier": str | list[str] | None,
}
_MISTYPED = 0.88  # share of equal letters in a name with one typing error
_EXTRAS = frozenset({"extra_body", "extra_headers", "extra_query"})
# A header field, unless it decides how the body is read.
_FIELD = re.compile(
    r"(?ai)(?!(accept-encoding|content-length|transfer-encoding):)[!#$%&'*+.^`|~\w-]+: [\t -~]*"
)
# Common parameters of vLLM, SGLang, llama.cpp and OpenAI, and parameters with similar names.
REQUEST_PARAMETERS = frozenset(
    """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt
    chat_template chat_template_kwargs continue_final_message documents echo extra_body
    extra_headers frequency_penalty functions grammar guided_choice guided_grammar guided_json
    guided_regex ignore_eos include_reasoning json_schema length_penalty logit_bias logprobs
    lora_path max_completion_tokens max_new_tokens max_tokens messages metadata
    min_completion_tokens min_new_tokens min_p min_tokens mirostat mirostat_eta mirostat_lr
    mirostat_mode mirostat_target mirostat_tau mode model models n n_predict num_predict
    parallel_tool_calls parse_reasoning presence_penalty priority prompt prompt_cache_key
    prompt_cache_options prompt_cache_retention prompt_logprobs reasoning_budget_tokens
    reasoning_effort reasoning_format regex repeat_penalty repetition_detection repetition_penalty
    repetition_penalty_range response_format return_tokens_as_token_ids safety_identifier seed
    separate_reasoning service_tier skip_special_tokens stop stop_token_ids store stream
    structured_outputs suffix temperature temperature_last thinking_budget_tokens
    thinking_token_budget tool_choice tools top_a top_k top_logprobs top_logprobs_num top_n
    top_n_sigma top_p truncate_prompt_tokens typical typical_p use_beam_search user xtc_probability
    xtc_threshold
    """.split()  # noqa: SIM905
)


BadAnswerSetting = Literal["keep", "retry", "drop", "dead_letter"] | JsonObject
_Then = Literal["keep", "drop", "dead_letter"]
_NEVER_CHANGED = ("messages", "prompt", "model", "n", "extra_body", "extra_headers", "extra_query")


def max_tokens_of(params: JsonObject) -> int:
    limits = (params.get(name) for name in TOKEN_LIMITS)
    return max((limit for limit in limits if isinstance(limit, int)), default=0)


def merged(
    payload: JsonObject, key: str = "payload"
) -> tuple[JsonObject, dict[str, dict[str, str]]]:
    """Returns the body of a payload, and its ``extra_headers`` and ``extra_query``, as the OpenAI
    client sends them.

    Raises:
        ConfigError: one of the three cannot be sent. ``key`` is the payload's name in the error.
    """
    if _EXTRAS.isdisjoint(payload):
        return payload, {}
    body = dict(payload)
    extras = {}
    # The errors show no values: a header may hold a key.
    for extra in _EXTRAS:
        given = body.pop(extra, None) or {}
        if not isinstance(given, dict):
            raise ConfigError("must be a mapping.", setting=f"{key}.{extra}")
        extras[extra] = given
    body |= extras.pop("extra_body")
    if body.get("stream"):
        raise ConfigError(
            "answers are read as a whole. Remove stream.", setting=f"{key}.extra_body.stream"
        )
    for extra, fields in extras.items():
        for name, value in fields.items():
            if not isinstance(value, str):
                raise ConfigError("must be a text.", setting=f"{key}.{extra}.{name}")
            if extra == "extra_headers" and not _FIELD.fullmatch(f"{name}: {value}"):
                raise ConfigError(
                    "must be a text that fits a header field.",
                    setting=f"{key}.{extra}.{name}",
                )
    if not any(extras.values()):
        extras.clear()
    return body, extras


def refuse_unsendable(
    value: object, key: str = "payload", default: Callable[[object], object] | None = None
) -> None:
    """Raises ConfigError with the key of the first part that JSON cannot express."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, part in value.items():
            refuse_unsendable(part, f"{key}.{name}", default)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"JSON has no {value}, and null would be sent.", setting=key)
    try:
        orjson.dumps(value, option=PAYLOAD_JSON, default=default)
    except TypeError as error:
        raise ConfigError(f"cannot be sent as JSON ({error}).", setting=key) from None


def refuse_near_misses(params: Collection[str], key: str) -> None:
    """Raises ConfigError for a typing error, such as ``max_token``: many servers ignore it."""
    if REQUEST_PARAMETERS.issuperset(params):
        return
    for name in params:
        hint = _near_miss(str(name))
        if hint:
            raise ConfigError(
                f"is no known request parameter{hint} To send it as it is, write it inside "
                "extra_body.",
                setting=f"{key}.{name}",
            )


@lru_cache(maxsize=1000)
def _near_miss(name: str) -> str:
    if name in REQUEST_PARAMETERS:
        return ""
    names = {_bare(param): param for param in REQUEST_PARAMETERS}
    near = difflib.get_close_matches(_bare(name), names, cutoff=_MISTYPED)
    return did_you_mean(name.lower(), map(names.__getitem__, near), 0)


def _bare(name: str) -> str:
    return re.sub("[_-]", "", name).lower()


def check_generation_params(key: str, params: JsonObject) -> None:
    """Checks parameters of requests. ``key``: name of the setting in the error.

    Raises:
        ConfigError: no request can succeed with these parameters.
    """
    refuse_near_misses(params, key)
    params, _ = merged(params, key)
    refuse_unsendable(params, key)
    if params.get("stream"):
        raise ConfigError("answers are read as a whole; remove it.", setting=f"{key}.stream")
    for name, kind in _KINDS.items():
        setting_types.check_value(f"{key}.{name}", kind, params.get(name))


class AnswerPolicy(NamedTuple):
    """The policy for a bad answer.

    Attributes:
        fallback: treatment of an answer that is still bad.
    """

    retries: int
    params: JsonObject
    fallback: _Then


def answer_policy(setting: str, value: BadAnswerSetting) -> AnswerPolicy:
    if value == "retry":
        value = {"retry": 1}
    if not isinstance(value, dict):
        return AnswerPolicy(0, {}, value)
    params = dict(value)
    retries = params.pop("retry", None)
    fallback = params.pop("then", "keep")
    setting_types.check_value(f"{setting}.retry", setting_types.Count, retries)
    setting_types.check_value(f"{setting}.then", _Then, fallback)
    for name in _NEVER_CHANGED:
        if name in params:
            raise ConfigError("a retry cannot change it.", setting=f"{setting}.{name}")
    check_generation_params(setting, params)
    return AnswerPolicy(retries, params, fallback)
