"""Converts a document to bytes and back, types included: the journal keeps all values that
datatrove's writers can write.

A value that is no plain JSON is wrapped as ``{"$py": [type, value]}``: dates, bytes, sets,
decimals, numpy values, NaN and infinity (null in JSON), ``InferenceResult``, and a user's dict with
a "$py" key. Tuples become lists, as with any JSON. Pickle was rejected, because loading it may run
foreign code. A usual finished document needs no wrapper: see ``encode_finished``.

A user's writer receives documents without copies. datatrove's default adapter copies everything
with ``dataclasses.asdict``. A document from a journal has no other owner, and is read with dicts in
place of dataclasses.

``as_read`` encodes a document before its rollout, so that its bytes identify it, whatever it holds:
an image, a tensor or a file that the rollout removes. A text replaces each value that ``encode``
cannot write: its type, and a hash of content that is equal after each start:

- PIL images: mode, size and pixels of the first frame. Most images have no encoded bytes any more.
- numpy arrays of objects or records, torch tensors: type, shape and content
- the decoders of videos and sound that ``datasets`` makes: their encoded bytes, or else the name of
  their file

Of other objects only the type counts: attributes may be addresses, times and counters, and a run
must not refuse its own input.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import datetime
import decimal
import enum
import importlib
import math
import pathlib
import re
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import orjson
import xxhash
from datatrove.data import Document, Media
from datatrove.pipeline.inference.types import InferenceResult
from datatrove.pipeline.writers.disk_base import DiskWriter
from datatrove.pipeline.writers.jsonl import JsonlWriter

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import likely_mistake, safe_repr, safe_text
from datatrove_ckpt.errors import DocumentNotSerializable
from datatrove_ckpt.output import formats
from datatrove_ckpt.output.arrow_types import Row
from datatrove_ckpt.output.file_names import FileNames, OurTemplate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_NAMES = frozenset({"text", "id", "media"})
_Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
_Convert = Callable[[Any], object]
"""Converts a value. Any: the functions of a type accept only values of this type."""

TAG = "$py"
_TAG_BYTES = b'"$py":'
_RESULT = re.compile(rb'"\$py":\["result"')
# A decimal of more digits, a longer duration and a time of a zone have no type in Arrow.
_USUAL = re.compile(
    rb'"\$py":\["(?:result"|bytes"|date"|datetime"|float"|timestamp"|time","[\d:.]+"'
    rb'|decimal","-?[\d.]{1,76}"|timedelta",\[-?\d{1,8},'
    rb'|(?:array|scalar)",\["<[fi][48]",(?:"|\[\d))'
)
_NEVER_NAN = frozenset({str, int, bool, type(None)})
_RESULTS = "$results"
_RESULTS_END = b'"}'  # others end with two braces
_DEEPEST = 254  # containers in each other, as for orjson
# These types go through ``_Encoder.wrap``, because orjson would lose their type.
_OPTIONS = (
    orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)


class Result(InferenceResult):  # type: ignore[misc]  # datatrove has no types
    """datatrove's result, with more fields of the answer.

    These are not written: the id differs in each run.

    Attributes:
        is_invalid: set by a rollout whose answer does not have the requested form.
    """

    __slots__ = ("endpoint", "faults", "model", "reasons", "response_id")
    # Orjson reads it from the class itself.
    __dataclass_fields__ = InferenceResult.__dataclass_fields__
    tool_calls: Sequence[JsonObject] = ()
    logprobs: JsonObject | None = None
    choices: Sequence[JsonObject] = ()
    answer: JsonObject | None = None
    is_invalid = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InferenceResult):
            return NotImplemented
        return _fields(self) == _fields(other)


@dataclasses.dataclass
class WholeResult(Result):
    """Tool calls, logprobs or several choices are written beside the text."""

    tool_calls: list[JsonObject] = dataclasses.field(default_factory=list)
    logprobs: JsonObject | None = None
    choices: list[JsonObject] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class PathResult(Result):
    """The answer of a path without completions, beside an empty text."""

    answer: JsonObject = dataclasses.field(default_factory=dict)


RESULTS = frozenset({Result, InferenceResult, WholeResult, PathResult})
for _kind in RESULTS:
    _kind.__name__ = "InferenceResult"


def result_of(
    fields: JsonObject, plain: type[InferenceResult] = InferenceResult
) -> InferenceResult:
    if "tool_calls" in fields:
        return WholeResult(**fields)
    if "answer" in fields:
        return PathResult(**fields)
    return plain(**fields)


Other = Callable[[object], object]
"""Returns plain JSON for a value without a JSON form. If it raises, the document is refused."""


class NotEncodable(TypeError):
    """A value has no JSON form."""


def encode(document: Document) -> bytes:
    """Returns the document as one line of JSON without a line break.

    Raises:
        DocumentNotSerializable: a value has no JSON form; the error names the document and the
            value.
    """
    try:
        return trim(dump(document_fields(document), _refuse))
    except Exception as error:  # also an error of a user's ``__repr__``
        name = safe_repr(getattr(document, "id", None))
        raise DocumentNotSerializable(
            f"Document {name} holds a value that cannot be kept: "
            f"{safe_text(error)}{likely_mistake(error)}. The rollout may return only JSON, "
            "dates, bytes and numpy values."
        ) from error


def encode_finished(document: Document, key: str) -> bytes:
    """Encodes a document; a usual document becomes, byte for byte, a line of ``JsonlWriter``
    (``line_of``).

    A usual document has JSON only, no media, and a list of only InferenceResults at ``key`` of its
    metadata. They become plain objects, and a last field, "$results", names the key.
    """
    text = document.text
    metadata = document.metadata
    results = metadata.get(key)
    is_usual = (
        isinstance(text, str)
        and isinstance(document.id, str)
        and (text and document.id and results)  # JsonlWriter omits empty fields
        and isinstance(metadata, dict)
        and _NAMES.isdisjoint(metadata)  # which would replace them as columns
        and isinstance(document.media, list)
        and not document.media
        and RESULTS.issuperset(map(type, results))
    )
    if not is_usual:
        return encode(document)
    metadata = {**metadata, key: [_fields(result) for result in results]}
    fields = {"text": text, "id": document.id, "metadata": metadata, _RESULTS: key}
    try:
        data = orjson.dumps(fields, option=_OPTIONS)
    except TypeError:
        return encode(document)
    start = len(text)  # searching the text would cost most of this
    if data.find(_TAG_BYTES, start) < 0 and (
        data.find(b"null", start) < 0 or not has_nan(metadata)
    ):
        return trim(data)
    return encode(document)


def line_of(data: bytes, expand_metadata: bool = False) -> bytes | None:
    """Returns the line that ``JsonlWriter`` writes; None if the document must be parsed for it."""
    if not data.endswith(_RESULTS_END):
        return None
    line = data[: data.rindex(b',"$results":"')]
    if not expand_metadata:
        return line + b"}\n"
    # Quotes inside texts and ids are escaped.
    document_fields, _, metadata = line.partition(b',"metadata":{')
    return b"%b,%b\n" % (document_fields, metadata)


def dump(fields: dict[str, object], other: Other) -> bytes:
    """Returns a document's fields as JSON; ``other`` replaces values without a JSON form.

    Raises:
        Exception: any error of ``other`` or of a user's class.
    """
    encoder = _Encoder(other)
    try:
        data = orjson.dumps(fields, default=encoder.wrap, option=_OPTIONS)
        # orjson calls ``wrap`` neither for NaN (null) nor for a user's "$py" key, but the bytes
        # behind the text show both.
        text = fields["text"]
        start = len(text) if isinstance(text, str) else 0
        if data.count(_TAG_BYTES, start) == encoder.wrapped and (
            data.find(b"null", start) < 0 or not has_nan(fields)
        ):
            return data
    except orjson.JSONEncodeError as error:
        # An integer beyond 64 bits or a key that is no string: too rare to check first.
        if isinstance(error.__cause__, NotEncodable):
            raise NotEncodable(*error.__cause__.args) from error.__cause__.__cause__
    return orjson.dumps(wrap_deep(fields, other))


def document_fields(document: Document) -> dict[str, object]:
    if not isinstance(document.text, str):
        raise TypeError(f"its text is of type {type(document.text).__name__}, not str")
    if not isinstance(document.metadata, dict):
        raise TypeError(f"its metadata is of type {type(document.metadata).__name__}, not dict")
    media = document.media
    # A generator costs as much as all else here.
    if media not in (None, []) and not (
        isinstance(media, list) and all(isinstance(part, Media | dict) for part in media)
    ):
        raise TypeError("its media is no list of Media")
    return {"text": document.text, "id": document.id, "media": media, "metadata": document.metadata}


def is_plain(data: bytes, with_usual: bool = False) -> bool:
    """Whether an encoded document holds only JSON and InferenceResults, so that every writer can
    write it.

    Args:
        with_usual: whether numbers and vectors of numpy, and values that a column of Arrow holds,
            count as JSON.
    """
    if data.endswith(_RESULTS_END):
        return True
    plain = _USUAL if with_usual else _RESULT
    return len(plain.findall(data)) == data.count(_TAG_BYTES)


def has_nan(value: object) -> bool:
    values: Collection[object]
    if type(value) is dict:
        values = value.values()
    elif type(value) is list:
        if _NEVER_NAN.issuperset(map(type, value)):
            return False
        values = value
    else:
        return _has_other_nan(value)
    for item in values:
        kind = type(item)
        if kind in _NEVER_NAN:
            continue
        if kind is float:
            if item - item != 0:
                return True
        elif has_nan(item):
            return True
    return False


def _has_other_nan(value: object) -> bool:
    if type(value) not in RESULTS:
        value = as_plain(value)
    if isinstance(value, InferenceResult | Media):
        value = _fields(value)
    if isinstance(value, float | complex):
        return value - value != 0
    if isinstance(value, np.inexact) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "fc"
    ):
        return not np.isfinite(value).all()
    if isinstance(value, dict):
        return has_nan(list(value.values()))
    return isinstance(value, list | tuple | set | frozenset) and has_nan(list(value))


def trim(data: bytes) -> bytes:
    """Copies the bytes: ``orjson.dumps`` returns a buffer seven times as large."""
    return b"".join((data, b""))


def decode(data: bytes) -> Document:
    return _decoded(data, _READERS)


def decode_plain(data: bytes) -> Document:
    """Decodes results and media as dicts, as from ``dataclasses.asdict``."""
    return _plain(data, _PLAIN_READERS)


def decode_json(data: bytes) -> Document:
    """Does ``decode_plain`` with JSON forms of the types that orjson lacks."""
    document = _plain(data, _JSON_READERS)
    for media in document.media or ():
        if media["media_bytes"] is not None:
            media["media_bytes"] = base64.b64decode(media["media_bytes"])
    return document


def decode_rows(data: bytes) -> Document:
    """Does ``decode_plain`` with lists of rows for arrays of several dimensions, for Arrow."""
    return _plain(data, _ROW_READERS)


def as_json(array: _Array) -> object:
    """Uses the shortest digits of the array's type; returns the array if it has no JSON."""
    try:
        return orjson.Fragment(orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY))
    except TypeError:
        return array


def _plain(data: bytes, readers: dict[str, _Convert]) -> Document:
    document = _decoded(data, readers)
    if document.media:
        document.media = [_fields(media) for media in document.media]
    return document


def _decoded(data: bytes, readers: dict[str, _Convert]) -> Document:
    fields = orjson.loads(data)
    key = fields.pop(_RESULTS, None)
    if key is not None:
        fields["metadata"][key] = [readers["result"](result) for result in fields["metadata"][key]]
    elif _TAG_BYTES in data:
        fields = _unwrap(fields, readers)
    if fields.get("media"):
        fields["media"] = [
            media if isinstance(media, Media) else Media(**media) for media in fields["media"]
        ]
    return Document(**fields)


def fingerprint(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _array(value: _Array) -> list[object]:
    if value.dtype.hasobject:
        raise NotEncodable
    return [
        value.dtype.str,
        list(value.shape),
        base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
    ]


def _scalar(value: np.generic) -> list[object]:
    if value.dtype.hasobject or value.dtype.fields:
        raise NotEncodable
    return [value.dtype.str, base64.b64encode(value.tobytes()).decode()]


def _view(value: tuple[str, list[int], str]) -> _Array:
    dtype, shape, data = value
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)


def _rows(array: _Array) -> object:
    if array.ndim < 2:
        return array
    return list(map(_rows, array))


def _from_scalar(value: tuple[str, str]) -> np.generic:
    dtype, data = value
    scalar: np.generic = np.frombuffer(base64.b64decode(data), dtype)[0]
    return scalar


def _elements(value: frozenset[object]) -> list[object]:
    return sorted(value, key=repr)


def _fields(value: DataclassInstance) -> dict[str, object]:
    return {name: getattr(value, name) for name in field_names(type(value))}


@cache
def field_names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


# (name, type, to JSON, from JSON). The first type that matches is used, so subclasses come before
# their bases.
_TYPES: list[tuple[str, type, _Convert, _Convert]] = [
    ("result", InferenceResult, _fields, result_of),
    ("media", Media, _fields, lambda value: Media(**value)),
    ("array", np.ndarray, _array, lambda value: _view(value).copy()),
    ("scalar", np.generic, _scalar, _from_scalar),
    ("datetime", datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    ("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    ("time", datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    (
        "timedelta",
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda value: datetime.timedelta(*value),
    ),
    ("bytes", bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    ("decimal", decimal.Decimal, str, decimal.Decimal),
    ("set", set, _elements, set),
    ("frozenset", frozenset, _elements, frozenset),
    ("complex", complex, lambda value: [value.real, value.imag], lambda value: complex(*value)),
]
_PLAIN_TYPES: tuple[type, ...] = (str, bool, int, float, dict, list, tuple)
_READERS = {name: read for name, _, _, read in _TYPES} | {
    "dict": dict,
    "float": float,
    "int": int,
    "surrogates": lambda value: base64.b64decode(value).decode("utf-8", "surrogatepass"),
    "timestamp": lambda value: importlib.import_module("pandas").Timestamp(value),
}
_PLAIN_READERS = _READERS | {"result": lambda value: value, "media": lambda value: value}
_JSON_READERS = _PLAIN_READERS | {
    "array": lambda value: as_json(_view(value)),
    "bytes": str,
    "decimal": str,
    "int": orjson.Fragment,
    "scalar": lambda value: for_orjson(_from_scalar(value)),
    "timedelta": lambda value: datetime.timedelta(*value).total_seconds(),
}
_ROW_READERS = _PLAIN_READERS | {"array": lambda value: _rows(_view(value))}


class _Encoder:
    __slots__ = ("_other", "wrapped")

    def __init__(self, other: Other) -> None:
        self._other = other
        self.wrapped = 0

    def wrap(self, value: object) -> object:
        if type(value) not in RESULTS:
            plain = as_plain(value)
            if plain is not value:
                return plain
        wrapped = _wrapped(value)
        if wrapped is None:
            return self._other(value)
        self.wrapped += 1
        return wrapped


def _refuse(value: object) -> NoReturn:
    if isinstance(value, np.ndarray):
        raise NotEncodable(f"a numpy array of type {value.dtype}")
    cause = value if isinstance(value, BaseException) else None
    raise NotEncodable(f"{safe_repr(value)} of type {type(value).__qualname__}") from cause


def as_plain(value: object) -> object:
    if type(value) in _PLAIN_TYPES:  # first: True is also an int
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.str_) and not value:  # numpy has no array of it
        return ""
    if isinstance(value, np.generic | np.ndarray | InferenceResult | Media):
        return value
    if isinstance(value, datetime.datetime) and value != value:
        return None  # pandas.NaT, which JsonlWriter also writes as null
    if isinstance(value, pathlib.PurePath | uuid.UUID):
        return str(value)
    for base in _PLAIN_TYPES:
        if isinstance(value, base):
            return base(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    return value


def _wrapped(value: object) -> dict[str, list[object]] | None:
    # Only pandas has nanoseconds.
    if isinstance(value, datetime.datetime) and getattr(value, "nanosecond", False):
        return {TAG: ["timestamp", value.isoformat()]}
    if isinstance(value, datetime.timedelta) and getattr(value, "nanoseconds", False):
        return None
    for name, kind, write, _ in _TYPES:
        if isinstance(value, kind):
            try:
                return {TAG: [name, write(value)]}
            except NotEncodable:
                return None
    return None


def wrap_deep(value: object, other: Other, depth: int = _DEEPEST) -> object:
    """Raises NotEncodable if a value has no JSON form, or a container contains itself."""
    value = as_plain(value)
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, np.generic):  # before float: numpy.float64 is a subclass of it
        return _wrapped(value) or other(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return {TAG: ["float", str(value)]}
    if isinstance(value, int):
        if -(2**63) <= value < 2**64:
            return value
        return {TAG: ["int", str(value)]}
    if not depth:
        raise NotEncodable(
            f"a {type(value).__qualname__} that holds itself, or is in more than {_DEEPEST} others"
        )
    wrap = partial(wrap_deep, other=other, depth=depth - 1)
    if isinstance(value, dict):
        if TAG in value or not all(type(key) is str for key in value):
            return {TAG: ["dict", [[wrap(key), wrap(item)] for key, item in value.items()]]}
        return {key: wrap(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [wrap(item) for item in value]
    wrapped = _wrapped(value)
    if wrapped is None:
        return other(value)
    name, inner = wrapped[TAG]
    return {TAG: [name, wrap(inner)]}


def _unwrap(value: object, readers: dict[str, _Convert]) -> object:
    if type(value) is dict:
        if TAG in value:
            name, inner = value[TAG]
            return readers[name](_unwrap(inner, readers))
        items: Any = value.items()
    elif type(value) is list:
        items = enumerate(value)
    else:
        return value
    for key, item in items:
        if type(item) is dict or type(item) is list:
            value[key] = _unwrap(item, readers)
    return value


def document_of(row: JsonObject) -> Document:
    metadata = row.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {name: value for name, value in row.items() if name not in (*_NAMES, "metadata")}
    return Document(row.get("text") or "", str(row.get("id")), metadata=metadata)


_DEFAULT = DiskWriter._default_adapter  # making a writer costs 25 ms
"""datatrove's default adapter."""
_DOCUMENT_FIELDS = field_names(Document)


def has_default_adapter(writer: DiskWriter) -> bool:
    return getattr(writer.adapter, "__func__", None) is _DEFAULT


def is_usual(writer: DiskWriter) -> bool:
    return has_default_adapter(writer) and type(writer).write is DiskWriter.write


def decode_for(writer: DiskWriter) -> Callable[[bytes], Document]:
    """Replaces datatrove's default adapter.

    datatrove's JsonlWriter accepts no arrays, and receives them as JSON; its ParquetWriter accepts
    arrays of one dimension.
    """
    is_json = formats.JSONL.is_written_by(writer)
    if is_usual(writer):
        writer.adapter = MethodType(_plain_adapter, writer)
        if is_json:
            return decode_json
        if formats.PARQUET.is_written_by(writer):
            return decode_rows
        return decode_plain
    if is_json:
        writer.adapter = partial(_json_row, writer.adapter)
    return decode


def _json_row(adapter: Callable[[Document], Row], document: Document) -> Row:
    row = adapter(document)
    columns = {name: value for name, value in row.items() if name != "media"}
    try:
        orjson.dumps(columns)
    except TypeError:
        return row | {name: for_orjson(value) for name, value in columns.items()}
    return row


def for_orjson(value: object) -> object:
    if isinstance(value, dict):
        return {key: for_orjson(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [for_orjson(item) for item in value]
    if isinstance(value, np.ndarray):
        return as_json(value)
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if type(value) is int:
        return orjson.Fragment(str(value))
    return value


RowsOf = Callable[[Document], Iterable[Document]]


def one_row(document: Document) -> Iterable[Document]:
    return (document,)


def exploded(document: Document, *, column: str, key: str) -> Iterator[Document]:
    """Yields a row for each item in a column of the metadata. ``n``, and the keys of an item that
    is a dictionary, become columns beside the document's columns. A name that is in use is prefixed
    with ``column``.

    Args:
        key: key of the whole results, which only the first row has.
    """
    metadata = document.metadata
    items = metadata.pop(column)
    used_names = {*metadata, *_NAMES}
    for n, item in enumerate(items):
        row = {**metadata}
        fields = item if isinstance(item, dict) else {column: item}
        for field, value in [("n", n), *fields.items()]:
            name = str(field)
            while name in used_names or name in row:
                name = f"{column}_{name}"
            row[name] = value
        media = list(map(copy.copy, document.media or ()))
        yield Document(document.text, f"{document.id}/{n}", media, row)
        metadata.pop(key, None)


def number_column(
    row: Row, number: str, column: str, key: str, own: Collection[str] = ()
) -> str | None:
    """Returns the name of the column ``n`` in a row of ``exploded``, if it has one."""
    names = [*row]
    item_names = names
    results = row.get(key)
    # The first row has the whole results, in CSV as text, as the last of the document's own.
    if results is not None and not (isinstance(results, str) and not results):
        item_names = names[names.index(key) + 1 :]
    name = "n"
    while name in row:
        if name in item_names and name not in own and str(row[name]) == number:
            return name
        name = f"{column}_{name}"
    return None


def write_for(
    writer: DiskWriter,
    decode: Callable[[bytes], Document],
    names: FileNames,
    chunk_index: int,
    rows: RowsOf = one_row,
) -> Callable[[bytes], object]:
    """Returns the function that writes an encoded document, with the same bytes as
    ``DiskWriter.write``.

    Args:
        writer: a copy of the user's writer. Its stats are switched off: they would double the cost.
    """
    filled = ""
    if not names.fields:
        filled = names.fill({"chunk_index": names.chunk_field(chunk_index)})
    writer.output_filename = OurTemplate(names, filled)
    writer.stat_update = _count_nothing
    writer.update_doc_stats = _count_nothing

    def write(data: bytes) -> None:
        document = decode(data)
        keywords = names.keywords(document, chunk_index)
        for row in rows(document):
            writer.write(row, names.rank, **keywords)
            if rows is not one_row:
                writer.output_mg.last.count_row()

    def write_line(data: bytes) -> None:
        line = line_of(data, writer.expand_metadata)
        if line is None:
            write(data)
        else:
            writer.output_mg.get_file(filled).write(line)

    has_lines = type(writer) is JsonlWriter and decode is decode_json and rows is one_row
    if not has_lines or not filled or writer.max_file_size > 0:
        return write
    return write_line


def _count_nothing(*numbers: object) -> None:
    pass


def writes_media(writer: DiskWriter) -> bool:
    return not is_usual(writer) or bool(getattr(writer, "save_media_bytes", True))


def _plain_adapter(writer: DiskWriter, document: Document) -> Row:
    data = {}
    for name in _DOCUMENT_FIELDS:
        value = getattr(document, name)
        if value or (
            name == "id" and value == 0
        ):  # unlike datatrove's adapter, which omits an id of 0
            data[name] = value
    if writer.expand_metadata and "metadata" in data:
        data |= data.pop("metadata")
    if not writer.save_media_bytes and "media" in data:
        data["media"] = [{**media, "media_bytes": None} for media in data["media"]]
    return data


# documents as they were read ----------------------------------------------------------------------


# Below the limits of orjson and of Python's stack.
_DEEPEST_READ = 50


@dataclasses.dataclass(slots=True)
class EncodedInput:
    """A document as it was read.

    Attributes:
        data: fields as JSON, for its fingerprint and a dead letter.
        size: rough size in memory, in bytes, with images and tensors.
    """

    data: bytes
    size: int


def as_read(document: Document) -> EncodedInput:
    """Encodes any document, and never fails. Equal documents give equal bytes in any process.

    A lone surrogate survives. A container that contains itself is cut off where it repeats.
    """
    describe = _ValueDescription()
    try:
        data = dump(document_fields(document), describe)
    except Exception:
        fields = {name: getattr(document, name, None) for name in _DOCUMENT_FIELDS}
        data = orjson.dumps(describe.wrap(fields, _DEEPEST_READ))
    return EncodedInput(data, len(data) + describe.hashed_bytes)


class _ValueDescription:
    """Describes values of a document that cannot be encoded.

    ``wrap`` makes plain JSON from any value: surrogates, keys of any type, containers that contain
    themselves.
    """

    def __init__(self) -> None:
        self.hashed_bytes = 0
        self._inside = False
        self._above: set[int] = set()

    def __call__(self, value: object) -> str:
        try:
            return _named(value, self._facts(value))
        except Exception:
            return _named(value)

    def _facts(self, value: object) -> str:
        # A module that is not imported has made no value.
        image = sys.modules.get("PIL.Image")
        if image is not None and isinstance(value, image.Image):
            return self._image(value)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return f"{value.dtype} {tuple(value.shape)} {self._hash(data)}"
        if isinstance(encoded := getattr(value, "_hf_encoded", None), dict):
            if encoded.get("bytes") is not None:
                return self._hash(encoded["bytes"])
            # A cache may be elsewhere on the next node.
            return safe_text(encoded.get("path")).rpartition("/")[2]
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject:
                described = self._items(value.ravel().tolist())
            else:
                described = self._hash(value.tobytes())
            return f"{value.dtype} {value.shape} {described}"
        return ""

    def _image(self, image: Any) -> str:
        self.hashed_bytes += image.width * image.height * len(image.getbands())
        digest = xxhash.xxh3_128(image.tobytes())
        digest.update(bytes(image.getpalette() or b"") if image.mode in ("P", "PA") else b"")
        return f"{image.mode} {image.width}x{image.height} {digest.hexdigest()}"

    def _items(self, items: list[object]) -> str:
        if self._inside:
            return ""
        self._inside = True
        try:
            return self._hash(orjson.dumps(self.wrap(items, _DEEPEST_READ)))
        finally:
            self._inside = False

    def _hash(self, data: Any) -> str:
        self.hashed_bytes += len(data)
        return xxhash.xxh3_128_hexdigest(data)

    def wrap(self, value: object, depth: int) -> object:
        try:
            plain = as_plain(value)
            if not isinstance(plain, str | dict | list | tuple):
                wrapped = wrap_deep(plain, self)
                orjson.dumps(wrapped)
                return wrapped
        except Exception:
            return _named(value)
        if isinstance(plain, str):
            try:
                plain.encode()
            except UnicodeEncodeError:
                data = base64.b64encode(plain.encode("utf-8", "surrogatepass"))
                return {TAG: ["surrogates", data.decode()]}
            return plain
        if id(value) in self._above:
            return _named(value, "that holds itself")
        if depth == 0:
            return _named(value)
        self._above.add(id(value))
        depth -= 1
        if isinstance(plain, dict):
            pairs = [[self.wrap(key, depth), self.wrap(item, depth)] for key, item in plain.items()]
            wrapped = {TAG: ["dict", pairs]}
        else:
            wrapped = [self.wrap(item, depth) for item in plain]
        self._above.discard(id(value))
        return wrapped


def _named(value: object, facts: str = "") -> str:
    kind = type(value)
    if kind.__module__ == "builtins":
        name = kind.__qualname__
    else:
        name = f"{kind.__module__}.{kind.__qualname__}"
    return f"<{safe_text(name)}{' ' if facts else ''}{safe_text(facts)}, which cannot be kept>"
