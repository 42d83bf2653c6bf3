"""Parquet as blocks: a slice of a row group, without holding more of the group than the slice.

pyarrow reads row groups from their beginning, so earlier rows are decoded in small batches, and
dropped. Most slices continue after the slice before. A call takes 0.2 ms, so small row groups are
read together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datatrove.io import DataFolder

from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.tables import opened
from datatrove_ckpt.torch.block_file import FileIndex, Group, TableFile

if TYPE_CHECKING:
    import pyarrow as pa


# The largest batch. Rows keep all of it in memory.
_BATCH_ROWS = 2**14
_BATCH_BYTES = 2**21
_BUFFER_BYTES = 2**20


@dataclass(eq=False)
class _GroupReading:
    """The rows of some row groups. ``starts``: the first row of each group. ``row``: the next."""

    columns: Sequence[str] | None
    starts: dict[int, int]
    _batches: Iterator[pa.RecordBatch]
    row: int = 0
    _rest: pa.RecordBatch | None = None

    def read(self, rows: int) -> Iterator[pa.RecordBatch]:
        while rows:
            batch = self._rest or next(self._batches)
            part = batch.slice(0, rows)
            self._rest = None
            if batch.num_rows > rows:
                self._rest = batch.slice(rows)
            self.row = self.row + part.num_rows
            rows = rows - part.num_rows
            yield part


class ParquetBlocks(TableFile):
    """One Parquet file. ``size``: bytes of a row in memory, in quarters of its bytes by the file's
    footer.
    """

    def __init__(self, folder: DataFolder, name: str, known: FileIndex | None, size: int) -> None:
        import pyarrow.parquet as pq

        self._name = name
        self._size = size
        self._run: _GroupReading | None = None
        self._source = opened(folder, name)
        try:
            with naming_damage(name):
                self._file = pq.ParquetFile(
                    self._source, buffer_size=_BUFFER_BYTES, pre_buffer=False
                )
                metadata = self._file.metadata
                groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        except BaseException:
            self._source.close()
            raise
        self._schema = self._file.schema_arrow
        self.set_index(
            self.index_of(Group(group.num_rows, group.total_byte_size) for group in groups), known
        )

    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        import pyarrow as pa

        found = self._seek(part, row, columns)
        table = pa.Table.from_batches(found.read(rows))
        self._run = found
        return table

    def let_go(self) -> None:
        self._run = None  # at least a page of each column and its dictionary

    def close(self) -> None:
        self._run = None
        self._file.close()
        self._source.close()

    def _seek(self, group: int, row: int, columns: Sequence[str] | None) -> _GroupReading:
        found = self._run
        self._run = None  # also if this fails
        if (
            found is None
            or found.columns != columns
            or group not in found.starts
            or found.starts[group] + row < found.row
        ):
            found = self._begin(group, columns)
        for _ in found.read(found.starts[group] + row - found.row):
            pass
        return found

    def _begin(self, group: int, columns: Sequence[str] | None) -> _GroupReading:
        sizes = self.index.groups[group]
        rows = min(
            _BATCH_ROWS, max(1, 4 * _BATCH_BYTES * sizes.rows // max(1, self._size * sizes.bytes))
        )
        starts = {group: 0}
        end = sizes.rows
        for each in [part for part in self.expected if part > group]:
            if end + self.index.groups[each].rows > rows:
                break
            starts[each] = end
            end += self.index.groups[each].rows
        batches = self._file.iter_batches(
            rows, row_groups=list(starts), columns=columns and list(columns)
        )
        return _GroupReading(columns, starts, iter(batches))
