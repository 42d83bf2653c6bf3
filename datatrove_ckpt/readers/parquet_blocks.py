"""Parquet as blocks of rows: a slice of a row group, without holding more of the group than the slice.

Row groups of a million rows are usual. pyarrow reads them from their beginning, so earlier rows of the group are
decoded in small batches, and dropped. The batches go on where the last slice ended, because slices are mostly asked for
in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from datatrove.io import DataFolder

from datatrove_ckpt.readers.block_files import BlockFile, FileIndex, Group, changed, check_columns, opened, serialized
from datatrove_ckpt.readers.compressed import naming_damage

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS, _BATCH_BYTES = 2**14, 2**21
"""The most that is decoded together. Rows keep all of their batch, so it must be small beside a block."""
_BUFFER_BYTES = 2**20


class _Cursor(NamedTuple):
    """Batches of a row group from one of its rows on."""

    group: int
    columns: tuple[str, ...] | None
    row: int
    rest: Any
    """Rows of the last batch that nobody has asked for yet; None: there are none."""
    batches: Iterator[Any]


class ParquetBlocks(BlockFile):
    """One Parquet file. See ``block_files.BlockFile``.

    Args:
        size: bytes of a row in memory, in quarters of those that the file's description gives.
    """

    def __init__(self, folder: DataFolder, name: str, known: FileIndex | None, size: int) -> None:
        import pyarrow.parquet as pq

        self._name, self._size = name, size
        self._cursor: _Cursor | None = None
        self._source = opened(folder, name)
        try:
            with naming_damage(name):
                self._file = pq.ParquetFile(self._source, buffer_size=_BUFFER_BYTES, pre_buffer=False)
                metadata = self._file.metadata
                groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        except BaseException:
            self._source.close()
            raise
        parts = tuple(Group(group.num_rows, group.total_byte_size) for group in groups)
        self.set_index(FileIndex(parts, schema=serialized(self._file.schema_arrow)))
        if known not in (None, self.index):
            self.close()
            raise changed(name)

    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        """The rows of a part of a row group."""
        import pyarrow as pa

        with naming_damage(self._name):
            check_columns(self._file.schema_arrow.names, columns, self._name)
            group, start = self.part_of(first)
            cursor = self._seek(group, start, None if columns is None else tuple(columns))
            parts, wanted, rest = [], rows, cursor.rest
            while wanted:
                batch = next(cursor.batches) if rest is None else rest
                parts.append(batch.slice(0, wanted))
                rest = batch.slice(wanted) if batch.num_rows > wanted else None
                wanted -= parts[-1].num_rows
            self._cursor = cursor._replace(row=cursor.row + rows, rest=rest)
            table = pa.Table.from_batches(parts)
            return table if columns is None else table.select(list(columns))

    def sample(self, rows: int) -> pa.Table:
        """At most so many rows of the first group that has some."""
        import pyarrow as pa

        with naming_damage(self._name):
            number = next(number for number, group in enumerate(self.index.groups) if group.rows)
            return pa.Table.from_batches([next(self._file.iter_batches(rows, row_groups=[number]))])

    def let_go(self) -> None:
        """Lets go of the group that is being read: of each column, that is a page and its dictionary at least."""
        self._cursor = None

    def close(self) -> None:
        """Closes the file."""
        self._cursor = None
        self._file.close()
        self._source.close()

    def _seek(self, group: int, row: int, columns: tuple[str, ...] | None) -> _Cursor:
        """The batches of a group from ``row`` on. Goes on from where the file stands, if that is not behind."""
        cursor, sizes = self._cursor, self.index.groups[group]
        if cursor is None or (cursor.group, cursor.columns) != (group, columns) or cursor.row > row:
            rows = min(_BATCH_ROWS, max(1, 4 * _BATCH_BYTES * sizes.rows // max(1, self._size * sizes.bytes)))
            batches = self._file.iter_batches(rows, row_groups=[group], columns=columns and list(columns))
            cursor = _Cursor(group, columns, 0, None, iter(batches))
        self._cursor = None  # its batches are consumed, so it may not be used again if this fails
        at, rest = cursor.row, cursor.rest
        while at < row or rest is None:
            batch = next(cursor.batches) if rest is None else rest
            passed = min(row - at, batch.num_rows)
            at += passed
            rest = batch.slice(passed) if passed < batch.num_rows else None
            if at == row:
                break
        return cursor._replace(row=at, rest=rest)
