"""Rows of a table as samples of a training loop: plain dicts.

A value is what Python has for it, but a list of numbers is a numpy array: these are mostly token rows, and a Python
number takes 28 bytes where the table has 2 or 4. Columns are converted as a whole, which is what makes a row cost less
than a microsecond.

JSON has no types of columns. Its numbers become an array only if that changes no value: numpy would make floats of
integers that no int64 holds, or that are beside a float, and round them. Else they stay a list.

Arrays are copies, because torch warns of arrays that cannot be written, and because a view keeps a whole block alive.

Rows are taken out of the few batches to which those of a window are joined while they are read.

pyarrow takes rows of several chunks from a copy of all of them, each time, and a copy made once would need twice the
window's memory for a moment. So rows are joined part by part, and taken batch by batch.

pyarrow takes the numbers of lists one by one, by an index of each. Bytes it takes as a whole, so here the numbers of a
list are bytes: a token row costs a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from datatrove_ckpt.readers.positions import Row
from datatrove_ckpt.readers.tables import Numbers, take_rows

if TYPE_CHECKING:
    import pyarrow as pa
_JOINED = 2**23
"""Rows are joined up to so many bytes, or one block more: a take costs some microseconds for each batch."""
_RELEASED = 6
"""After so many joins the allocator gives back what it keeps. More often, its pages would cost more than the rows."""

Parts: TypeAlias = "Iterator[tuple[Numbers, Any]]"
"""Rows in parts: which of the rows these are, and a table or a list of them."""


class Batches:
    """Rows of several tables, one after the other.

    Args:
        tables: of the same columns. Types may differ as far as pyarrow can unify them.
        joined: to few batches, of which rows are taken in any order.
    """

    def __init__(self, tables: Iterable[pa.Table], joined: bool) -> None:
        if joined:
            tables = _joined(tables)
        self._batches = [
            (batch.schema, _as_bytes(batch) if joined else batch) for one in tables for batch in one.to_batches()
        ]
        self._ends = np.cumsum([batch.num_rows for _, batch in self._batches], dtype=np.int64)

    def take(self, rows: Numbers) -> Parts:
        """The rows with these numbers. A stretch of rows is no copy."""
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
                yield places, _taken(batch, mine, schema)


def _taken(batch: Any, rows: Numbers, schema: Any) -> pa.Table:
    return _of_bytes(take_rows(batch, rows), schema)


def owned(table: pa.Table) -> pa.Table:
    """A copy that holds no more memory than its rows: a slice holds what it was cut from."""
    import pyarrow as pa

    if table.num_rows < 2:
        return take_rows(table, range(table.num_rows))
    half = table.num_rows // 2  # one chunk alone would not be copied
    return pa.concat_tables([table.slice(0, half), table.slice(half)]).combine_chunks()


def _joined(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    import pyarrow as pa

    group: list[pa.Table] = []
    count = 0
    for table in tables:
        group.append(table)
        del table  # it is not held while the next one is read
        if sum(one.nbytes for one in group) >= _JOINED:
            joined = owned(pa.concat_tables(group, promote_options="permissive"))
            group = []
            count = count + 1
            if count % _RELEASED == 0:
                pa.default_memory_pool().release_unused()
            yield joined
    if group:
        yield owned(pa.concat_tables(group, promote_options="permissive"))


def _as_bytes(batch: Any) -> Any:
    """Lists of numbers become bytes, without a copy."""
    import pyarrow as pa
    import pyarrow.types as types

    def column(chunk: Any) -> Any:
        kind = chunk.type
        if not (types.is_list(kind) or types.is_large_list(kind)) or not _is_number(types, kind.value_type):
            return chunk
        if not len(chunk) or chunk.null_count or chunk.values.null_count or not chunk.values.buffers()[1]:
            return chunk
        ends = (chunk.offsets.to_numpy().astype(np.int64) + chunk.values.offset) * (kind.value_type.bit_width // 8)
        buffers = [None, pa.py_buffer(ends), chunk.values.buffers()[1]]
        return pa.Array.from_buffers(pa.large_binary(), len(chunk), buffers)

    return pa.RecordBatch.from_arrays([*map(column, batch.columns)], names=batch.schema.names)


def _of_bytes(batch: Any, schema: Any) -> pa.Table:
    """The opposite of ``_as_bytes``."""
    import pyarrow as pa
    import pyarrow.types as types

    def column(chunk: Any, kind: Any) -> Any:
        if chunk.type == kind:
            return chunk
        _, ends, numbers = chunk.buffers()
        width = kind.value_type.bit_width // 8
        found = np.frombuffer(ends, np.int64, len(chunk) + 1, 8 * chunk.offset) // width
        values = pa.Array.from_buffers(kind.value_type, int(found[-1]), [None, numbers])
        made = found if types.is_large_list(kind) else found.astype(np.int32)
        return pa.Array.from_buffers(kind, len(chunk), [None, pa.py_buffer(made)], children=[values])

    columns = [column(chunk, kind) for chunk, kind in zip(batch.columns, schema.types, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


_COPIED_TOGETHER = 2**20
"""Token rows that end within so many bytes are views of one copy."""

_EXACT_IN_FLOATS = 2**53
"""A float64 holds each integer up to this size."""


def table_rows(table: pa.Table) -> list[Row]:
    """The rows of a table, in its order of columns."""
    rows: list[Row] = [{} for _ in range(table.num_rows)]
    for name, column in zip(table.column_names, table.columns, strict=True):  # by column: a third of the time of dict()
        for row, value in zip(rows, _values(column), strict=True):
            row[name] = value
    return rows


def json_row(row: Row) -> Row:
    """A row of JSONL, whose lists of numbers become arrays as well."""
    return {name: _json_value(value) if type(value) is list else value for name, value in row.items()}


def _json_value(value: list[Any]) -> Any:
    if value and type(value[0]) in (int, float):
        return _exact_array(value)
    return value


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
    if is_exact:
        return np.array(values, np.float64)
    return values


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
        numbers = chunk.flatten()
        lengths = np.full(len(chunk), chunk.type.list_size)
    else:
        offsets = chunk.offsets.to_numpy()
        numbers = chunk.values.slice(offsets[0], offsets[-1] - offsets[0])
        lengths = np.diff(offsets)
    if numbers.null_count:
        return None
    return (numbers.to_numpy(), lengths)


def _token_rows(content: Any, lengths: Any) -> list[Any]:
    ends = np.cumsum(lengths)
    firsts = np.flatnonzero(np.diff(ends * content.itemsize // _COPIED_TOGETHER, prepend=-1))
    rows: list[Any] = []
    begin = 0
    for group in np.split(ends, firsts[1:]):
        copied = content[begin : group[-1]].copy()
        stops = (group - begin).tolist()
        rows += [copied[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        begin = int(group[-1])
    return rows
