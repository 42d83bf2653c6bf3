"""Rows of a table as samples of a training loop: plain dicts, or arrays of many rows.

A value is what Python has for it, but a list of numbers is a numpy array: these are mostly token rows, and a Python
number takes 28 bytes where the table has 2 or 4. Columns are converted as a whole, which is what makes a row cost less
than a microsecond.

JSON has no types of columns. Its numbers become an array only if that changes no value: numpy would make floats of
integers that no int64 holds, or that are beside a float, and round them. Else they stay a list.

Arrays are copies, because torch warns of arrays that cannot be written, and because a view keeps a whole block alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from datatrove_ckpt.readers.rows import Row

if TYPE_CHECKING:
    import pyarrow as pa

Arrays: TypeAlias = dict[str, Any]
"""For each column an array of numbers, one row for each sample; where that is not possible, a list of values."""

_COPIED_TOGETHER = 2**20
"""Up to this many bytes, token rows are views of one copy."""

_EXACT_IN_FLOATS = 2**53
"""A float64 holds each integer up to this size."""


def table_rows(table: pa.Table) -> list[Row]:
    """The rows of a table, in its order of columns."""
    names = table.column_names
    columns = [_values(column) for column in table.columns]
    if len(columns) == 1:
        [name] = names
        return [{name: value} for value in columns[0]]
    if len(columns) == 2:
        first, second = names
        return [{first: one, second: other} for one, other in zip(*columns, strict=True)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def json_row(row: Row) -> Row:
    """A row of JSONL, whose lists of numbers become arrays as well."""
    return {name: _json_value(value) if type(value) is list else value for name, value in row.items()}


def table_arrays(table: pa.Table) -> Arrays:
    """A table as arrays: numbers as (rows,), lists of numbers of equal length as (rows, length)."""
    return {name: _array(column) for name, column in zip(table.column_names, table.columns, strict=True)}


def row_arrays(rows: Sequence[Row]) -> Arrays:
    """The same of rows of JSONL."""
    columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
    return {name: _stacked(values) for name, values in columns.items()}


def _array(column: pa.ChunkedArray) -> Any:
    import pyarrow.types as types

    if _is_number(types, column.type) and not column.null_count:
        return np.array(column.to_numpy())
    if column.num_chunks == 1 and (flat := numbers_of_lists(types, column.chunk(0))) is not None:
        content, lengths = flat
        if (lengths == lengths[0]).all():
            return content.reshape(len(lengths), lengths[0]).copy()
    values = _values(column)
    return _stacked(values) if values and isinstance(values[0], np.ndarray) else values


def _stacked(values: list[Any]) -> Any:
    first = values[0] if values else None
    if not isinstance(first, np.ndarray):
        return _exact_array(values)
    is_even = all(isinstance(value, np.ndarray) and value.shape == first.shape for value in values)
    return np.stack(values) if is_even and _have_common_type(values) else values


def _json_value(value: list[Any]) -> Any:
    return _exact_array(value) if value and type(value[0]) in (int, float) else value


def _exact_array(values: list[Any]) -> Any:
    """Numbers as an array of the same numbers; the list itself if there is none."""
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return values
    if kinds == {float} or kinds == {bool}:
        return np.array(values)
    is_exact = kinds == {int, float} and all(
        type(value) is float or -_EXACT_IN_FLOATS <= value <= _EXACT_IN_FLOATS for value in values
    )
    return np.array(values, np.float64) if is_exact else values


def _have_common_type(rows: list[Any]) -> bool:
    """Whether one array can hold all these arrays without another value or kind of value."""
    kinds = {row.dtype for row in rows}
    if kinds != {np.dtype(np.int64), np.dtype(np.float64)}:
        return len(kinds) == 1
    return all(
        row.dtype == np.float64 or ((row >= -_EXACT_IN_FLOATS) & (row <= _EXACT_IN_FLOATS)).all() for row in rows
    )


def _values(column: pa.ChunkedArray) -> list[Any]:
    if column.num_chunks == 1:
        return _chunk_values(column.chunk(0))
    return [value for chunk in column.chunks for value in _chunk_values(chunk)]


def _chunk_values(chunk: pa.Array) -> list[Any]:
    import pyarrow.types as types

    kind = chunk.type
    if types.is_dictionary(kind):
        return _chunk_values(chunk.dictionary_decode())
    if (flat := numbers_of_lists(types, chunk)) is not None:
        return _token_rows(*flat)
    is_plain = (_is_number(types, kind) or types.is_boolean(kind)) and not chunk.null_count
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind)
    values: list[Any]
    values = chunk.to_numpy(zero_copy_only=False).tolist() if is_plain or is_text else chunk.to_pylist()
    if _is_numbers(types, kind):  # with some None
        dtype = kind.value_type.to_pandas_dtype()
        return [value if value is None or None in value else np.array(value, dtype) for value in values]
    return values


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _is_numbers(types: Any, kind: Any) -> bool:
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and _is_number(types, kind.value_type)


def numbers_of_lists(types: Any, chunk: pa.Array) -> tuple[Any, Any] | None:
    """The numbers of all lists, and the lengths of the lists. None: these are no lists of numbers, or some are None."""
    if not _is_numbers(types, chunk.type) or chunk.null_count or not len(chunk):
        return None
    if types.is_fixed_size_list(chunk.type):
        numbers, lengths = chunk.flatten(), np.full(len(chunk), chunk.type.list_size)
    else:
        offsets = chunk.offsets.to_numpy()
        numbers, lengths = chunk.values.slice(offsets[0], offsets[-1] - offsets[0]), np.diff(offsets)
    return None if numbers.null_count else (numbers.to_numpy(), lengths)


def _token_rows(content: Any, lengths: Any) -> list[Any]:
    length = int(lengths[0])
    if (lengths == length).all():
        lists = content.reshape(len(lengths), length)
        together = max(1, _COPIED_TOGETHER // max(1, lists[0].nbytes))
        return [row for first in range(0, len(lists), together) for row in lists[first : first + together].copy()]
    together, ends = content.nbytes <= _COPIED_TOGETHER, np.cumsum(lengths).tolist()
    content = content.copy() if together else content
    rows = [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return rows if together else [row.copy() for row in rows]
