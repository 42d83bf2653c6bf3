"""Parameters of requests, such as ``temperature``: refused where no server takes them, doubted where none is known."""

from __future__ import annotations

import math
from difflib import get_close_matches
from functools import lru_cache

import orjson
from loguru import logger

from datatrove_ckpt.errors import ConfigError

TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
# What vLLM, SGLang, llama.cpp and OpenAI all refuse. Upper limits of the temperature differ.
_RANGES = {"temperature": (0.0, math.inf), "top_p": (0.0, 1.0)}
# Of vLLM, SGLang, llama.cpp and OpenAI: those that people set, and those whose names are like one of them.
_KNOWN = frozenset(
    """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt chat_template
    chat_template_kwargs continue_final_message documents echo extra_body extra_headers frequency_penalty functions
    grammar guided_choice guided_grammar guided_json guided_regex ignore_eos include_reasoning json_schema
    length_penalty logit_bias logprobs lora_path max_completion_tokens max_new_tokens max_tokens messages metadata
    min_new_tokens min_p min_tokens mirostat mirostat_eta mirostat_tau model models n n_predict parallel_tool_calls
    presence_penalty priority prompt prompt_logprobs reasoning_effort reasoning_format regex repeat_penalty
    repetition_penalty response_format return_tokens_as_token_ids seed separate_reasoning service_tier
    skip_special_tokens stop stop_token_ids stream structured_outputs suffix temperature tool_choice tools top_a top_k
    top_logprobs top_p truncate_prompt_tokens typical_p use_beam_search user xtc_probability xtc_threshold
    """.split()  # noqa: SIM905
)


def warn_of_unknown(params: dict[str, object]) -> None:
    """Warns of each parameter that looks like a known one, once for each name."""
    if not _KNOWN.issuperset(params):
        for name in params:
            _warn(str(name))


@lru_cache(maxsize=1000)
def _warn(name: str) -> None:
    if name not in _KNOWN and (near := get_close_matches(name, _KNOWN, 1, 0.8)):
        logger.warning(
            f"The request parameter {name!r} is not one that we know; did you mean {near[0]!r}? It is sent as it is, "
            "and many servers ignore what they do not know."
        )


def check_generation_params(key: str, params: object) -> None:
    """Refuses parameters with which no request can succeed. ``key`` names the setting in the error.

    Raises:
        ConfigError: they are no JSON object, ask for a stream, or have a number that no server takes.
    """
    if not isinstance(params, dict):
        raise ConfigError(f"{key}: {params!r} is not a mapping of payload keys to values.")
    if params.get("stream"):
        raise ConfigError(f"{key}.stream: answers are read as a whole; remove it.")
    for name in TOKEN_LIMITS:
        value = params.get(name)
        if value is not None and not (_is_number(value) and value >= 1 and value == int(value)):
            raise ConfigError(f"{key}.{name}: {value!r} is not a whole number of tokens, 1 or more.")
    for name, (least, most) in _RANGES.items():
        value = params.get(name)
        if value is not None and not (_is_number(value) and least <= value <= most):
            raise ConfigError(f"{key}.{name}: {value!r} is not a number from {least:g} to {most:g}.")
    for name, value in params.items():
        try:
            orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        except TypeError as error:
            raise ConfigError(f"{key}.{name}: {value!r} cannot be sent as JSON ({error}).") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
