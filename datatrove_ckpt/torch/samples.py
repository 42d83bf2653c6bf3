"""Rows of a table as samples of a training loop: plain dicts, or arrays of many rows.

A value is what Python has for it, but a list of numbers is a numpy array: these are mostly token rows, and a Python
number takes 28 bytes where the table has 2 or 4. Columns are converted as a whole, which is what makes a row cost less
than a microsecond.

JSON has no types of columns. Its numbers become an array only if that changes no value: numpy would make floats of
integers that no int64 holds, or that are beside a float, and round them. Else they stay a list.

Arrays are copies, because torch warns of arrays that cannot be written, and because a view keeps a whole block alive.

Rows taken out of the batches in which they were read, which are never joined to one table.

A window of a shuffled epoch has rows of many batches. pyarrow takes rows of several chunks from a copy of all of them,
each time, and a copy made once would need twice the window's memory for a moment. So rows are taken batch by batch.

pyarrow takes the numbers of lists one by one, by an index of each. Token rows are copied as a whole here: of one length
in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from datatrove_ckpt.readers.positions import Row
from datatrove_ckpt.readers.tables import Numbers, take_rows, take_values

if TYPE_CHECKING:
    import pyarrow as pa


_SMALL, _JOINED = 2**19, 2**23
"""Batches of fewer bytes than the first number are joined, up to the second: each costs some microseconds a take."""


class _Part(NamedTuple):
    """Those of the rows that one batch has.

    Attributes:
        batch: its number.
        rows: their numbers in it.
        places: which of the rows these are.
    """

    batch: int
    rows: Numbers
    places: Numbers


class Batches:
    """Rows of several tables, one after the other.

    Args:
        tables: of the same columns. Types may differ as far as pyarrow can unify them.
    """

    def __init__(self, tables: Sequence[pa.Table]) -> None:
        import pyarrow as pa

        table = pa.concat_tables(tables, promote_options="permissive")
        joined = _join_small(table.to_batches())
        self._table = pa.Table.from_batches(joined, table.schema)
        self._ends = np.cumsum([batch.num_rows for batch in joined], dtype=np.int64)
        numbers = range(table.num_columns if joined else 0)
        self._columns = [_column([batch.column(number) for batch in joined]) for number in numbers]

    def take(self, rows: Numbers) -> pa.Table:
        """The rows with these numbers, in their order. A stretch of rows is no copy."""
        import pyarrow as pa

        first = int(rows[0]) if len(rows) else 0
        if bool((rows == np.arange(first, first + len(rows))).all()):
            return self._table.slice(first, len(rows))
        parts = self._parts(rows)
        return pa.table([take(parts, len(rows)) for take in self._columns], schema=self._table.schema)

    def _parts(self, rows: Numbers) -> list[_Part]:
        if len(self._ends) == 1:
            return [_Part(0, rows, np.arange(len(rows)))]
        batch = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(batch, kind="stable")
        counts = np.bincount(batch, minlength=len(self._ends))
        found = np.flatnonzero(counts)
        split = np.split(order, np.cumsum(counts[found])[:-1])
        starts = [int(self._ends[number - 1]) if number else 0 for number in found]
        numbered = zip(found.tolist(), starts, split, strict=True)
        return [_Part(number, rows[places] - start, places) for number, start, places in numbered]


def owned(table: pa.Table) -> pa.Table:
    """A copy that holds no more memory than its rows: a slice holds what it was cut from."""
    import pyarrow as pa

    if table.num_rows < 2:
        return take_rows(table, range(table.num_rows))
    half = table.num_rows // 2  # one chunk alone would not be copied
    return pa.concat_tables([table.slice(0, half), table.slice(half)]).combine_chunks()


_Take: TypeAlias = Callable[[list[_Part], int], Any]
"""Takes rows, so many, out of a column."""


def _column(chunks: list[Any]) -> _Take:
    if lists := _lists(chunks):
        flat, offsets = zip(*lists, strict=True)
        length, *others = {_length(ends) for ends in offsets}
        if length and not others:
            return _take_even([numbers.reshape(-1, length) for numbers in flat], chunks[0].type)
        return _take_uneven(flat, offsets, chunks[0].type)
    return _take_any(chunks)


def _take_any(chunks: list[Any]) -> _Take:
    import pyarrow as pa

    def take(parts: list[_Part], count: int) -> Any:
        taken = [take_values(chunks[batch], rows) for batch, rows, _ in parts]
        if len(taken) == 1:
            return taken[0]
        back = np.empty(count, dtype=np.int64)
        back[np.concatenate([part.places for part in parts])] = np.arange(count)
        return take_values(pa.chunked_array(taken).combine_chunks(), back)

    return take


def _take_even(lists: Sequence[Any], kind: Any) -> _Take:
    length = lists[0].shape[1]

    def take(parts: list[_Part], count: int) -> Any:
        taken = np.empty((count, length), dtype=lists[0].dtype)
        for batch, rows, places in parts:
            taken[places] = lists[batch][rows]
        return _made(np.arange(0, count * length + 1, length), taken.reshape(-1), kind)

    return take


def _take_uneven(flat: Sequence[Any], offsets: Sequence[Any], kind: Any) -> _Take:
    def take(parts: list[_Part], count: int) -> Any:
        source = np.empty(count, dtype=np.int64)
        starts, ends = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        for batch, rows, places in parts:
            source[places], starts[places], ends[places] = batch, offsets[batch][rows], offsets[batch][rows + 1]
        chosen = zip(source.tolist(), starts.tolist(), ends.tolist(), strict=True)
        taken = np.concatenate([flat[batch][start:end] for batch, start, end in chosen])
        return _made(np.concatenate([[0], np.cumsum(ends - starts)]), taken, kind)

    return take


def _made(ends: Numbers, taken: Any, kind: Any) -> Any:
    import pyarrow as pa
    import pyarrow.types as types

    large = types.is_large_list(kind)
    offsets = pa.array(ends, pa.int64() if large else pa.int32())
    made = pa.LargeListArray if large else pa.ListArray
    return made.from_arrays(offsets, pa.array(taken, kind.value_type), type=kind)


def _lists(chunks: list[Any]) -> list[tuple[Any, Any]]:
    """For each chunk, the numbers of its lists, and where each list begins. Empty: these are no lists of numbers."""
    import pyarrow.types as types

    found = [] if types.is_fixed_size_list(chunks[0].type) else [numbers_of_lists(types, chunk) for chunk in chunks]
    flat = [one for one in found if one is not None]
    if len(flat) < len(chunks):
        return []
    return [(numbers, np.concatenate([[0], np.cumsum(lengths)])) for numbers, lengths in flat]


def _length(offsets: Any) -> int:
    """Of all lists. 0: they differ, or are empty."""
    lengths = np.diff(offsets)
    return int(lengths[0]) if len(lengths) and bool((lengths == lengths[0]).all()) else 0


def _join_small(batches: Sequence[Any]) -> list[Any]:
    import pyarrow as pa

    groups: list[list[Any]] = []
    size = _JOINED + 1  # of the last group; one large batch fills it
    for batch in batches:
        own = batch.nbytes
        if own >= _SMALL or size + own > _JOINED:
            groups.append([])
            size = 0
        groups[-1].append(batch)
        size += own if own < _SMALL else _JOINED + 1
    return [batch for group in groups for batch in pa.Table.from_batches(group).combine_chunks().to_batches()]


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
