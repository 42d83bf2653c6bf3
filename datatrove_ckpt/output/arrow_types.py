"""The Arrow type of Python values, and the one type that holds the values of two, without changing any value.

Arrow's own inference and its ``unify_schemas`` change values silently: True beside 0.5 becomes 1.0, a time beside a
date loses the time of day, a time zone beside none is dropped, text beside bytes becomes bytes. So only what is named
here is united: no value with anything, integers of any widths, integers with floats (Arrow refuses those that a float
cannot hold), decimals, times of any unit, times of any two zones (as UTC), dicts and
lists of those.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import time
from functools import cache
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from datatrove.data import Document
from datatrove.io import DataFolder
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.formatting import safe_repr, safe_text
from datatrove_ckpt.output.formats import PARQUET

# pyarrow has no types.
DataType: TypeAlias = Any

_LISTS = (list, tuple, set)
_PLAIN = (bool, int, float, str, bytes, dict)
_INT64 = range(-(2**63), 2**63)


class NotUnited(Exception):
    """Two types of one column. ``column``: a path as in ``metadata.scores[]``."""

    def __init__(self, column: str, old: object, new: object) -> None:
        super().__init__(column, old, new)
        self.column, self.old, self.new = column, old, new

    def __str__(self) -> str:
        return f"column {self.column!r} has values of the types {self.old} and {self.new}"


def type_of(values: list[Any], column: str) -> DataType:
    """The type of a column with these values.

    Raises:
        NotUnited: there is none without changing a value.
        ValueError, TypeError: a value has no type at all. Arrow's errors are of these kinds.
    """
    import pyarrow as pa

    by_type_alone = {bool: pa.bool_(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}
    found = pa.null()
    kinds = list(set(map(type, values)))
    if len(kinds) > 1:  # a set has no order, and on that of the values the order of keys may depend
        kinds = list(dict.fromkeys(map(type, values)))
    for kind in kinds:
        if kind is type(None):
            continue
        plain = kind if kind in _PLAIN else next((one for one in _PLAIN if issubclass(kind, one)), kind)
        if (of_one := by_type_alone.get(plain)) is None:
            of_kind = values if len(kinds) == 1 else [value for value in values if type(value) is kind]
            of_one = _type_of_one(plain, of_kind, column)
        found = unite(found, of_one, column)
    return found


def _type_of_one(kind: type, values: list[Any], column: str) -> DataType:
    """The type of values of one Python type that does not tell it by itself. Times may differ in their zones."""
    import pyarrow as pa

    if kind is dict:
        return _struct(values, column)
    if all(map(_is_vector, values)):
        sizes = set(map(len, values))
        return pa.list_(pa.float32(), sizes.pop() if len(sizes) == 1 else -1)
    if issubclass(kind, _LISTS) or getattr(values[0], "ndim", False):  # or arrays of numpy
        return pa.list_(type_of(list(chain.from_iterable(values)), f"{column}[]"))
    if kind is int:
        if (wide := next((value for value in values if int(value) not in _INT64), None)) is not None:
            raise ValueError(f"{column}: the integer {wide} does not fit into int64")
        return pa.int64()
    if isinstance(values[0], time) and any(value.tzinfo is not None for value in values):
        raise ValueError(f"{column}: Arrow has no times of day with a time zone")
    zones = {str(getattr(value, "tzinfo", None)): value for value in values}
    found = pa.infer_type(values if len(zones) == 1 else list(zones.values())[:1])
    for value in list(zones.values())[1:]:
        found = unite(found, pa.infer_type([value]), column)
    return found


def _is_vector(value: object) -> bool:
    """Whether it is an array of those that become fixed-size lists if they have one length, such as embeddings."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == np.float32 and value.size > 0


def is_any_list(kind: DataType) -> bool:
    """Whether a type is that of lists, of one length or of any."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind))


def _struct(values: list[dict[Any, Any]], column: str) -> DataType:
    import pyarrow as pa

    columns: dict[str, list[Any]] = {}
    for value in values:
        for key, item in value.items():
            columns.setdefault(key, []).append(item)
    for key in columns:
        if not isinstance(key, str):
            raise TypeError(f"{column}: keys of dicts must be texts, not {type(key).__name__}")
    types = {key: type_of(items, f"{column}.{key}") for key, items in columns.items()}
    if "tool_calls" in types and (whole := _of_whole_results()).keys() <= types.keys():
        for key, kind in whole.items():
            with suppress(NotUnited):  # a server with other forms
                types[key] = unite(kind, types[key], key)
    return pa.struct(list(types.items()))


@cache
def _of_whole_results() -> dict[str, DataType]:
    """What a WholeResult has beside its text. Those of a chunk may all be empty, and show no type."""
    import pyarrow as pa

    text = pa.null()  # text where there is no value, and else what there is
    token = [("token", text), ("logprob", pa.float64()), ("bytes", pa.list_(pa.int64()))]
    tokens = pa.list_(pa.struct([*token, ("top_logprobs", pa.list_(pa.struct(token)))]))
    logprobs = pa.struct([("content", tokens), ("refusal", tokens)])
    function = pa.struct([("name", text), ("arguments", text)])
    calls = pa.list_(pa.struct([("id", text), ("type", text), ("function", function)]))
    said = [(name, text) for name in ("text", "finish_reason", "reasoning")]
    choice = pa.struct([*said, ("tool_calls", calls), ("logprobs", logprobs), ("refusal", text)])
    return {"tool_calls": calls, "logprobs": logprobs, "choices": pa.list_(choice)}


def unite(old: DataType, new: DataType, column: str) -> DataType:
    """The type that holds the values of both. None stands for no type.

    Raises:
        NotUnited: there is none.
    """
    import pyarrow as pa

    if old is None or old.equals(new) or pa.types.is_null(old):
        return new
    if pa.types.is_null(new):
        return old
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        fields = {field.name: field.type for field in old}
        for field in new:
            fields[field.name] = unite(fields.get(field.name), field.type, f"{column}.{field.name}")
        return pa.struct(list(fields.items()))
    if is_any_list(old) and is_any_list(new):  # two fixed sizes, or one and any, are of any size
        return pa.list_(unite(old.value_type, new.value_type, f"{column}[]"))
    if (both := _unite_leaves(old, new)) is None:
        raise NotUnited(column, old, new)
    return both


def _unite_leaves(old: DataType, new: DataType) -> DataType | None:
    """Arrow's own common type of two that are neither equal nor nested, if no value changes; else None."""
    import pyarrow as pa

    types, both = pa.types, (old, new)
    if all(map(types.is_timestamp, both)):
        if (old.tz is None) != (new.tz is None):
            return None
        if old.tz != new.tz:
            old, new = (pa.timestamp(kind.unit, "UTC") for kind in both)
    elif all(types.is_integer(kind) or types.is_floating(kind) for kind in both):
        # A column of uint64 and int64 has no type. With floats it has none either, or the order would count.
        if pa.uint64() in both and not all(map(types.is_unsigned_integer, both)):
            return None
        if any(map(types.is_floating, both)) and any(map(types.is_integer, both)):
            return pa.float64()
    elif not any(all(map(is_of, both)) for is_of in (types.is_decimal, types.is_duration)):
        return None
    schemas = [pa.schema([("", kind)]) for kind in (old, new)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):  # decimals with too many digits
        return None


# Whether values fit the schema that a writer has been given, unchanged.
#
# Arrow refuses 300 as an int8, but makes 1 of 1.5, drops microseconds, the time of day and time zones, and leaves out
# what a dict has more than its struct. A value is accepted if Arrow gives it back equal, so 2.0 may be an integer, and
# midnight a date. Only a float may lose digits in a shorter float: that is what a shorter float is for.


_SAFE = {"double": float, "string": str, "large_string": str, "bool": bool}
"""Values of these types need no look at each."""


def check_rows(rows: list[dict[str, Any]], schema: Any) -> None:
    """Raises NotUnited for rows that do not fit. Columns that the schema does not name are left out."""
    for field in schema:
        _check([row.get(field.name) for row in rows], field, field.name)


def _check(values: list[Any], field: Any, column: str) -> None:
    import pyarrow as pa

    types, kind = pa.types, field.type
    present = [value for value in values if value is not None]
    if not field.nullable and len(present) < len(values):
        raise NotUnited(column, f"{kind} not null", "without a value")
    if not present:
        return
    if types.is_struct(kind) and all(isinstance(value, dict) for value in present):
        fields = {inner.name: inner for inner in kind}
        for value in present:
            for key in value.keys() - fields.keys():
                if value[key] is not None:
                    raise NotUnited(f"{column}.{key}", "missing", _name(value[key], column))
        for name, inner in fields.items():
            _check([value.get(name) for value in present], inner, f"{column}.{name}")
    elif types.is_map(kind):
        pairs = [pair for value in present for pair in (value.items() if isinstance(value, dict) else value)]
        _check([key for key, _ in pairs], kind.key_field, f"{column}[key]")
        _check([item for _, item in pairs], kind.item_field, f"{column}[value]")
    elif kind in (pa.list_(pa.float32()), pa.list_(pa.float64())) and all(map(_is_vector, present)):
        return
    elif hasattr(kind, "value_field") and all(map(_is_list, present)):
        _check(list(chain.from_iterable(present)), kind.value_field, f"{column}[]")
    elif set(map(type, present)) != {_SAFE.get(str(kind))}:
        _check_kept(present, kind, column)


def _is_list(value: object) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes | dict)


def _check_kept(values: list[Any], kind: DataType, column: str) -> None:
    import pyarrow as pa

    try:
        kept = pa.array(values, kind)
        read = kept.to_pylist()
    except (ValueError, TypeError, OverflowError) as error:  # as Arrow's own are
        if len(values) > 1:
            for value in values:
                _check_kept([value], kind, column)
        raise NotUnited(column, kind, f"{_name(values[0], column)} ({safe_text(error)})") from error
    rounded = pa.types.is_floating(kind)
    if rounded and set(map(type, values)) == {float} and not np.isinf(kept).any():
        return
    for value, now in zip(values, read, strict=True):
        if not _is_same(value, now, rounded):
            raise NotUnited(column, kind, f"{_name(value, column)} (it would change)")


def _is_same(value: Any, kept: Any, rounded: bool) -> bool:
    """``rounded``: a float may lose digits."""
    if rounded and isinstance(value, float):
        return math.isinf(value) or not math.isinf(kept)
    if hasattr(value, "item") and not hasattr(value, "__len__"):  # a number of numpy
        value = value.item()
    if isinstance(value, bool) != isinstance(kept, bool):
        return False
    if isinstance(value, str) and isinstance(kept, bytes):
        return value.encode() == kept
    return bool(_with_time(value) == _with_time(kept)) or (value != value and kept != kept)


def _with_time(value: Any) -> Any:
    """A date as its midnight, anything else as it is."""
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return datetime.datetime.combine(value, datetime.time())
    return value


def _name(value: Any, column: str) -> str:
    try:
        return str(type_of([value], column))
    except Exception:
        return type(value).__name__


# Column types of a Parquet chunk: those of all its documents, not those of the first one.
#
# datatrove's ParquetWriter takes the schema of the first document of a file, and the columns of the first document of
# each batch. So a column that is None at first and text later fails, and a column that comes later is left out without
# a word. Here a chunk's schema is the union of what all its documents hold: null with any type is that type, integers
# with floats are float64, dicts have the keys of all. ``arrow_types`` says which types can be united.
#
# A schema depends on nothing but the documents of its chunk. Chunks finish in any order and are written again after a
# kill, so a schema that also depended on other chunks would either depend on when they finished, or hold up every chunk
# behind a slow one. So what lets files load as one must hold for each chunk alone. Loaders (``pyarrow.dataset``,
# ``datasets``) take the columns of the first file, and convert the others (measured, Arrow 26 and datasets 5.2):
#
# - A column without any value is written as text, also inside lists and dicts. With Arrow's null type nothing but null
# could follow it. Text without a value converts to numbers, dates, booleans and bytes. In a first file it makes texts
# of the numbers, dates and booleans of later ones, and does not load with bytes. - A later file may lack columns, or
# keys of dicts, and may hold integers where the first has floats. - A first file that lacks a column or a key, has
# integers where a later one has floats, or no value where a later one has anything but text, cannot be known to be
# wrong when it is written. Only a ``schema`` given to the writer helps. It is obeyed as it is. Such a chunk is warned
# about when it is written, and ``verify --full`` names both files. - Types that cannot be united at all, such as text
# and integers, stop the rank before the second of them is published.
#
# A field that was written as text because it had no value is marked in its metadata, to tell it from text.
#
# In the common case all chunks have one schema. So a chunk is first written with that of the chunk before, while its
# own is found out, and once more only if they differ: the second of two passes over the journal, in memory one batch.


# pyarrow has no types.
Schema: TypeAlias = Any
Row: TypeAlias = dict[str, Any]

_EMPTY_DICT = "_"
_NO_VALUE = {b"datatrove_ckpt": b"no value"}


def infers_schema(writer: DiskWriter) -> bool:
    """Whether the writer finds out the schema from the documents, as datatrove's ParquetWriter does."""
    return PARQUET.is_written_by(writer) and writer.schema is None


class ColumnTypes:
    """Collects the types of rows.

    Args:
        guess: the schema that the rows may have.

    Attributes:
        types: of each column.
    """

    def __init__(self, guess: Schema | None = None) -> None:
        self.types: dict[str, Any] = {}
        self._guess = None if guess is None else raw_types(guess)

    def add(self, rows: list[Row]) -> None:
        """Raises NotUnited for rows that the guess does not hold, or what ``type_of`` raises."""
        for name in dict.fromkeys(name for row in rows for name in row):
            kind = unite(self.types.get(name), type_of([row.get(name) for row in rows], name), name)
            self.types[name] = kind
            if self._guess is None:
                continue
            guess = self._guess.get(name)
            if unite(guess, kind, name) != guess:
                raise NotUnited(name, guess, kind)

    def schema(self) -> Schema:
        """The schema of all rows that were added."""
        import pyarrow as pa

        return pa.schema([_writable(pa.field(name, kind)) for name, kind in self.types.items()])


def _writable(field: Any) -> Any:
    """The field with text where there is no value, and a key in a dict that has none: Parquet has no such dicts."""
    import pyarrow as pa

    kind = field.type
    if pa.types.is_null(kind):
        return pa.field(field.name, pa.string(), metadata=_NO_VALUE)
    if pa.types.is_struct(kind):
        fields = [_writable(inner) for inner in kind] or [pa.field(_EMPTY_DICT, pa.string(), metadata=_NO_VALUE)]
        return pa.field(field.name, pa.struct(fields))
    if pa.types.is_list(kind):
        return pa.field(field.name, pa.list_(_writable(kind.value_field)))
    return field


def raw_type(field: Any) -> Any:
    """The type from which ``_writable`` made the field."""
    import pyarrow as pa

    kind = field.type
    if (field.metadata or {}).get(b"datatrove_ckpt"):
        return pa.null()
    if pa.types.is_struct(kind):
        fields = [(inner.name, raw_type(inner)) for inner in kind]
        return pa.struct([] if fields == [(_EMPTY_DICT, pa.null())] else fields)
    return pa.list_(raw_type(kind.value_field)) if pa.types.is_list(kind) else kind


def raw_types(schema: Schema) -> dict[str, Any]:
    """The type of each column of a file, with Arrow's null type where it has no value."""
    return {field.name: raw_type(field) for field in schema}


def name_culprit(
    writer: DiskWriter, documents: Iterable[Finished], decode: Callable[[bytes], Document], known: dict[str, Any]
) -> str | None:
    """Which document cannot be written, and why, found row by row. None: every row alone can.

    Args:
        documents: it is read twice.
        known: the types that the chunks before have, if the writer has no schema.
    """

    def find(check: Callable[[Row], object], where: str) -> str | None:
        for finished in documents:
            document = decode(finished.document)
            name = f"document {safe_repr(document.id)} (number {finished.ordinal} of this rank)"
            row = writer.adapter(document)
            try:
                check(row)
            except NotUnited as error:
                return f"{name}: column {error.column!r} is {error.new} there, and {error.old} in {where}"
            except Exception as error:
                return f"{name}: {safe_text(error)}"
        return None

    if writer.schema is not None:
        return find(lambda row: check_rows([row], writer.schema), "the writer's schema")
    types = ColumnTypes()
    types.types = dict(known)
    if (culprit := find(lambda row: types.add([row]), "it or one before it")) is not None:
        return culprit
    schema = types.schema()
    return find(lambda row: check_rows([row], schema), "all documents together")


def read_schema(folder: DataFolder, path: str) -> Schema | None:
    """The schema of a Parquet file; None if it has none that can be read, or pyarrow is not installed."""
    try:
        import pyarrow.parquet as pq

        with folder.open(path, "rb") as file:
            return pq.ParquetFile(file).schema_arrow
    except (ImportError, OSError, ValueError):
        return None


# Whether files whose types are known load as one dataset: loaders take the types of the first file, see above.


SCHEMA_ADVICE = (
    "Give ParquetWriter a schema, or an adapter that sets one type (a new adapter needs accept_changes=True)"
)
"""What to do about column types."""
OWN_SCHEMA_ADVICE = "Correct that column in the schema that ParquetWriter was given, or add it"


@dataclass(frozen=True)
class Misfit:
    """A column by which a file does not fit after a first one.

    Attributes:
        column: a path as in ``metadata.scores[]``.
        first: its type in the first file, ``missing`` or ``without a value``.
        later: its type in the later file, or ``without a value``.
    """

    column: str
    first: str
    later: str


def warning(found: list[Misfit], chunk_index: int) -> str:
    """What to tell the user of a rank, whose chunk this is."""
    columns = "; ".join(
        f"column {one.column!r} is {one.first} in one file, and {one.later} in a later one" for one in found
    )
    return (
        f"{columns} (seen at chunk {chunk_index}). Loaders take the types of the first file, so the dataset may not "
        f"load as one, or values load as texts that are none. {SCHEMA_ADVICE}."
    )


def misfits(first: Schema, later: Schema, inside: str = "") -> list[Misfit]:
    """Why a file does not load after another one, or not as what it is. ``inside``: a struct's column, a dot."""
    known = {field.name: field for field in first}
    found: list[Misfit] = []
    for field in later:
        if field.name in known:
            found += _misfits(known[field.name], field, f"{inside}{field.name}")
        else:
            found.append(Misfit(f"{inside}{field.name}", "missing", str(field.type)))
    return found


def _misfits(first: Any, later: Any, column: str) -> Iterator[Misfit]:
    import pyarrow as pa

    old, new = first.type, later.type
    if pa.types.is_null(new):
        return
    no_value = "without a value"
    empty, empty_later = pa.types.is_null(raw_type(first)), pa.types.is_null(raw_type(later))
    if empty_later:
        if not _takes_empty_text(old):
            yield Misfit(column, str(old), no_value)
    elif empty:
        if not (pa.types.is_string(new) or pa.types.is_large_string(new)):
            yield Misfit(column, no_value, str(new))
    elif pa.types.is_struct(old) and pa.types.is_struct(new):
        yield from misfits(old, new, f"{column}.")
    elif pa.types.is_list(old) and pa.types.is_list(new):
        yield from _misfits(old.value_field, new.value_field, f"{column}[]")
    elif not _takes(old, new, column):
        yield Misfit(column, str(old), str(new))


def _takes(old: Any, new: Any, column: str) -> bool:
    import pyarrow as pa

    if old.equals(new):
        return True
    try:
        both = unite(old, new, column)
    except NotUnited:
        return False
    # Another time zone is only another way to show the same time.
    return bool(both.equals(old) or (pa.types.is_timestamp(old) and both.unit == old.unit))


def _takes_empty_text(kind: Any) -> bool:
    """Whether a loader converts a column of text without any value to the type. Not to a time of day, for example."""
    import pyarrow as pa

    try:
        pa.nulls(1, pa.string()).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return False
    return not pa.types.is_nested(kind)


class RankColumns:
    """The types of the chunks of one rank: a guess for the next one, and whether it fits the others."""

    def __init__(self) -> None:
        self.guess: Schema | None = None
        self.known: dict[str, Any] = {}
        self._first: tuple[int, Schema] | None = None
        self._warned: set[str] = set()

    def start(self, chunk_index: int, schema: Schema) -> None:
        """``schema``: of the first file that earlier attempts committed."""
        self._first, self.known = (chunk_index, schema), raw_types(schema)

    def add(self, chunk_index: int, schema: Schema) -> list[Misfit]:
        """Adds a chunk. Returns why it and the first chunk do not load as one, once for each column.

        Raises:
            NotUnited: it can never be one dataset with the chunks before.
        """
        # A new dict: who names the culprit of this chunk needs the types of those before.
        raw = raw_types(schema).items()
        self.known = self.known | {name: unite(self.known.get(name), kind, name) for name, kind in raw}
        self.guess = schema
        first_index, first = self._first or (chunk_index, schema)
        found = misfits(first, schema) if first_index <= chunk_index else misfits(schema, first)
        if self._first is None or chunk_index < first_index:
            self._first = chunk_index, schema
        new = [one for one in found if one.column not in self._warned]
        self._warned.update(one.column for one in new)
        return new
