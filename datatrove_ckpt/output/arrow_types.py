"""The Arrow type of Python values, and the type that holds the values of two types unchanged.

Arrow's inference and ``unify_schemas`` change values silently: True beside 0.5 becomes 1.0, a time
beside a date loses the time of day, a time zone beside none is dropped, text beside bytes becomes
bytes. So only these are united: no value with anything, integers of any widths, integers with
floats (Arrow refuses integers that a float cannot hold), decimals, times of any unit, times of any
two zones (as UTC), and dicts and lists of these.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import time
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

# pyarrow has no types.
DataType = Any
Field = Any
Schema = Any
Row = dict[str, Any]

_LISTS = (list, tuple, set)
_PLAIN = (bool, int, float, str, bytes, dict)
_WHOLE_RESULT = {"tool_calls", "logprobs", "choices"}
_INT64 = range(-(2**63), 2**63)


class NotUnited(Exception):
    """Two types of one column, which is a path as in ``metadata.scores[]``."""

    def __init__(self, column: str, old: object, new: object) -> None:
        super().__init__(column, old, new)
        self.column = column
        self.old = old
        self.new = new

    def __str__(self) -> str:
        return f"column {self.column!r} has values of the types {self.old} and {self.new}"


def type_of(values: list[object], column: str) -> DataType:
    """Returns the type of a column with these values.

    Raises:
        NotUnited: there is none without changing a value.
        ValueError, TypeError: a value has no type at all. Arrow's errors are of these kinds.
    """
    import pyarrow as pa

    by_type_alone = {bool: pa.bool_(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}
    found = pa.null()
    kinds = dict.fromkeys(map(type, values))  # no set: order counts
    for kind in kinds:
        if kind is type(None):
            continue
        plain = next((base for base in _PLAIN if issubclass(kind, base)), kind)
        of_kind = values
        if len(kinds) > 1 and plain not in by_type_alone:
            of_kind = [value for value in values if type(value) is kind]
        found = unite(
            found, by_type_alone.get(plain) or _type_of_one(plain, of_kind, column), column
        )
    return found


def _type_of_one(kind: type, values: list[Any], column: str) -> DataType:
    import pyarrow as pa

    if kind is dict:
        return _struct(values, column)
    if all(map(is_vector, values)):
        sizes = set(map(len, values))
        if len(sizes) == 1:
            return pa.list_(pa.float32(), sizes.pop())
        return pa.list_(pa.float32())
    if issubclass(kind, _LISTS) or getattr(values[0], "ndim", False):  # or arrays of numpy
        return pa.list_(type_of(list(chain.from_iterable(values)), f"{column}[]"))
    if kind is int:
        for value in values:
            if int(value) not in _INT64:
                raise ValueError(f"{column}: the integer {value} does not fit into int64")
        return pa.int64()
    if isinstance(values[0], time) and any(value.tzinfo is not None for value in values):
        raise ValueError(f"{column}: Arrow has no times of day with a time zone")
    zones = {str(getattr(value, "tzinfo", None)): value for value in values}
    if len(zones) == 1:
        return pa.infer_type(values)
    found = pa.null()
    for value in zones.values():
        found = unite(found, pa.infer_type([value]), column)
    return found


def is_vector(value: object) -> bool:
    """Whether it becomes a fixed-size list among others of its length, such as an embedding."""
    return (
        isinstance(value, np.ndarray)
        and value.ndim == 1
        and value.dtype == np.float32
        and value.size > 0
    )


def is_any_list(kind: DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind))


def _struct(values: list[dict[object, object]], column: str) -> DataType:
    import pyarrow as pa

    columns: dict[object, list[object]] = {}
    for value in values:
        for key, item in value.items():
            columns.setdefault(key, []).append(item)
    for key in columns:
        if not isinstance(key, str):
            raise TypeError(f"{column}: keys of dicts must be texts, not {type(key).__name__}")
    types = {key: type_of(items, f"{column}.{key}") for key, items in columns.items()}
    if types.keys() >= _WHOLE_RESULT:
        for key, kind in _of_whole_results().items():
            with suppress(NotUnited):  # a server with other forms
                types[key] = unite(kind, types[key], key)
    return pa.struct(list(types.items()))


@cache
def _of_whole_results() -> dict[str, DataType]:
    """Returns what a WholeResult has beside its text. A chunk's values may all be empty, without a
    type.
    """
    token = {"token": None, "logprob": 0.0, "bytes": [0]}
    tokens = [token | {"top_logprobs": [token]}]
    logprobs = {"content": tokens, "refusal": tokens}
    calls = [{"id": None, "type": None, "function": {"name": None, "arguments": None}}]
    said = {"text": None, "finish_reason": None, "reasoning": None}
    choices = [said | {"tool_calls": calls, "logprobs": logprobs, "refusal": None}]
    whole = {"tool_calls": calls, "logprobs": logprobs, "choices": choices}
    return {name: type_of([value], name) for name, value in whole.items()}


def unite(old: DataType, new: DataType, column: str) -> DataType:
    """Returns the type that holds the values of both. None stands for no type.

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
    if is_any_list(old) and is_any_list(new):
        return pa.list_(unite(old.value_type, new.value_type, f"{column}[]"))
    both = _unite_leaves(old, new)
    if both is None:
        raise NotUnited(column, old, new)
    return both


def _unite_leaves(old: DataType, new: DataType) -> DataType | None:
    """Returns Arrow's common type of two different leaves, if no value changes."""
    import pyarrow as pa

    types = pa.types
    both = (old, new)
    if all(map(types.is_timestamp, both)):
        if (old.tz is None) != (new.tz is None):
            return None
        if old.tz != new.tz:
            old = pa.timestamp(old.unit, "UTC")
            new = pa.timestamp(new.unit, "UTC")
    elif all(types.is_integer(kind) or types.is_floating(kind) for kind in both):
        # uint64 and int64 have no common type, also beside floats, where the order would count.
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


def with_float32(value: Any, kind: DataType) -> Any:
    """Returns the value with numbers and vectors of float32 as numpy's: writers keep that type."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_struct(kind):
        return {field.name: with_float32(value[field.name], field.type) for field in kind}
    if types.is_float32(kind):
        return np.float32(value)
    if not (types.is_list(kind) or types.is_fixed_size_list(kind)):
        return value
    if types.is_float32(kind.value_type):
        return np.asarray(value, np.float32)
    return [with_float32(item, kind.value_type) for item in value]
