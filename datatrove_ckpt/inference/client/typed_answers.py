"""Parses answers that are numbers: embeddings, classes and scores, in the forms of all engines.

    way       OpenAI, vLLM                  SGLang                     llama.cpp
    embed     data[] index, embedding       the same                   the same
    classify  data[] index, label, probs    the same
    score     data[] index, score           [] index, score (rerank)   results[] index,
                                                                       relevance_score (rerank)

Arrays are kept exactly, as base64 of little-endian float32 values. An answer that lacks a value, or
has NaN or infinity (null in JSON), is retried.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.inference.client.answers import (
    Completion,
    RetryableError,
    UnknownForm,
    Way,
    other_than_text,
    read_json,
    way_to,
)

Floats = npt.NDArray[np.float32]
_Number = TypeVar("_Number", np.float32, np.float64)
_FLOAT32 = np.dtype("<f4")  # as in base64
_ROWS = ("data", "results")


def typed_way(name: str, path: str, count: int) -> Way:
    """Returns the way to a typed answer ("embed", "classify" or "score") about ``count`` texts."""
    return Way(
        way_to(path).path,
        partial(_PARSERS[name], count=count),
        f"{name}()",
        is_shared=name == "embed",
    )


class Base64(str):
    """A kept array, with its decoded form, because decoding is slow."""

    __slots__ = ("values",)
    values: Floats


def to_base64(values: Floats, text: str | None = None) -> Base64:
    kept = Base64(
        base64.b64encode(np.ascontiguousarray(values, _FLOAT32).data).decode()
        if text is None
        else text
    )
    kept.values = values
    return kept


def from_base64(text: str) -> Floats:
    """Returns the array that was kept, bit for bit, writable."""
    if isinstance(text, Base64):
        return text.values.copy()
    return np.frombuffer(bytearray(base64.b64decode(text)), _FLOAT32)


def parse_embeddings(raw: bytes, *, count: int) -> Completion:
    """``embeddings``: vectors of one length, in the order of their texts, in base64."""
    answer, rows = _rows(raw, count)
    vectors = [_vector(row.get("embedding")) for row in rows]
    if len({len(vector) for vector in vectors}) > 1:
        raise RetryableError("the answer's embeddings have different lengths")
    texts = [row["embedding"] if isinstance(row["embedding"], str) else None for row in rows]
    return other_than_text(answer, {"embeddings": list(map(to_base64, vectors, texts))})


def parse_classes(raw: bytes, *, count: int) -> Completion:
    """``label``, None if the server does not name it, and ``probabilities`` of all classes in the
    model's order.
    """
    answer, (row,) = _rows(raw, count)
    label = row.get("label")
    if not (label is None or isinstance(label, str)):
        raise RetryableError("the answer's label is no text")
    # Exact: a threshold may be equal.
    probabilities = _numbers(row.get("probs"), "probs", np.float64).tolist()
    return other_than_text(answer, {"label": label, "probabilities": probabilities})


def parse_scores(raw: bytes, *, count: int) -> Completion:
    """``scores`` in the order of the texts, base64."""
    answer, rows = _rows(raw, count)
    scores = [row.get("relevance_score", row.get("score")) for row in rows]
    return other_than_text(answer, {"scores": to_base64(_numbers(scores, "scores", np.float32))})


_PARSERS: dict[str, Callable[..., Completion]] = {
    "embed": parse_embeddings,
    "classify": parse_classes,
    "score": parse_scores,
}


def _rows(raw: bytes, count: int) -> tuple[JsonObject, list[JsonObject]]:
    """Returns the answer and its ``count`` rows in the order of their indices.

    Without an index, the rows of ``data`` are in order. Several others are a ranking.
    """
    answer, rows = _read(raw)
    indices = list(range(len(rows)))
    in_order = count == 1 or rows is answer.get("data")
    if not in_order or any("index" in row for row in rows):
        indices = [row.get("index", "missing") for row in rows]
    if not all(type(index) is int for index in indices) or sorted(indices) != list(range(count)):
        raise RetryableError(
            f"the answer has {len(rows)} rows with the indices {indices[:9]}, not one for each text"
        )
    return answer, [
        row for _, row in sorted(zip(indices, rows, strict=True), key=lambda pair: pair[0])
    ]


def _read(raw: bytes) -> tuple[JsonObject, list[JsonObject]]:
    found = read_json(raw)
    answer: JsonObject = {}
    if isinstance(found, list):
        answer = {"results": found, "usage": {"prompt_tokens": sum(map(_prompt_tokens, found))}}
    elif isinstance(found, dict):
        answer = found
    rows = next((answer[name] for name in _ROWS if isinstance(answer.get(name), list)), None)
    if rows is None or not all(isinstance(row, dict) for row in rows):
        raise UnknownForm("the answer has no data")
    return answer, rows


def _prompt_tokens(row: object) -> int:
    meta = row.get("meta_info") if isinstance(row, dict) else None
    tokens = meta.get("prompt_tokens") if isinstance(meta, dict) else 0
    if type(tokens) is int:
        return tokens
    return 0


def _vector(value: object) -> Floats:
    if not isinstance(value, str):
        return _numbers(value, "embedding", np.float32)
    try:
        vector = np.frombuffer(base64.b64decode(value, validate=True), _FLOAT32)
    except (binascii.Error, ValueError):
        raise RetryableError("the answer's embedding is no base64 of float32 values") from None
    return _checked(vector, "embedding")


def _numbers(value: object, name: str, kind: type[_Number]) -> npt.NDArray[_Number]:
    # numpy would convert True and "1" to numbers, and converts None to NaN.
    kinds = {float, int, type(None)}
    if not isinstance(value, list) or not kinds.issuperset(map(type, value)):
        raise UnknownForm(f"the answer's {name!r} is no list of numbers")
    with np.errstate(over="ignore"):
        return _checked(np.array(value, kind), name)


def _checked(values: npt.NDArray[_Number], name: str) -> npt.NDArray[_Number]:
    if not values.size or not np.isfinite(values).all():
        raise RetryableError(f"the answer's {name!r} is empty, or holds NaN or infinity")
    return values
