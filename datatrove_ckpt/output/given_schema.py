"""Refuses rows that do not fit, unchanged, the schema that a writer was given.

Arrow makes 1 of 1.5, drops microseconds, the time of day and time zones, and omits keys of a dict
that its struct lacks. A value is accepted if Arrow returns an equal value (2.0 as an integer,
midnight as a date), or a shorter float.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection
from typing import Any

from datatrove_ckpt.common.formatting import safe_text
from datatrove_ckpt.output.arrow_types import (
    DataType,
    Field,
    NotUnited,
    Row,
    Schema,
    is_vector,
    type_of,
)

_SAFE = {"double": float, "string": str, "large_string": str, "bool": bool}
"""Values of these types need no look at each."""


def check_rows(rows: list[Row], schema: Schema) -> None:
    """Raises NotUnited for rows that do not fit.

    Columns that the schema does not name are left out.
    """
    for field in schema:
        values = [row.get(field.name) for row in rows]
        if not _are_safe(values, field.type):
            for value, kept in zip(values, _kept(values, field), strict=True):
                _check(value, kept, field, field.name)


def _are_safe(values: Collection[object], kind: DataType) -> bool:
    return set(map(type, values)) == {_SAFE.get(str(kind))}


def _kept(values: list[object], field: Field) -> list[Any]:
    import pyarrow as pa

    try:
        kept: list[object] = pa.array(values, field.type).to_pylist()
    except (ValueError, TypeError, OverflowError) as error:  # as Arrow's own are
        if len(values) > 1:
            for value in values:
                _kept([value], field)
        raise NotUnited(
            field.name, field.type, f"{_name(values[0], field.name)} ({safe_text(error)})"
        ) from error
    return kept


def _check(value: Any, kept: Any, field: Field, column: str) -> None:
    import pyarrow as pa

    kind = field.type
    if value is None:
        if not field.nullable:
            raise NotUnited(column, f"{kind} not null", "without a value")
    elif not pa.types.is_nested(kind):
        if not _is_same(value, kept, pa.types.is_floating(kind)):
            raise NotUnited(column, kind, f"{_name(value, column)} (it would change)")
    elif pa.types.is_map(kind):
        pairs = value.items() if isinstance(value, dict) else value
        for (key, item), (kept_key, kept_item) in zip(pairs, kept, strict=True):
            _check(key, kept_key, kind.key_field, f"{column}[key]")
            _check(item, kept_item, kind.item_field, f"{column}[value]")
    elif pa.types.is_struct(kind) and isinstance(value, dict):
        for inner in kind:
            _check(value.get(inner.name), kept[inner.name], inner, f"{column}.{inner.name}")
        for key in value.keys() - kept.keys():
            if value[key] is not None:
                raise NotUnited(f"{column}.{key}", "missing", _name(value[key], column))
    elif not isinstance(kept, list):
        raise NotUnited(column, kind, f"{_name(value, column)} (it would change)")
    elif is_vector(value) and kind.value_type in (pa.float32(), pa.float64()):
        return
    elif not _are_safe(value, kind.value_type):
        for item, kept_item in zip(value, kept, strict=True):
            _check(item, kept_item, kind.value_field, f"{column}[]")


def _is_same(value: object, kept: Any, rounded: bool) -> bool:
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


def _with_time(value: object) -> object:
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return datetime.datetime.combine(value, datetime.time())
    return value


def _name(value: object, column: str) -> str:
    try:
        return str(type_of([value], column))
    except Exception:
        return type(value).__name__
