"""Whether values fit the schema that a writer has been given, unchanged.

Arrow refuses 300 as an int8, but makes 1 of 1.5, drops microseconds, the time of day and time zones, and leaves out
what a dict has more than its struct. A value is accepted if Arrow gives it back equal, so 2.0 may be an integer, and
midnight a date. Only a float may lose digits in a shorter float: that is what a shorter float is for.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from datatrove.pipeline.writers import ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.formatting import safe_text
from datatrove_ckpt.output.arrow_types import DataType, NotUnited, type_of

Check: TypeAlias = Callable[[Any], None]
"""Raises NotUnited for a value that does not fit."""

_EXACT_FLOAT = 2**53
_SAFE_ITEMS = {"double": float, "string": str, "large_string": str, "bool": bool}
"""Lists of these need no look at each item."""


def is_parquet(writer: DiskWriter) -> bool:
    """Whether the writer makes its batches as datatrove's ParquetWriter does."""
    kind = type(writer)
    return (
        isinstance(writer, ParquetWriter)
        and kind._write is ParquetWriter._write
        and kind._write_batch is ParquetWriter._write_batch
    )


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
