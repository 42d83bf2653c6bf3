"""Rows of a table as samples of a training loop: plain dicts.

A list of numbers, mostly a token row, becomes a numpy array: a Python number takes 28 bytes where
the table has 2 or 4.

JSON numbers become an array only if numpy rounds none of them. Arrays are copies: torch warns of
read-only arrays, and a view keeps a block alive.
"""

from __future__ import annotations

from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from datatrove_ckpt.readers.positions import Row

if TYPE_CHECKING:
    import pyarrow as pa

_Array = npt.NDArray[np.generic]

_COPIED_TOGETHER = 2**20
"""Token rows of so many bytes are views of one copy."""

_EXACT_IN_FLOATS = 2**53
"""A float64 holds each integer up to this size."""


def table_rows(table: pa.Table) -> list[Row]:
    rows: list[Row] = [{} for _ in range(table.num_rows)]
    # By column: a third of the time of dict().
    for name, column in zip(table.column_names, table.columns, strict=True):
        for row, value in zip(
            rows, chain.from_iterable(map(_chunk_values, column.chunks)), strict=True
        ):
            row[name] = value
    return rows


def json_row(row: Row) -> Row:
    return {
        name: _json_value(value) if type(value) is list else value for name, value in row.items()
    }


def _json_value(values: list[float]) -> list[float] | npt.NDArray[np.generic]:
    """Makes an array of equal numbers; returns the list itself if there is none."""
    if not values or type(values[0]) not in (int, float):
        return values
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return values
    if kinds <= {int, float} and all(
        type(value) is float or abs(value) <= _EXACT_IN_FLOATS for value in values
    ):
        return np.array(values, np.float64)
    return values


def _chunk_values(chunk: pa.Array) -> list[object]:
    import pyarrow.types as types

    kind = chunk.type
    if types.is_dictionary(kind):
        return _chunk_values(chunk.dictionary_decode())
    flat = _numbers_of_lists(types, chunk)
    if flat is not None:
        return _token_rows(*flat)
    is_plain = (is_number(types, kind) or types.is_boolean(kind)) and not chunk.null_count
    if is_plain or types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind):
        plain: list[object] = chunk.to_numpy(zero_copy_only=False).tolist()
        return plain
    values: list[object] = chunk.to_pylist()
    if _is_numbers(types, kind):  # with some None
        dtype = kind.value_type.to_pandas_dtype()
        for place, value in enumerate(values):
            if isinstance(value, list) and None not in value:
                values[place] = np.array(value, dtype)
    return values


def is_number(types: ModuleType, kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _is_numbers(types: ModuleType, kind: pa.DataType) -> bool:
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and is_number(types, kind.value_type)


def _numbers_of_lists(types: ModuleType, chunk: pa.Array) -> tuple[_Array, _Array] | None:
    """Returns the numbers and the lengths of all lists.

    None: these are no lists of numbers, or some are None.
    """
    if not _is_numbers(types, chunk.type) or chunk.null_count or not len(chunk):
        return None
    if types.is_fixed_size_list(chunk.type):
        numbers = chunk.flatten()
        lengths = np.full(len(chunk), chunk.type.list_size)
    else:
        offsets = chunk.offsets.to_numpy()
        numbers = chunk.values.slice(offsets[0], offsets[-1] - offsets[0])
        lengths = np.diff(offsets)
    if numbers.null_count:
        return None
    return numbers.to_numpy(), lengths


def _token_rows(content: _Array, lengths: _Array) -> list[object]:
    ends = np.cumsum(lengths)
    firsts = np.flatnonzero(np.diff(ends * content.itemsize // _COPIED_TOGETHER, prepend=-1))
    rows: list[object] = []
    begin = 0
    for group in np.split(ends, firsts[1:]):
        copied = content[begin : group[-1]].copy()
        stops = (group - begin).tolist()
        rows += [copied[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        begin = int(group[-1])
    return rows
