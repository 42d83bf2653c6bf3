"""Hashes, seeds and encodes the payload of a request."""

import orjson
import xxhash

from datatrove_ckpt.checkpoint.request_cache import payload_hash
from datatrove_ckpt.config.generation_params import PAYLOAD_JSON, refuse_unsendable
from datatrove_ckpt.inference.client.body import AnyBody, RequestBody
from datatrove_ckpt.output.document_codec import has_nan, trim
from datatrove_ckpt.rollouts import Payload
from datatrove_ckpt.rollouts.media import media_key, split_media

# The hash of a payload with such a key depends on the order of the keys inside.
_OF_TOOLS = ("arguments", "input")  # their nulls are values
_WITH_SCHEMA = frozenset({"response_format", "structured_outputs", "json_schema"})


def hash_payload(payload: Payload) -> str:
    """Hashes a payload, whatever the order of its keys.

    Raises:
        ConfigError: JSON cannot express the payload.
    """
    option = PAYLOAD_JSON | orjson.OPT_SORT_KEYS
    fields = payload
    if not _WITH_SCHEMA.isdisjoint(payload):
        option = PAYLOAD_JSON
        fields = dict(sorted(payload.items()))
    try:
        data = orjson.dumps(fields, option=option, default=media_key)
    except TypeError:
        refuse_unsendable(payload, default=media_key)
        raise
    if data.find(b"null") >= 0 and has_nan(payload):  # orjson writes null for NaN
        refuse_unsendable(payload, default=media_key)
    return payload_hash(data)


def body_of(payload: Payload) -> AnyBody:
    try:
        data = orjson.dumps(payload, option=PAYLOAD_JSON)
        if b":null" in data:
            data = orjson.dumps(_without_filled(payload), option=PAYLOAD_JSON)
        return trim(data)
    except TypeError:  # media: ``hash_payload`` has refused everything else
        return RequestBody(*split_media(_without_filled(payload), PAYLOAD_JSON))


def _without_filled(payload: Payload) -> Payload:
    """Returns the payload without the nulls with which Arrow fills the keys of other messages.
    OpenAI refuses them.

    The hash includes them, so that runs that have begun find their answers.
    """
    if "messages" not in payload:
        return payload
    return {**payload, "messages": _without_nulls(payload["messages"])}


def _without_nulls(value: object) -> object:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict) or not value:
        return value
    kept = {}
    for name, part in value.items():
        if name not in _OF_TOOLS:
            part = _without_nulls(part)
        if part is not None or name == "content":
            kept[name] = part
    return kept or None


def question_of(payload: Payload) -> str:
    """Returns the text of the last message, or the prompt, if it is a text."""
    try:
        question = payload["messages"][-1]["content"]
    except (
        LookupError,
        TypeError,
    ):  # messages may be anything that orjson writes, such as dataclasses
        question = payload.get("prompt")
    if isinstance(question, list):
        question = "\n".join(str(part.get("text", "")) for part in question if type(part) is dict)
    return question if isinstance(question, str) else ""


def request_seed(
    seed: int, ordinal: int, doc_id: str, rollout_idx: int, digest: str, occurrence: int
) -> int:
    """Returns the ``seed`` of a request: 0 to 2**31 - 1, which vLLM, SGLang, llama.cpp and OpenAI
    all take.

    Engines that honour seeds repeat their sample when a request is sent again. With one seed for
    all, two rollouts of a document would be one sample.

    Args:
        seed: ``InferenceConfig.seed``.
        ordinal: separates documents whose ids repeat.
        digest: hash of the payload without a seed. The number of the call would depend on the order
            of parallel calls.
        occurrence: number of earlier equal payloads in the rollout.
    """
    request = orjson.dumps([seed, ordinal, doc_id, rollout_idx, digest, occurrence])
    return int(xxhash.xxh3_64_intdigest(request)) >> (64 - 31)
