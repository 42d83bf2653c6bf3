"""Parquet as blocks: a slice of a row group, without holding more of the group than the slice.

Row groups of a million rows are usual. pyarrow reads them from their beginning, so earlier rows of the group are
decoded in small batches, and dropped. The batches go on where the last slice ended, because slices are mostly asked for
in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from datatrove.io import DataFolder

from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.tables import opened
from datatrove_ckpt.torch.block_file import BlockFile, FileIndex, Group, check_columns, serialized

if TYPE_CHECKING:
    import pyarrow as pa


# The most that is decoded together. Rows keep all of their batch, so it must be small beside a block.
_BATCH_ROWS = 2**14
_BATCH_BYTES = 2**21
_BUFFER_BYTES = 2**20


class _GroupRows:
    """The rows of one row group, from its beginning on. ``row``: how many were read."""

    def __init__(self, group: int, columns: Sequence[str] | None, batches: Iterator[Any]) -> None:
        self.key = (group, columns)
        self.row = 0
        self._batches = batches
        self._rest = None

    def read(self, rows: int) -> Iterator[Any]:
        """The next rows, in parts of batches."""
        while rows:
            batch = self._rest or next(self._batches)
            part = batch.slice(0, rows)
            self._rest = None
            if batch.num_rows > rows:
                self._rest = batch.slice(rows)
            self.row = self.row + part.num_rows
            rows = rows - part.num_rows
            yield part


class ParquetBlocks(BlockFile):
    """One Parquet file. See ``BlockFile``.

    Args:
        size: bytes of a row in memory, in quarters of those that the file's description gives.
    """

    def __init__(self, folder: DataFolder, name: str, known: FileIndex | None, size: int) -> None:
        import pyarrow.parquet as pq

        self._name = name
        self._size = size
        self._group: _GroupRows | None = None
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
        self.set_index(FileIndex(parts, schema=serialized(self._file.schema_arrow)), known, name)

    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        """The rows of a part of a row group."""
        import pyarrow as pa

        with naming_damage(self._name):
            check_columns(self._file.schema_arrow.names, columns, self._name)
            found = self._seek(*self.part_of(first), columns)
            table = pa.Table.from_batches(found.read(rows))
            self._group = found
            if columns is None:
                return table
            return table.select(list(columns))

    def let_go(self) -> None:
        """Lets go of the group that is being read: of each column, that is a page and its dictionary at least."""
        self._group = None

    def close(self) -> None:
        """Closes the file."""
        self._group = None
        self._file.close()
        self._source.close()

    def _seek(self, group: int, row: int, columns: Sequence[str] | None) -> _GroupRows:
        """The rows of a group from ``row`` on. Goes on from where the file stands, if that is not behind."""
        # what was read of it is lost if this fails
        found = self._group
        self._group = None
        if found is None or found.key != (group, columns) or found.row > row:
            sizes = self.index.groups[group]
            rows = min(_BATCH_ROWS, max(1, 4 * _BATCH_BYTES * sizes.rows // max(1, self._size * sizes.bytes)))
            batches = self._file.iter_batches(rows, row_groups=[group], columns=columns and list(columns))
            found = _GroupRows(group, columns, iter(batches))
        for _ in found.read(row - found.row):
            pass
        return found
