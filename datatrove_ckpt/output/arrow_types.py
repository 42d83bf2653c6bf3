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
from collections.abc import Callable, Iterator
from datetime import time
from typing import Any, TypeAlias

from datatrove.pipeline.writers import ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.formatting import safe_text

# pyarrow has no types.
DataType: TypeAlias = Any

_UNITS = ("s", "ms", "us", "ns")
_LISTS = (list, tuple, set)
_PLAIN = (bool, int, float, str, bytes, dict)
_BY_TYPE_ALONE = (bool, float, str, bytes)
_INT64 = range(-(2**63), 2**63)


class NotUnited(Exception):
    """Two types of one column. ``column``: a path as in ``metadata.scores[]``; ``where``: the old type is, if known."""

    def __init__(self, column: str, old: object, new: object, where: str = "") -> None:
        super().__init__(column, old, new, where)
        self.column, self.old, self.new, self.where = column, old, new, where

    def __str__(self) -> str:
        return f"column {self.column!r} has values of the types {self.old} and {self.new}"


def type_of(values: list[Any], column: str) -> DataType:
    """The type of a column with these values.

    Raises:
        NotUnited: there is none without changing a value.
        ValueError, TypeError: a value has no type at all. Arrow's errors are of these kinds.
    """
    import pyarrow as pa

    kinds = set(map(type, values))
    kinds.discard(type(None))
    if len(kinds) == 1:
        kind = kinds.pop()
        if kind in _BY_TYPE_ALONE:
            return _type_of_one(kind, values, column)
        return _type_of_one(kind, [value for value in values if value is not None], column)
    groups: dict[type, list[Any]] = {}
    for value in values:
        if value is not None:
            groups.setdefault(type(value), []).append(value)
    found = pa.null()
    for kind, group in groups.items():
        found = unite(found, _type_of_one(kind, group, column), column)
    return found


def _type_of_one(kind: type, values: list[Any], column: str) -> DataType:
    """The type of values of one Python type, none of them None."""
    import pyarrow as pa

    plain = kind if kind in _PLAIN else next((one for one in _PLAIN if issubclass(kind, one)), None)
    if plain is str:
        return pa.string()
    if plain is dict:
        return _struct(values, column)
    if issubclass(kind, _LISTS):
        return pa.list_(_type_of_items(values, f"{column}[]"))
    if plain is int:
        if (wide := next((value for value in values if value not in _INT64), None)) is not None:
            raise ValueError(f"{column}: the integer {wide} does not fit into int64")
        return pa.int64()
    if plain is not None:
        return {bool: pa.bool_(), float: pa.float64(), bytes: pa.binary()}[plain]
    return _inferred(values, column)


def _type_of_items(values: list[Any], column: str) -> DataType:
    """The type of what the lists hold. Long lists, such as embeddings, are not put into one list without need."""
    kinds: set[type] = set()
    for value in values:
        kinds.update(map(type, value))
    kinds.discard(type(None))
    if len(kinds) == 1 and (kind := kinds.pop()) in _BY_TYPE_ALONE:
        return _type_of_one(kind, [], column)
    return type_of([item for value in values for item in value], column)


def _struct(values: list[dict[Any, Any]], column: str) -> DataType:
    import pyarrow as pa

    columns: dict[str, list[Any]] = {}
    for value in values:
        for key, item in value.items():
            columns.setdefault(key, []).append(item)
    for key in columns:
        if not isinstance(key, str):
            raise TypeError(f"{column}: keys of dicts must be texts, not {type(key).__name__}")
    return pa.struct([(key, type_of(items, f"{column}.{key}")) for key, items in columns.items()])


def _inferred(values: list[Any], column: str) -> DataType:
    """Arrow's type of values of one Python type that is not plain, such as a date. Times may differ in their zones."""
    import pyarrow as pa

    if getattr(values[0], "ndim", 0):  # an array of numpy
        return pa.list_(type_of([item for value in values for item in value], f"{column}[]"))
    if isinstance(values[0], time) and any(value.tzinfo is not None for value in values):
        raise ValueError(f"{column}: Arrow has no times of day with a time zone")
    zones = {str(getattr(value, "tzinfo", None)): value for value in values}
    found = pa.infer_type(values if len(zones) == 1 else list(zones.values())[:1])
    for value in list(zones.values())[1:]:
        found = unite(found, pa.infer_type([value]), column)
    return found


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
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(unite(old.value_type, new.value_type, f"{column}[]"))
    for unite_leaf in (_unite_numbers, _unite_times):
        if (both := unite_leaf(old, new)) is not None:
            return both
    raise NotUnited(column, old, new)


def _unite_numbers(old: DataType, new: DataType) -> DataType | None:
    import pyarrow as pa

    one, other = sorted((old, new), key=lambda kind: (kind.bit_width if pa.types.is_primitive(kind) else 0, str(kind)))
    if all(map(pa.types.is_decimal, (old, new))):
        scale = max(old.scale, new.scale)
        precision = max(old.precision - old.scale, new.precision - new.scale) + scale
        if precision > 76:
            return None
        return pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale)
    floats = [kind for kind in (one, other) if pa.types.is_floating(kind)]
    whole = [kind for kind in (one, other) if pa.types.is_integer(kind)]
    if len(floats) + len(whole) < 2:
        return None
    if not whole:
        return other
    unsigned = [kind for kind in whole if pa.types.is_unsigned_integer(kind)]
    if floats:
        # Else the order of the documents would count: a column of uint64 and int64 has no type.
        return None if pa.uint64() in unsigned else pa.float64()
    if len(unsigned) != 1:
        return other
    bits = max(width := unsigned[0].bit_width * 2, *(kind.bit_width for kind in whole if kind not in unsigned))
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(bits) if width <= 64 else None


def _unite_times(old: DataType, new: DataType) -> DataType | None:
    import pyarrow as pa

    if all(map(pa.types.is_duration, (old, new))):
        return pa.duration(max(old.unit, new.unit, key=_UNITS.index))
    if not all(map(pa.types.is_timestamp, (old, new))) or (old.tz is None) != (new.tz is None):
        return None
    return pa.timestamp(max(old.unit, new.unit, key=_UNITS.index), old.tz if old.tz == new.tz else "UTC")


def paths(kind: DataType, column: str) -> Iterator[str]:
    """The paths at which a value of this type has values, with the column's own."""
    import pyarrow as pa

    if pa.types.is_null(kind):
        return
    yield column
    if pa.types.is_struct(kind):
        for field in kind:
            yield from paths(field.type, f"{column}.{field.name}")
    if pa.types.is_list(kind):
        yield from paths(kind.value_type, f"{column}[]")


# Whether values fit the schema that a writer has been given, unchanged.
#
# Arrow refuses 300 as an int8, but makes 1 of 1.5, drops microseconds, the time of day and time zones, and leaves out
# what a dict has more than its struct. A value is accepted if Arrow gives it back equal, so 2.0 may be an integer, and
# midnight a date. Only a float may lose digits in a shorter float: that is what a shorter float is for.


Check: TypeAlias = Callable[[Any], None]
"""Raises NotUnited for a value that does not fit."""

_EXACT_FLOAT = 2**53
_SAFE_ITEMS = {"double": float, "string": str, "large_string": str, "bool": bool}
"""Lists of these need no look at each item."""


def watch_schema(writer: DiskWriter) -> None:
    """Makes the writer, which has a schema, raise NotUnited for a row that does not fit it."""
    check, adapter = row_check(writer.schema), writer.adapter

    def checked(document: Any) -> Any:
        row = adapter(document)
        check(row)
        return row

    writer.adapter = checked


def row_check(schema: Any) -> Check:
    """A check of rows. Columns that the schema does not name are left out, so they are not looked at."""
    fields = [(field.name, _field_check(field, field.name)) for field in schema]

    def check(row: Any) -> None:
        for name, check_value in fields:
            check_value(row.get(name))

    return check


def _field_check(field: Any, column: str) -> Check:
    check, nullable, expected = _value_check(field.type, column), field.nullable, f"{field.type} not null"

    def checked(value: Any) -> None:
        if value is not None:
            check(value)
        elif not nullable:
            raise NotUnited(column, expected, "without a value")

    return checked


def _value_check(kind: DataType, column: str) -> Check:
    """A check of values that are not None."""
    import pyarrow as pa

    types = pa.types
    if types.is_struct(kind):
        return _struct_check(kind, column)
    if types.is_map(kind):
        return _map_check(kind, column)
    if hasattr(kind, "value_field"):  # a list of any kind
        item_check = _field_check(kind.value_field, f"{column}[]")
        as_arrow = _arrow_check(kind, column)
        alone = _SAFE_ITEMS.get(str(kind.value_type))

        def check_list(value: Any) -> None:
            if isinstance(value, str | bytes | dict) or not hasattr(value, "__iter__"):
                as_arrow(value)
            elif alone is None or set(map(type, value)) != {alone}:
                for item in value:
                    item_check(item)

        return check_list
    plain, as_arrow = _plain(kind), _arrow_check(kind, column)

    def check(value: Any) -> None:
        if not plain(value):
            as_arrow(value)

    return check


def _struct_check(kind: DataType, column: str) -> Check:
    fields = {field.name: _field_check(field, f"{column}.{field.name}") for field in kind}
    as_arrow = _arrow_check(kind, column)

    def check(value: Any) -> None:
        if not isinstance(value, dict):
            as_arrow(value)
            return
        for key, item in value.items():
            if item is not None and key not in fields:
                raise NotUnited(f"{column}.{key}", "missing", _name(item, column))
        for name, check_item in fields.items():
            check_item(value.get(name))

    return check


def _map_check(kind: DataType, column: str) -> Check:
    check_key = _field_check(kind.key_field, f"{column}[key]")
    check_item = _field_check(kind.item_field, f"{column}[value]")

    def check(value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else value:
            check_key(key)
            check_item(item)

    return check


def _plain(kind: DataType) -> Callable[[Any], bool]:
    """Whether Arrow surely keeps a value of a frequent type. What is left is converted, and compared."""
    import pyarrow as pa

    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind):
        return lambda value: type(value) is str
    if types.is_boolean(kind):
        return lambda value: type(value) is bool
    if types.is_float64(kind):
        return lambda value: type(value) is float or (type(value) is int and -_EXACT_FLOAT <= value <= _EXACT_FLOAT)
    if types.is_float32(kind):
        return lambda value: type(value) is float and -1e38 <= value <= 1e38
    if types.is_integer(kind):
        least = 0 if types.is_unsigned_integer(kind) else -(2 ** (kind.bit_width - 1))
        return lambda value: type(value) is int and value in range(least, least + 2**kind.bit_width)
    return lambda value: False


def _arrow_check(kind: DataType, column: str) -> Check:
    import pyarrow as pa

    def check(value: Any) -> None:
        try:
            kept = pa.array([value], kind)[0].as_py()
        except (ValueError, TypeError, OverflowError) as error:  # as Arrow's own are
            raise NotUnited(column, kind, f"{_name(value, column)} ({safe_text(error)})") from error
        if not _is_same(value, kept, pa.types.is_floating(kind)):
            raise NotUnited(column, kind, f"{_name(value, column)} (it would change)")

    return check


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
