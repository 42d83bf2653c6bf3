"""Rows taken out of the batches in which they were read, which are never joined to one table.

A window of a shuffled epoch has rows of many batches. pyarrow takes rows of several chunks from a copy of all of them,
each time, and a copy made once would need twice the window's memory for a moment. So rows are taken batch by batch.

pyarrow takes the numbers of lists one by one, by an index of each. Token rows are copied as a whole here: of one length
in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from datatrove_ckpt.readers.samples import numbers_of_lists

if TYPE_CHECKING:
    import pyarrow as pa

Numbers: TypeAlias = npt.NDArray[np.int64]

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


_Rows = TypeVar("_Rows", "pa.Table", "pa.RecordBatch")


def take_rows(table: _Rows, rows: Sequence[int] | Numbers) -> _Rows:
    """The rows with these numbers. pyarrow does not take values of each type, as string views; this does."""
    import pyarrow as pa

    numbers = np.asarray(rows, dtype=np.int64)
    try:
        return table.take(pa.array(numbers))
    except pa.ArrowNotImplementedError:
        columns = [one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one for one in table.columns]
        return type(table).from_arrays([_take(column, numbers) for column in columns], schema=table.schema)


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
        taken = [_take(chunks[batch], rows) for batch, rows, _ in parts]
        if len(taken) == 1:
            return taken[0]
        back = np.empty(count, dtype=np.int64)
        back[np.concatenate([part.places for part in parts])] = np.arange(count)
        return _take(pa.chunked_array(taken).combine_chunks(), back)

    return take


def _take(chunk: Any, rows: Numbers) -> Any:
    import pyarrow as pa

    try:
        return chunk.take(pa.array(rows))
    except pa.ArrowNotImplementedError:  # string views, run-end encoding
        return pa.array([chunk[row].as_py() for row in rows.tolist()], chunk.type)


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

    found: list[Any] = []
    small: list[Any] = []

    def join() -> None:
        if small:
            found.extend(pa.Table.from_batches(small).combine_chunks().to_batches())
            small.clear()

    size = 0
    for batch in batches:
        own = batch.nbytes
        if own >= _SMALL or size + own > _JOINED:
            join()
            size = 0
        if own >= _SMALL:
            found.append(batch)
        else:
            small.append(batch)
            size += own
    join()
    return found
