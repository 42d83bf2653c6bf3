"""Parameters of requests, such as ``temperature``: refused where no server takes them."""

from __future__ import annotations

import math

import orjson

from datatrove_ckpt.errors import ConfigError

TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
# What vLLM, SGLang, llama.cpp and OpenAI all refuse. Upper limits of the temperature differ.
_RANGES = {"temperature": (0.0, math.inf), "top_p": (0.0, 1.0)}


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
