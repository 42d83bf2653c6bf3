"""Answers that datatrove's own runner has kept, in the request cache of a run that ``migrate`` made.

datatrove names a request by the xxh128 of what the rollout gave to ``generate``: before the model and the default
parameters are added, or after that if the rollout gave the same dict again, because datatrove adds them in place. So
the name alone proves nothing about the model. ``migrate`` adds a digest of the settings with which datatrove's run was
started. A request finds its answer only under the digest of its own settings: with another model, it is asked anew.

datatrove counts no equal requests of a rollout, so such an answer is that of the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson
import xxhash

from datatrove_ckpt.checkpoint.request_cache import Answer, AnswerKey
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.documents import trim
from datatrove_ckpt.generation.run_identity import answering_flags
from datatrove_ckpt.inference.client.answers import is_ending
from datatrove_ckpt.rollouts import Payload

_PREFIX = "datatrove:"


def settings_of(config: InferenceConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a request gets besides what its rollout gives, of our config, or of datatrove's as JSON.

    Raises:
        KeyError, TypeError, ValueError: it is no config.
    """
    fields = vars(config) if isinstance(config, InferenceConfig) else config
    settings = {
        "model_name_or_path": fields["model_name_or_path"],
        "canned_answers": fields["server_type"] == "dummy",
        "use_chat": fields["use_chat"],
        "default_generation_params": fields["default_generation_params"],
        "model_kwargs": answering_flags(fields["model_kwargs"]),
    }
    plain: dict[str, Any] = orjson.loads(orjson.dumps(settings, option=orjson.OPT_NON_STR_KEYS, default=str))
    return plain


def settings_digest(config: InferenceConfig) -> str:
    """Tells whether two runs add the same to a request."""
    return str(xxhash.xxh3_64_hexdigest(orjson.dumps(settings_of(config), option=orjson.OPT_SORT_KEYS)))


def key_of(digest: str, rollout_idx: int, name: str) -> AnswerKey:
    """The key in our request cache of an answer that datatrove has kept under ``name``."""
    return AnswerKey(rollout_idx, f"{_PREFIX}{digest}:{name}", 0)


def result_of(kept: bytes) -> bytes | None:
    """A result as our request cache has it; None if it is no answer, or one that its server has not finished."""
    try:
        found = orjson.loads(kept)
        fields = {
            "text": found["text"],
            "finish_reason": found["finish_reason"],
            "usage": found["usage"],
            "reasoning": found.get("reasoning", ""),  # datatrove 0.8 and 0.9 have none
        }
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    is_right = isinstance(fields["text"], str | list) and isinstance(fields["usage"], dict)
    if not is_right or not isinstance(fields["reasoning"], str) or not is_ending(fields["finish_reason"]):
        return None
    return trim(orjson.dumps(fields))


def find(
    answers: Mapping[AnswerKey, Answer], key: AnswerKey, config: InferenceConfig, given: Payload, final: Payload
) -> Answer | None:
    """The answer of datatrove's to a request; None if there is none.

    Args:
        answers: those of the document.
        key: of the request.
        given: what the rollout gave to ``generate``.
        final: what would be sent.
    """
    if key.occurrence or not any(one.payload_hash.startswith(_PREFIX) for one in answers):
        return None
    if config.seed is not None and "seed" not in {**config.default_generation_params, **given}:
        return None  # datatrove has sent none
    digest = settings_digest(config)
    found = (answers.get(key_of(digest, key.rollout_idx, name)) for name in _names(given, final))
    return next((answer for answer in found if answer is not None), None)


def _names(*payloads: Payload) -> Iterator[str]:
    for payload in payloads:
        try:
            yield str(xxhash.xxh3_128_hexdigest(orjson.dumps(payload, option=orjson.OPT_SORT_KEYS)))
        except TypeError:  # datatrove could not send it, either
            return
