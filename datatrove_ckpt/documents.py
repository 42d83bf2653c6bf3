"""A document as bytes and back, types included: what datatrove's writers can write, the journal can keep.

Plain JSON values are themselves. Any other is ``{"$py": [type, value]}``: dates, numpy scalars and arrays, bytes,
sets, decimals, NaN and infinity (which JSON would turn into null), ``InferenceResult``. A dict of the user's
that has a "$py" key is itself wrapped, so nothing is ever mistaken for a wrapper. Tuples come back as lists, as from
any JSON. Pickle would keep more, and would run whatever lies in the folder.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import xxhash
from datatrove.data import Document, Media
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.errors import DocumentNotSerializable

_TAG = "$py"
_TAG_BYTES = b'"$py":'
# Everything that orjson would write without telling us what it was goes through ``_Encoder.wrap``.
_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS


def encode(document: Document) -> bytes:
    """The document as one line of JSON without a line break.

    Raises:
        DocumentNotSerializable: naming the document and the value.
    """
    fields = {"text": document.text, "id": document.id, "media": document.media, "metadata": document.metadata}
    encoder = _Encoder()
    try:
        try:
            data = orjson.dumps(fields, default=encoder.wrap, option=_OPTIONS)
        except orjson.JSONEncodeError:
            # Integers beyond 64 bits, keys that are no strings: rare enough to be found by trying.
            return trim(orjson.dumps(_wrap_deep(fields)))
        # orjson writes NaN as null, and a "$py" key of the user's as such, without asking. Both leave a trace.
        if data.count(_TAG_BYTES) != encoder.wrapped or (b"null" in data and _has_nan(fields)):
            return trim(orjson.dumps(_wrap_deep(fields)))
    except (TypeError, ValueError, RecursionError) as error:
        raise DocumentNotSerializable(
            f"Document {document.id!r} holds a value that cannot be kept: {error}. Let the rollout return, and the "
            "steps before it set, JSON values, dates, bytes or numpy values."
        ) from error
    return trim(data)


def _has_nan(fields: dict[str, Any]) -> bool:
    """Whether a null may stand for NaN or infinity. Asked of the standard library's encoder, which is C, too."""
    try:
        json.dumps(fields, allow_nan=False, default=_ignored)
    except ValueError:
        return True
    return False


def _ignored(value: Any) -> Any:
    plain = _plain(value)
    if plain is not value:
        return plain
    if isinstance(value, InferenceResult | Media):
        return _fields(value)
    return 0  # ``_Encoder`` has kept it


def trim(data: bytes) -> bytes:
    """``orjson.dumps(...)`` without the room that orjson leaves behind it: seven times its length (3.13, measured)."""
    return b"%b" % data


def decode(data: bytes) -> Document:
    """The document that ``encode`` was given."""
    fields = orjson.loads(data)
    if _TAG_BYTES in data:
        fields = _unwrap(fields)
    if fields["media"]:
        fields["media"] = [media if isinstance(media, Media) else Media(**media) for media in fields["media"]]
    return Document(**fields)


def fingerprint(data: bytes) -> str:
    """xxh64 of an encoded document, as 16 hexadecimal digits."""
    return str(xxhash.xxh3_64_hexdigest(data))


def _array(value: np.ndarray[Any, Any]) -> list[Any]:
    if value.dtype.hasobject:
        raise TypeError(f"a numpy array of type {value.dtype}")
    return [value.dtype.str, list(value.shape), base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()]


def _scalar(value: np.generic) -> list[Any]:
    if value.dtype.hasobject or value.dtype.fields:
        raise TypeError(f"a numpy value of type {value.dtype}")
    return [value.dtype.str, base64.b64encode(value.tobytes()).decode()]


def _from_array(value: list[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(value[2]), dtype=value[0]).reshape(value[1]).copy()


def _from_scalar(value: list[Any]) -> np.generic:
    scalar: np.generic = np.frombuffer(base64.b64decode(value[1]), dtype=value[0])[0]
    return scalar


def _from_delta(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


# (name, type, to JSON, from JSON); the first type that fits is taken, so subclasses stand before their bases.
_TYPES: list[tuple[str, type, Callable[[Any], Any], Callable[[Any], Any]]] = [
    ("result", InferenceResult, _fields, lambda value: InferenceResult(**value)),
    ("media", Media, _fields, lambda value: Media(**value)),
    ("array", np.ndarray, _array, _from_array),
    ("scalar", np.generic, _scalar, _from_scalar),
    ("datetime", datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    ("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    ("time", datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    ("timedelta", datetime.timedelta, _from_delta, lambda value: datetime.timedelta(*value)),
    ("bytes", bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    ("decimal", decimal.Decimal, str, decimal.Decimal),
    ("set", set, lambda value: sorted(value, key=repr), set),
    ("frozenset", frozenset, lambda value: sorted(value, key=repr), frozenset),
    ("complex", complex, lambda value: [value.real, value.imag], lambda value: complex(*value)),
]
_READERS = {name: read for name, _, _, read in _TYPES}
_READERS["dict"] = lambda value: dict(value)
_READERS["float"] = float
_READERS["int"] = int


class _Encoder:
    """orjson's ``default`` hook, counting what it wrapped."""

    __slots__ = ("wrapped",)

    def __init__(self) -> None:
        self.wrapped = 0

    def wrap(self, value: Any) -> Any:
        plain = _plain(value)
        if plain is not value:
            return plain
        self.wrapped += 1
        return _wrapped(value)


def _plain(value: Any) -> Any:
    """What JSON can say as well as the value can: enums, paths, subclasses of plain types, other dataclasses."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic | np.ndarray | InferenceResult | Media):
        return value
    if isinstance(value, datetime.datetime) and value != value:
        return None  # pandas.NaT, which datatrove's JsonlWriter writes as null, too
    if isinstance(value, pathlib.PurePath | uuid.UUID):
        return str(value)  # as orjson writes a UUID without asking
    base: Any
    for base in (str, bool, int, float, dict, list, tuple):
        if isinstance(value, base) and type(value) is not base:
            return base(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    return value


def _wrapped(value: Any) -> dict[str, Any]:
    for name, kind, write, _ in _TYPES:
        if isinstance(value, kind):
            return {_TAG: [name, write(value)]}
    raise TypeError(f"{_shorten(value)} of type {type(value).__qualname__}")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _wrap_deep(value: Any) -> Any:
    """The same structure in plain JSON values only."""
    value = _plain(value)
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, dict):
        if _TAG in value or not all(type(key) is str for key in value):
            return {_TAG: ["dict", [[_wrap_deep(key), _wrap_deep(item)] for key, item in value.items()]]}
        return {key: _wrap_deep(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_wrap_deep(item) for item in value]
    if isinstance(value, np.generic):  # numpy.float64 is a float, too
        return _wrapped(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: ["float", str(value)]}
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else {_TAG: ["int", str(value)]}
    return {_TAG: [(wrapped := _wrapped(value)[_TAG])[0], _wrap_deep(wrapped[1])]}


def _unwrap(value: Any) -> Any:
    if type(value) is list:
        return [_unwrap(item) for item in value]
    if type(value) is not dict:
        return value
    if _TAG in value:
        name, inner = value[_TAG]
        return _READERS[name](_unwrap(inner))
    return {key: _unwrap(item) for key, item in value.items()}
