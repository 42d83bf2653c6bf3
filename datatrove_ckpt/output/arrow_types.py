"""Finds the Arrow type of Python values, and the type that holds the values of two types unchanged.

Arrow's inference and ``unify_schemas`` change values silently: True beside 0.5 becomes 1.0, a time
beside a date loses the time of day, a time zone beside a time without a zone is dropped, text
beside bytes becomes bytes. So only these are united: no value with anything, integers of any
widths, integers with floats (Arrow refuses integers that a float cannot hold), decimals, bytes of
any length, dates and times of any unit, times of any two zones (as UTC), dictionaries with their
values, and dicts, maps and lists of these.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias
from uuid import UUID

import numpy as np

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.lazy_pyarrow import pa

# pyarrow has no types.
DataType: TypeAlias = "pa.DataType"
Field: TypeAlias = "pa.Field"
Schema: TypeAlias = "pa.Schema"
Table: TypeAlias = "pa.Table"
Row = JsonObject
Types = Mapping[str, DataType]
"""Types of columns by their paths, as in ``metadata.scores``."""

NO_TYPES: Types = MappingProxyType({})
_LISTS = (list, tuple, set)
_BYTES = ("binary", "large_binary", "binary_view", "fixed_size_binary")
_PLAIN = (bool, int, float, str, bytes, dict)
_LEAST_INT64 = -(2**63)
_UUID = "extension<arrow.uuid>"


class TypeConflict(Exception):
    """Two types of one column, whose name is a path as in ``metadata.scores[]``."""

    def __init__(self, column: str, old: object, new: object) -> None:
        super().__init__(column, old, new)
        self.column = column
        self.old = old
        self.new = new

    def __str__(self) -> str:
        return f"column {self.column!r} has values of the types {self.old} and {self.new}"


def type_of(values: list[object], column: str, input_types: Types = NO_TYPES) -> DataType:
    """Returns the type of a column with these values.

    Args:
        input_types: types of the input's columns, which are used if they hold the values.

    Raises:
        TypeConflict: no type holds all values unchanged.
    """
    if column in input_types and holds(input_types[column], values):
        return input_types[column]
    by_type_alone = {bool: pa.bool_(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}
    unified = pa.null()
    kinds = dict.fromkeys(map(type, values))  # no set: order counts
    for kind in kinds:
        if kind is type(None):
            continue
        plain = next((base for base in _PLAIN if issubclass(kind, base)), kind)
        of_kind = values
        if len(kinds) > 1 and plain not in by_type_alone:
            of_kind = [value for value in values if type(value) is kind]
        unified = unify_types(
            unified,
            by_type_alone.get(plain) or _type_of_one(plain, of_kind, column, input_types),
            column,
        )
    return unified


def types_of(rows: Sequence[Row]) -> Iterator[tuple[str, DataType]]:
    for name in dict.fromkeys(chain.from_iterable(rows)):
        yield name, type_of([row.get(name) for row in rows], name)


def _type_of_one(kind: type, values: list[Any], column: str, input_types: Types) -> DataType:
    if kind is dict:
        return _struct(values, column, input_types)
    if all(map(is_vector, values)):
        sizes = set(map(len, values))
        if len(sizes) == 1:
            return pa.list_(pa.float32(), sizes.pop())
        return pa.list_(pa.float32())
    if issubclass(kind, _LISTS) or getattr(values[0], "ndim", False):
        return pa.list_(type_of(list(chain.from_iterable(values)), f"{column}[]"))
    if kind is int:
        low = min(values)
        high = max(values)
        if low >= _LEAST_INT64 and high < -_LEAST_INT64:
            return pa.int64()
        if low >= 0 and high < 2**64:
            return pa.uint64()
        raise ValueError(f"{column}: the integers {low} to {high} exceed 64 bits")
    if isinstance(values[0], time) and any(value.tzinfo is not None for value in values):
        raise ValueError(f"{column}: Arrow has no times of day with a time zone")
    zones = {str(getattr(value, "tzinfo", None)): value for value in values}
    unified = pa.null()
    if len(zones) == 1:
        unified = pa.infer_type(values)
    else:
        for value in zones.values():
            unified = unify_types(unified, pa.infer_type([value]), column)
    # Arrow infers microseconds also for pandas' nanoseconds.
    if any(getattr(value, "nanosecond", 0) for value in values):
        return pa.timestamp("ns", unified.tz)
    return unified


def holds(kind: DataType, values: Collection[object]) -> bool:
    if _UUID in str(kind) and str(kind) != _UUID:
        return False  # Arrow makes no lists and structs of them from values
    try:
        return not altered_values(kind, values)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return False


def altered_values(kind: DataType, values: Collection[Any], loosely: bool = False) -> list[object]:
    """Returns the values that a column of the type would change.

    Args:
        loosely: whether to accept an equal value of another type (2.0 as an integer, midnight as a
            date), and a shorter float.
    """
    values = [value for value in values if value is not None]
    python_types = set(map(type, values))
    if python_types == {list} and is_any_list(kind):
        size = getattr(kind, "list_size", None)
        if size is None or all(len(value) == size for value in values):
            return altered_values(kind.value_type, [*chain.from_iterable(values)], loosely)
    column = to_arrow(kind, values)
    if python_types == {str} and is_text(kind):
        return []
    if python_types == {int} and pa.types.is_integer(kind):
        return []
    if python_types == {float} and pa.types.is_float64(kind):
        return []
    if python_types == {float} and pa.types.is_float32(kind) and not loosely:
        numbers = np.array(values)
        if np.array_equal(column.to_numpy(), numbers, equal_nan=True):
            return []
        return values
    stored = column.to_pylist()
    if not pa.types.is_nested(kind) and set(map(type, stored)) == python_types and stored == values:
        return []
    pairs = zip(values, stored, strict=True)
    return [value for value, back in pairs if not _is_same(value, back, loosely)]


def to_arrow(kind: DataType, values: list[object]) -> Any:
    if has_other_form(kind):
        values = [for_arrow(value, kind) for value in values]
    return pa.array(values, kind)


def _is_same(value: object, stored: Any, loosely: bool) -> bool:
    if isinstance(value, np.ndarray) and loosely:
        if is_vector(value) and isinstance(stored[0], float):
            return True
        value = value.tolist()
    if isinstance(stored, dict):
        if not isinstance(value, dict):
            return False
        lost = [value[key] for key in value.keys() - stored.keys()]
        if lost and not (loosely and lost == [None] * len(lost)):
            return False
        return all(_is_same(value.get(key), item, loosely) for key, item in stored.items())
    if isinstance(value, dict) and loosely:
        value = list(value.items())
    if isinstance(value, _LISTS) and isinstance(stored, list | tuple):
        pairs = zip(value, stored, strict=True)
        return len(value) == len(stored) and all(_is_same(*pair, loosely) for pair in pairs)
    if isinstance(stored, UUID):
        return bool(str(value) == str(stored))
    if type(value) is int and type(stored) is float:
        return abs(value) <= 2**53 and value == stored
    if loosely:
        return _is_equal(value, stored)
    # pandas has subclasses of these.
    same_type = type(value) is type(stored) or any(
        isinstance(value, base) and isinstance(stored, base) for base in (datetime, timedelta)
    )
    return same_type and bool(
        _in_utc(value) == _in_utc(stored) or (value != value and stored != stored)
    )


def _is_equal(value: object, stored: object) -> bool:
    if isinstance(value, float) and isinstance(stored, float):
        return math.isinf(value) or not math.isinf(stored)
    if hasattr(value, "item") and not hasattr(value, "__len__"):
        value = value.item()
    if isinstance(value, bool) != isinstance(stored, bool):
        return False
    if isinstance(value, str) and isinstance(stored, bytes):
        return value.encode() == stored
    if isinstance(stored, datetime) != isinstance(value, datetime):
        value = _at_midnight(value)
        stored = _at_midnight(stored)
    return bool(_in_utc(value) == _in_utc(stored)) or (value != value and stored != stored)


def _in_utc(value: object) -> object:
    """Converts a time: in an hour that clocks repeat, times of two zones are never equal."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    return value


def _at_midnight(value: object) -> object:
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime.combine(value, time())
    return value


def for_arrow(value: Any, kind: DataType) -> Any:
    """Returns the value in Arrow's form, if JSON has another: pairs of maps as tuples, UUIDs."""
    if value is None or not has_other_form(kind):
        return value
    if isinstance(value, str) and str(kind) == _UUID:
        return UUID(value)
    if pa.types.is_map(kind):
        pairs = value
        if isinstance(value, dict):
            pairs = value.items()
        return [(key, for_arrow(item, kind.item_type)) for key, item in pairs]
    if pa.types.is_struct(kind):
        return value | {
            field.name: for_arrow(value[field.name], field.type)
            for field in kind
            if field.name in value
        }
    return [for_arrow(item, kind.value_type) for item in value]


def has_other_form(kind: DataType) -> bool:
    text = str(kind)
    return "map<" in text or _UUID in text


def is_text(kind: DataType) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def is_vector(value: object) -> bool:
    """Whether a value is a vector, such as an embedding: vectors of one length become a fixed-size
    list.
    """
    return (
        isinstance(value, np.ndarray)
        and value.ndim == 1
        and value.dtype == np.float32
        and value.size > 0
    )


def is_any_list(kind: DataType) -> bool:
    return str(kind).partition("<")[0].endswith(("list", "list_view"))


def _struct(values: list[dict[object, object]], column: str, input_types: Types) -> DataType:
    columns: dict[object, list[object]] = {}
    for value in values:
        for key, item in value.items():
            columns.setdefault(key, []).append(item)
    for key in columns:
        if not isinstance(key, str):
            raise TypeError(f"{column}: keys of dicts must be texts, not {type(key).__name__}")
    types = {key: type_of(items, f"{column}.{key}", input_types) for key, items in columns.items()}
    if types.keys() >= {"tool_calls", "logprobs", "choices"}:
        for key, kind in _of_whole_results().items():
            with suppress(TypeConflict):
                types[key] = unify_types(kind, types[key], key)
    return pa.struct(list(types.items()))


@cache
def _of_whole_results() -> dict[str, DataType]:
    """Returns the types of a WholeResult's fields, because all values of a chunk may be empty."""
    token = {"token": None, "logprob": 0.0, "bytes": [0]}
    tokens = [token | {"top_logprobs": [token]}]
    logprobs = {"content": tokens, "refusal": tokens}
    calls = [{"id": None, "type": None, "function": {"name": None, "arguments": None}}]
    text_fields = {"text": None, "finish_reason": None, "reasoning": None}
    choices = [text_fields | {"tool_calls": calls, "logprobs": logprobs, "refusal": None}]
    whole = {"tool_calls": calls, "logprobs": logprobs, "choices": choices}
    return {name: type_of([value], name) for name, value in whole.items()}


def unify_types(old: DataType, new: DataType, column: str) -> DataType:
    """Returns the type that holds the values of both types. None stands for no type."""
    if old is None or old.equals(new) or pa.types.is_null(old):
        return new
    if pa.types.is_null(new):
        return old
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        fields = {field.name: field.type for field in old}
        for field in new:
            fields[field.name] = unify_types(
                fields.get(field.name), field.type, f"{column}.{field.name}"
            )
        return pa.struct(list(fields.items()))
    if is_any_list(old) and is_any_list(new):
        return pa.list_(unify_types(old.value_type, new.value_type, f"{column}[]"))
    if pa.types.is_map(old) and pa.types.is_map(new):
        keys = unify_types(old.key_type, new.key_type, f"{column}[]")
        return pa.map_(keys, unify_types(old.item_type, new.item_type, f"{column}[]"))
    if pa.types.is_dictionary(old) or pa.types.is_dictionary(new):
        return unify_types(_decoded(old), _decoded(new), column)
    both = _unite_leaves(old, new)
    if both is None:
        raise TypeConflict(column, old, new)
    return both


def _decoded(kind: DataType) -> DataType:
    if pa.types.is_dictionary(kind):
        return kind.value_type
    return kind


def _unite_leaves(old: DataType, new: DataType) -> "DataType | None":
    both = (old, new)
    if all(map(is_text, both)):
        return pa.large_string()
    if all(str(kind).partition("[")[0] in _BYTES for kind in both):
        return pa.large_binary()
    if all(map(pa.types.is_timestamp, both)):
        if (old.tz is None) != (new.tz is None):
            return None
        if old.tz != new.tz:
            old = pa.timestamp(old.unit, "UTC")
            new = pa.timestamp(new.unit, "UTC")
    elif all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in both):
        # uint64 and int64 have no common type, also beside floats, where the order would count.
        if pa.uint64() in both and not all(map(pa.types.is_unsigned_integer, both)):
            return None
        if any(map(pa.types.is_floating, both)) and any(map(pa.types.is_integer, both)):
            return pa.float64()
    else:
        tests = (pa.types.is_decimal, pa.types.is_duration, pa.types.is_time, pa.types.is_date)
        if not any(all(map(is_of, both)) for is_of in tests):
            return None
    schemas = [pa.schema([("", kind)]) for kind in (old, new)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):  # decimals with too many digits
        return None


def with_float32(value: Any, kind: DataType) -> object:
    """Returns the value with float32 numbers and vectors as numpy's: writers keep that type."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: with_float32(value[field.name], field.type) for field in kind}
    if pa.types.is_float32(kind):
        return np.float32(value)
    if not (pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)):
        return value
    if pa.types.is_float32(kind.value_type):
        return np.asarray(value, np.float32)
    return [with_float32(item, kind.value_type) for item in value]
