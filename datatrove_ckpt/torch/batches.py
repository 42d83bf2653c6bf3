"""Joins the rows of a window to few batches while they are read, and takes rows out of the batches.

Each pyarrow take from several chunks copies all chunks, and one joint copy would need twice the
window's memory. So rows are joined part by part, and taken batch by batch. pyarrow takes numbers of
lists one by one, but bytes as a whole: as bytes, a token row costs a tenth of the time.

Samples of a training loop are plain dicts. A list of numbers, mostly a token row, becomes a numpy
array: a Python number takes 28 bytes where the table has 2 or 4. JSON numbers become an array only
if numpy rounds none of them. Arrays are copies: torch warns of read-only arrays, and a view keeps a
block alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from datatrove_ckpt.readers.positions import Row
from datatrove_ckpt.readers.tables import Numbers, take_rows
from datatrove_ckpt.torch.block_file import Rows

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


_JOINED = 2**23
"""Rows are joined up to so many bytes, or one block more."""
_RELEASED = 6
"""After so many joins the allocator gives back memory."""

Parts: TypeAlias = "Iterator[tuple[Numbers, Rows]]"
"""Rows in parts: their numbers, and the rows."""


class RowBatches:
    """Rows of several tables, one after the other.

    Args:
        tables: of the same columns. Types may differ as far as pyarrow can unify them.
        joined: join the tables to few batches, because rows are taken in any order.
    """

    def __init__(self, tables: Iterable[pa.Table], joined: bool) -> None:
        self._batches: list[tuple[pa.Schema, pa.RecordBatch]] = []
        for table in _joined(tables) if joined else tables:
            for batch in table.to_batches():
                self._batches.append((batch.schema, _as_bytes(batch) if joined else batch))
        self._ends = np.cumsum([batch.num_rows for _, batch in self._batches], dtype=np.int64)

    def take(self, rows: Numbers) -> Parts:
        """Takes the rows with these numbers. A stretch of rows is no copy."""
        numbers = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(numbers, kind="stable")
        counts = np.bincount(numbers)
        split = np.split(order, np.cumsum(counts[counts > 0])[:-1])
        for number, places in zip(np.flatnonzero(counts).tolist(), split, strict=True):
            schema, batch = self._batches[number]
            mine = rows[places] - (int(self._ends[number]) - batch.num_rows)
            first = int(mine[0])
            if bool((mine == np.arange(first, first + len(mine))).all()):
                yield places, _of_bytes(batch.slice(first, len(mine)), schema)
            else:
                yield places, _of_bytes(take_rows(batch, mine), schema)


def owned(table: pa.Table) -> pa.Table:
    """Copies a slice, which else keeps the whole table in memory."""
    import pyarrow as pa

    if table.num_rows < 2:
        return take_rows(table, range(table.num_rows))
    half = table.num_rows // 2  # one chunk alone would not be copied
    return pa.concat_tables([table.slice(0, half), table.slice(half)]).combine_chunks()


def _joined(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    import pyarrow as pa

    group: list[pa.Table] = []
    size = count = 0
    for table in tables:
        group.append(table)
        size += table.nbytes
        del table  # while the next one is read
        if size >= _JOINED:
            joined = owned(pa.concat_tables(group, promote_options="permissive"))
            group = []
            size = 0
            count += 1
            if count % _RELEASED == 0:
                pa.default_memory_pool().release_unused()
            yield joined
    if group:
        yield owned(pa.concat_tables(group, promote_options="permissive"))


def _as_bytes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Makes bytes of lists of numbers, without a copy."""
    import pyarrow as pa
    import pyarrow.types as types

    def column(chunk: pa.Array) -> pa.Array:
        kind = chunk.type
        if not (types.is_list(kind) or types.is_large_list(kind)) or not is_number(
            types, kind.value_type
        ):
            return chunk
        if (
            not len(chunk)
            or chunk.null_count
            or chunk.values.null_count
            or not chunk.values.buffers()[1]
        ):
            return chunk
        ends = (chunk.offsets.to_numpy().astype(np.int64) + chunk.values.offset) * (
            kind.value_type.bit_width // 8
        )
        buffers = [None, pa.py_buffer(ends), chunk.values.buffers()[1]]
        return pa.Array.from_buffers(pa.large_binary(), len(chunk), buffers)

    return pa.RecordBatch.from_arrays([*map(column, batch.columns)], names=batch.schema.names)


def _of_bytes(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa
    import pyarrow.types as types

    def column(chunk: pa.Array, kind: pa.DataType) -> pa.Array:
        if chunk.type == kind:
            return chunk
        _, ends, numbers = chunk.buffers()
        width = kind.value_type.bit_width // 8
        found = np.frombuffer(ends, np.int64, len(chunk) + 1, 8 * chunk.offset) // width
        values = pa.Array.from_buffers(kind.value_type, int(found[-1]), [None, numbers])
        if not types.is_large_list(kind):
            found = found.astype(np.int32)
        return pa.Array.from_buffers(
            kind, len(chunk), [None, pa.py_buffer(found)], children=[values]
        )

    columns = [column(chunk, kind) for chunk, kind in zip(batch.columns, schema.types, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)
