"""What becomes of an answer that loops, refuses or is cut off: ``on_loop`` and so on."""

from typing import Literal, NamedTuple

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.declared import Count, check_value
from datatrove_ckpt.config.generation_params import check_generation_params
from datatrove_ckpt.errors import ConfigError

ON_LOOP = "on_loop"
ON_REFUSAL = "on_refusal"
ON_CUT_OFF = "on_cut_off"
BAD_ANSWERS = (ON_LOOP, ON_REFUSAL, ON_CUT_OFF)
"""The settings. The first one that an answer is a case of applies: loops are often cut off."""
BadAnswerSetting = Literal["keep", "retry", "drop", "dead_letter"] | JsonObject
_Then = Literal["keep", "drop", "dead_letter"]
_NEVER_CHANGED = ("messages", "prompt", "model", "n", "extra_body", "extra_headers", "extra_query")


class AnswerPolicy(NamedTuple):
    """What becomes of a bad answer.

    Attributes:
        retries: further requests, at most.
        params: what is set in the payload of these requests.
        then: what becomes of an answer that is still bad.
    """

    retries: int
    params: JsonObject
    then: _Then


def answer_policy(setting: str, value: BadAnswerSetting) -> AnswerPolicy:
    """Returns what a setting says.

    Raises:
        ConfigError: it cannot work.
    """
    if value == "retry":
        value = {"retry": 1}
    if not isinstance(value, dict):
        return AnswerPolicy(0, {}, value)
    params = dict(value)
    retries = params.pop("retry", None)
    then = params.pop("then", "keep")
    check_value(f"{setting}.retry", Count, retries)
    check_value(f"{setting}.then", _Then, then)
    for name in _NEVER_CHANGED:
        if name in params:
            raise ConfigError("a retry cannot change it.", setting=f"{setting}.{name}")
    check_generation_params(setting, params)
    return AnswerPolicy(retries, params, then)
