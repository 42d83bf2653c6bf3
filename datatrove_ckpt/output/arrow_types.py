"""The Arrow type of Python values, and the one type that holds the values of two, without changing any value.

Arrow's own inference and its ``unify_schemas`` change values silently: True beside 0.5 becomes 1.0, a time beside a
date loses the time of day, a time zone beside none is dropped, text beside bytes becomes bytes. So only what is named
here is united: no value with anything, integers of any widths, integers with floats (Arrow refuses those that a float
cannot hold), decimals, short and long texts, times of any unit, times of any two zones (as UTC), dicts and
lists of those.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import time
from typing import Any, TypeAlias

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
    for unite_leaf in (_unite_numbers, _unite_times, _unite_texts):
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


def _unite_texts(old: DataType, new: DataType) -> DataType | None:
    import pyarrow as pa

    for pair in ({pa.string(), pa.large_string()}, {pa.binary(), pa.large_binary()}):
        if {old, new} == pair:
            return pa.large_string() if pa.string() in pair else pa.large_binary()
    return None


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
