"""Reads Parquet by row group and row.

A part is a slice of a row group. pyarrow reads row groups from their beginning, so earlier rows are
decoded in small batches, and dropped. Most slices continue after the slice before. A call takes
0.2 ms, so small row groups are read together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from datatrove.io import DataFolder

from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.readers.block_file import FileIndex, Group, TableFile, changed_error, open_input
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.input_progress import FileProgress

_BUFFER_BYTES = 2**20


@dataclass(eq=False)
class _GroupReading:
    """Reads the rows of some row groups, in order.

    Attributes:
        starts: number of the first row of each group.
        row: number of the next row.
    """

    columns: Sequence[str] | None
    starts: dict[int, int]
    _batches: Iterator[pa.RecordBatch]
    row: int = 0
    _remainder: pa.RecordBatch | None = None

    def read(self, rows: int) -> Iterator[pa.RecordBatch]:
        while rows:
            batch = self._remainder or next(self._batches)
            part = batch.slice(0, rows)
            self._remainder = None
            if batch.num_rows > rows:
                self._remainder = batch.slice(rows)
            self.row = self.row + part.num_rows
            rows = rows - part.num_rows
            yield part


class ParquetBlocks(TableFile):
    """One Parquet file.

    Attributes:
        size: bytes of a row in memory, in quarters of its bytes in the file's footer.
    """

    size = 4

    def __init__(self, folder: DataFolder, name: str) -> None:
        self.name = name
        self._is_local = folder.is_local()
        self._run: _GroupReading | None = None
        self._source = open_input(folder, name)
        try:
            with naming_damage(name):
                # Pre-buffering would always read whole columns of a row group.
                self._file = pq.ParquetFile(
                    self._source, buffer_size=_BUFFER_BYTES, pre_buffer=False
                )
                metadata = self._file.metadata
                groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        except BaseException:
            self._source.close()
            raise
        self.schema = self._file.schema_arrow
        self._groups = tuple(Group(group.num_rows, group.total_byte_size) for group in groups)

    def index(self) -> FileIndex:
        return self._index_of(self._groups)

    def use(self, index: FileIndex) -> None:
        """Sets the index that ``read`` needs.

        Raises:
            CheckpointMismatch: the file has other parts.
        """
        if index.groups != self._groups:
            raise changed_error(self.name)
        super().use(index)

    def _parts(self, first: int, extent: FileProgress) -> Iterator[tuple[int, int, int]]:
        self.use(FileIndex(self._groups))
        if not self._is_local:  # a row group's column in one request
            self._file = pq.ParquetFile(
                self._source, metadata=self._file.metadata, pre_buffer=False
            )
        total = max(1, self._firsts[-1])
        extent.starts = [first / total for first in self._firsts]
        extent.lengths = {number: group.rows for number, group in enumerate(self._groups)}
        self.expected = range(len(self._groups))
        for number in self.expected[first:]:
            yield number, self._groups[number].rows, self._groups[number].bytes

    def drop_buffers(self) -> None:
        self._run = None  # at least a page of each column and its dictionary

    def close(self) -> None:
        self._run = None
        self._file.close()
        self._source.close()

    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        reading = self._run
        self._run = None  # also if this fails
        if (
            reading is None
            or reading.columns != columns
            or part not in reading.starts
            or reading.starts[part] + row < reading.row
        ):
            reading = self._begin(part, columns)
        for _ in reading.read(reading.starts[part] + row - reading.row):
            pass
        table = pa.Table.from_batches(reading.read(rows))
        self._run = reading
        return table

    def _begin(self, group: int, columns: Sequence[str] | None) -> _GroupReading:
        sizes = self._groups[group]
        # A row keeps its whole batch in memory.
        rows = min(2**14, max(1, 2**23 * sizes.rows // max(1, self.size * sizes.bytes)))
        starts = {group: 0}
        end = sizes.rows
        for part in self.expected[bisect_right(self.expected, group) :]:
            if end + self._groups[part].rows > rows:
                break
            starts[part] = end
            end += self._groups[part].rows
        batches = self._file.iter_batches(
            rows, row_groups=list(starts), columns=columns and list(columns)
        )
        return _GroupReading(columns, starts, iter(batches))
