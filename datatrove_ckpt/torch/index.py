"""Reads the input of a training: blocks, files, and rows at places of an order.

The rows of a window are joined to few batches while they are read, and taken out of the batches.
Each pyarrow take from several chunks copies all chunks, and one joint copy would need twice the
window's memory. So rows are joined part by part, and taken batch by batch.

Samples of a training loop are plain dicts. A list of numbers, mostly a token row, becomes a numpy
array: a Python number takes 28 bytes where the table has 2 or 4. pyarrow takes the numbers of lists
one by one, so arrays are cut out of the batch itself. Arrays are copies: torch warns of read-only
arrays, and a view keeps a block alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.lazy_pyarrow import pa
from datatrove_ckpt.readers.block_file import BlockRows
from datatrove_ckpt.readers.blocks import Block, BlockInput, FilesReader, UnifiedSchema
from datatrove_ckpt.readers.inputs import ReaderState, Row, position_mismatch
from datatrove_ckpt.torch.order import BlockTable, EpochOrder, Numbers, OpenWindow
from datatrove_ckpt.torch.states import check_settings

_Array = npt.NDArray[np.generic]

_COPIED_TOGETHER = 2**20
"""Token rows of about so many bytes are views of one copy."""


def batch_rows(batch: pa.RecordBatch, numbers: Numbers) -> list[Row]:
    """Returns the rows with these numbers as dicts, in which lists of numbers are arrays."""
    rows: list[Row] = [{} for _ in range(len(numbers))]
    # By column: a third of the time of dict().
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for row, value in zip(rows, _values(column, numbers), strict=True):
            row[name] = value
    return rows


def json_row(row: Row) -> Row:
    return {
        name: _json_value(value) if type(value) is list else value for name, value in row.items()
    }


def _json_value(values: list[float]) -> list[float] | npt.NDArray[np.generic]:
    """Makes an array of a list of numbers that a type holds exactly; else returns the list."""
    if not values or type(values[0]) not in (int, float):
        return values
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return values
    # numpy would round larger integers.
    if kinds <= {int, float} and all(
        type(number) is float or abs(number) <= 2**53 for number in values
    ):
        return np.array(values, np.float64)
    return values


def _values(column: pa.Array, numbers: Numbers) -> list[object]:
    types = pa.types
    kind = column.type
    lists = _flattened(column)
    if lists is not None:
        flat, starts, ends = lists
        return _token_rows(flat, starts[numbers], ends[numbers])
    selected = _take(column, numbers)
    if types.is_dictionary(kind):
        return _values(selected.dictionary_decode(), np.arange(len(numbers)))
    is_plain = (_is_number(kind) or types.is_boolean(kind)) and not selected.null_count
    if is_plain or types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind):
        plain: list[object] = selected.to_numpy(zero_copy_only=False).tolist()
        return plain
    values: list[object] = selected.to_pylist()
    if _is_number_list(kind):  # with some None
        dtype = kind.value_type.to_pandas_dtype()
        for position, value in enumerate(values):
            if isinstance(value, list) and None not in value:
                values[position] = np.array(value, dtype)
    return values


def _take(column: pa.Array, rows: Numbers) -> pa.Array:
    """Takes rows also of types that pyarrow cannot take: string views, run-end encoding."""
    first = int(rows[0])
    if int(rows[-1]) - first == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return column.slice(first, len(rows))
    try:
        return column.take(pa.array(rows))
    except pa.ArrowNotImplementedError:
        return pa.array([column[row].as_py() for row in rows.tolist()], column.type)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_number_list(kind: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and _is_number(kind.value_type)


def _flattened(lists: pa.Array) -> tuple[_Array, Numbers, Numbers] | None:
    """Returns the numbers of all lists, and where each list begins and ends in them.

    Returns None if these are no lists of numbers, or some are None.
    """
    if not _is_number_list(lists.type) or lists.null_count or lists.values.null_count:
        return None
    flat = lists.values.to_numpy()
    if pa.types.is_fixed_size_list(lists.type):
        size = lists.type.list_size
        starts = (np.arange(len(lists)) + lists.offset) * size
        return flat, starts, starts + size
    offsets = lists.offsets.to_numpy()
    return flat, offsets[:-1], offsets[1:]


def _token_rows(flat: _Array, starts: Numbers, ends: Numbers) -> list[object]:
    size = int((ends - starts).sum()) * flat.itemsize
    together = max(1, len(starts) * _COPIED_TOGETHER // max(1, size))
    rows: list[object] = []
    for first in range(0, len(starts), together):
        rows_together = slice(first, first + together)
        pairs = zip(starts[rows_together].tolist(), ends[rows_together].tolist(), strict=True)
        copied = np.concatenate([flat[start:end] for start, end in pairs])
        stops = np.cumsum(ends[rows_together] - starts[rows_together]).tolist()
        rows += [copied[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    return rows


_JOINED = 2**23
"""Rows are joined up to so many bytes, or one block more."""
_RELEASED = 6
"""After so many joins the allocator gives back memory."""

Parts: TypeAlias = "Iterator[tuple[Numbers, pa.RecordBatch | list[Row | None], Numbers]]"
"""Rows in parts: their places among the wanted rows, a batch or list, and their numbers in it."""


class RowBatches:
    """Rows of several tables, one after the other.

    Args:
        tables: tables of one schema.
        joined: join the tables to few batches, because rows are taken in any order.
    """

    def __init__(self, tables: Iterable[pa.Table], joined: bool) -> None:
        self._batches: list[pa.RecordBatch] = []
        for table in _joined(tables) if joined else tables:
            self._batches += table.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)

    def take(self, rows: Numbers) -> Parts:
        """Takes rows by their numbers among the rows of all tables, batch by batch."""
        numbers = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(numbers, kind="stable")
        counts = np.bincount(numbers)
        split = np.split(order, np.cumsum(counts[counts > 0])[:-1])
        for number, positions in zip(np.flatnonzero(counts).tolist(), split, strict=True):
            batch = self._batches[number]
            yield positions, batch, rows[positions] - (int(self._ends[number]) - batch.num_rows)


def owned(table: pa.Table) -> pa.Table:
    """Copies a slice, which else keeps the whole table in memory."""
    # One chunk alone would not be copied.
    return pa.concat_tables([table, table.slice(0, 0)]).combine_chunks()


def _joined(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    group: list[pa.Table] = []
    size = count = 0
    for table in tables:
        group.append(table)
        size += table.nbytes
        del table  # while the next table is read
        if size >= _JOINED:
            joined = owned(pa.concat_tables(group))
            group = []
            size = 0
            count += 1
            if count % _RELEASED == 0:
                pa.default_memory_pool().release_unused()
            yield joined
    if group:
        yield owned(pa.concat_tables(group))


_OF_DICTS = 3
"""Size of the dicts of JSONL, for each byte of their lines."""


class InputIndex:
    def __init__(self, reader: FilesReader) -> None:
        self.blocks = BlockInput(reader)
        self._inputs = self.blocks.inputs
        size = 1
        if self.blocks.gives_dicts:
            size = _OF_DICTS
        self.table = BlockTable(
            self.blocks, self.blocks.sequential, reader.skip, reader.limit, size
        )
        number = len(self._inputs.names)
        samples = "\n".join(map(self._inputs.sample, range(number)))
        kind = "tags"  # the ETags of remote files, which cost nothing
        if self._inputs.folder.is_local():
            kind = "bytes"
        self.state: ReaderState = {
            "files": self._inputs.digest(number).state(),
            "rows": self.table.total,
            "blocks": self.table.hash,
            "skip": reader.skip,
            "limit": reader.limit,
            "content": [kind, xxh3_64_hexdigest(samples.encode())],
        }
        """Names, sizes and samples of all files, and the number of rows of each block."""

    def check(self, saved: ReaderState) -> None:
        current = self.state
        if saved == current:
            return
        self._inputs.check_all(saved["files"])
        check_settings(saved, {key: current[key] for key in ("skip", "limit")})
        saved_content = saved["content"]
        other_rows = [saved["rows"], saved["blocks"]] != [current["rows"], current["blocks"]]
        if other_rows or (
            saved_content != current["content"] and saved_content[0] == current["content"][0]
        ):
            raise position_mismatch(
                "The input has changed: the files have the same names and sizes as when the state "
                f"was made, but another content: they had {saved['rows']} rows, and have "
                f"{current['rows']}."
            )


@dataclass(frozen=True, slots=True)
class _Loaded:
    number: int
    window: OpenWindow
    rows: RowBatches | list[JsonObject | None]
    offsets: Numbers

    def take(self, rows: Numbers) -> Parts:
        piece, places = self.window.locate(rows)
        places = places + self.offsets[piece]
        if isinstance(self.rows, list):
            return iter([(np.arange(len(rows)), self.rows, places)])
        return self.rows.take(places)


@dataclass(eq=False)
class RowSource:
    """Rows of an order. Holds only the open window of each share that it reads."""

    index: InputIndex
    _order: EpochOrder
    columns: Sequence[str] | None = None
    _unified: UnifiedSchema | None = None
    _open: dict[int, _Loaded] = field(default_factory=dict)

    def name(self, shares: Numbers, rows: Numbers) -> str:
        """Returns the name of one row: its number, and its file."""
        share = self._order.shares[int(shares[0])]
        window = share.window(int(share.window_of(rows)[0]))
        block, in_block = window.origins(rows - window.first)
        table = self.index.table
        number = int(table.first[block[0]] + in_block[0])
        return f"Row {number} of {self.index.blocks.names[table.file[block[0]]]!r}"

    def samples(self, shares: Numbers, rows: Numbers) -> list[JsonObject | None]:
        """Reads the rows as plain dicts, in which lists of numbers are arrays.

        A damaged line is None.
        """
        by_place: dict[int, JsonObject | None] = {}
        for positions, part, row_numbers in self._parts(shares, rows):
            if isinstance(part, list):
                chosen = [part[number] for number in row_numbers.tolist()]
                samples = [row and json_row(row) for row in chosen]
            else:
                samples = batch_rows(part, row_numbers)
            by_place.update(zip(positions.tolist(), samples, strict=True))
        return [by_place[position] for position in range(len(shares))]

    def _parts(self, shares: Numbers, rows: Numbers) -> Parts:
        for share in np.unique(shares).tolist():
            mine = np.flatnonzero(shares == share)
            windows = self._order.shares[share].window_of(rows[mine])
            for number in dict.fromkeys(windows.tolist()):
                positions = mine[windows == number]
                self._load(share, number)
                numbers = rows[positions] - self._open[share].window.first
                for selection, part, row_numbers in self._open[share].take(numbers):
                    yield positions[selection], part, row_numbers

    def _load(self, share: int, number: int) -> None:
        if share in self._open and self._open[share].number == number:
            return
        self._open.pop(share, None)  # frees its memory before the next window is read
        window = self._order.shares[share].window(number)
        # In the order of the files, so that a large row group is decoded once.
        read = np.argsort(window.pieces.block, kind="stable")
        parts = self._read(window, read)
        loaded: RowBatches | list[JsonObject | None]
        if self.index.blocks.gives_dicts:
            loaded = list(chain.from_iterable(parts))
        else:
            loaded = RowBatches(parts, window.shuffled or len(read) > 1)
        count = window.pieces.rows
        start_in_window = np.cumsum(count) - count
        start_in_loaded = np.empty_like(count)
        start_in_loaded[read] = np.cumsum(count[read]) - count[read]
        # Files are read in their own order: this leads from a row's place in the window to its
        # place in what was loaded.
        offsets = start_in_loaded - start_in_window
        self._open[share] = _Loaded(number, window, loaded, offsets)

    def _read(self, window: OpenWindow, read: Numbers) -> Iterator[BlockRows]:
        blocks = self.index.blocks
        in_order = [(blocks[int(window.pieces.block[place])], place) for place in read.tolist()]
        for file, group in groupby(in_order, lambda entry: entry[0].file):
            of_file = list(group)
            blocks.expect(file, [block for block, _ in of_file])
            for block, place in of_file:
                yield self._piece(window, block, place)  # a name would hold it
            if window.shuffled:
                blocks.drop_buffers(file)

    def _piece(self, window: OpenWindow, block: Block, place: int) -> BlockRows:
        blocks = self.index.blocks
        pieces = window.pieces
        start = int(pieces.start[place])
        count = int(pieces.rows[place])
        rows = blocks.read(block, self.columns, self._unified)
        if isinstance(rows, list):
            return rows[start : start + count]
        rows = rows.slice(start, count)
        if blocks.gives_views and window.shuffled:
            return owned(rows)
        return rows
