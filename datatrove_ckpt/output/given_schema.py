"""Refuses rows that do not fit, unchanged, the schema that a writer has been given.

Arrow refuses 300 as an int8, but makes 1 of 1.5, drops microseconds, the time of day and time zones, and leaves out
what a dict has more than its struct. A value is accepted if Arrow gives it back equal, so 2.0 may be an integer, and
midnight a date. Only a float may lose digits in a shorter float: that is what a shorter float is for.
"""

from __future__ import annotations

import datetime
import math
from itertools import chain
from typing import Any

import numpy as np

from datatrove_ckpt.formatting import safe_text
from datatrove_ckpt.output.arrow_types import DataType, NotUnited, is_vector, type_of

_SAFE = {"double": float, "string": str, "large_string": str, "bool": bool}
"""Values of these types need no look at each."""


def check_rows(rows: list[dict[str, Any]], schema: Any) -> None:
    """Raises NotUnited for rows that do not fit. Columns that the schema does not name are left out."""
    for field in schema:
        _check([row.get(field.name) for row in rows], field, field.name)


def _check(values: list[Any], field: Any, column: str) -> None:
    import pyarrow as pa

    types = pa.types
    kind = field.type
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
        pairs: list[tuple[Any, Any]] = []
        for value in present:
            pairs.extend(value.items() if isinstance(value, dict) else value)
        _check([key for key, _ in pairs], kind.key_field, f"{column}[key]")
        _check([item for _, item in pairs], kind.item_field, f"{column}[value]")
    elif kind in (pa.list_(pa.float32()), pa.list_(pa.float64())) and all(map(is_vector, present)):
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
