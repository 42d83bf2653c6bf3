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
import os
from contextlib import suppress
from datetime import time
from functools import cache
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from datatrove.pipeline.writers import ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.formatting import safe_text

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


def watch_schema(writer: ParquetWriter) -> None:
    """Makes the writer, which has a schema, raise NotUnited for a batch of rows that do not fit it."""
    write_batch = writer._write_batch

    def checked(filename: str) -> None:
        check_rows(writer._batches[filename], writer.schema)
        write_batch(filename)

    writer._write_batch = checked


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


def vectors_plain(writer: ParquetWriter) -> None:
    """Makes the writer, which has a schema, write vectors without a dictionary: it would be larger than they are."""
    import pyarrow.parquet as pq

    leaves = [leaf for field in writer.schema for leaf in _leaves(field.type, field.name)]
    if not any(is_vector for _, is_vector in leaves):
        return
    put, others = writer._write, [path for path, is_vector in leaves if not is_vector]

    def write(row: dict[str, Any], file: Any, filename: str) -> None:
        name = writer._get_filename_with_file_id(filename) if writer.max_file_size > 0 else filename
        if name not in writer._writers:  # as datatrove opens it
            writer._writers[name] = pq.ParquetWriter(
                file,
                schema=writer.schema,
                compression=writer.compression,
                use_content_defined_chunking=writer.use_content_defined_chunking,
                write_page_index=writer.write_page_index,
                use_dictionary=others,
            )
        put(row, file, filename)

    writer._write = write


def _leaves(kind: DataType, path: str) -> list[tuple[str, bool]]:
    """The columns of a Parquet file that a type becomes, and whether each holds vectors."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaves(field.type, f"{path}.{field.name}")]
    if not is_any_list(kind):
        return [(path, False)]
    if pa.types.is_fixed_size_list(kind) and kind.value_type == pa.float32():
        return [(f"{path}.list.element", True)]
    return _leaves(kind.value_type, f"{path}.list.element")


def prepare_arrow(writer: DiskWriter) -> None:
    """Chooses Arrow's allocator for a ParquetWriter, unless the user has chosen one. Call it before the loop runs.

    Arrow converts a batch in one call, under the interpreter's lock, which would block the event loop. The slow part is
    memory: the default allocator, mimalloc, soon returns it to the system, page by page. With the system's allocator
    1000 documents of 2 kB take 1 to 4 ms instead of sometimes 20 to 50 ms (measured, Arrow 26).
    """
    if not isinstance(writer, ParquetWriter):
        return
    import pyarrow as pa

    if pa.default_memory_pool().backend_name == "mimalloc" and "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())
    pa.array([""])  # imports pandas, if it is installed
