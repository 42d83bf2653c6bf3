"""Parquet and Arrow files, read forward or by the numbers of rows.

Arrow IPC: a part is a slice of a record batch. Local files are mapped into memory, so a slice costs
its own pages. A batch with compressed buffers, or of a remote file, is read as a whole; of a remote
file with a footer, in the wanted columns. A stream's batches are found by the messages before them.

Parquet: a part is a slice of a row group. pyarrow reads row groups from their beginning, so earlier
rows are decoded in small batches, and dropped. Most slices continue after the slice before. A call
takes 0.2 ms, so small row groups are read together.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from datatrove.io import DataFolder

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.lazy import pa, pq
from datatrove_ckpt.errors import ConfigError, InputError
from datatrove_ckpt.readers.block_file import BlockFile, FileIndex, Group, changed, check_columns
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.extent import FileExtent
from datatrove_ckpt.readers.input_errors import naming_hub_input, refuse_equal_names

if TYPE_CHECKING:
    Batch: TypeAlias = pa.RecordBatch | pa.Table


Numbers = npt.NDArray[np.int64]


def opened(folder: DataFolder, name: str) -> IO[bytes]:
    with naming_hub_input(folder, name):
        if folder.is_local():
            return cast("IO[bytes]", folder.open(name, "rb"))
        file: Any = retrying.READING.run(lambda: folder.open(name, "rb"), name)
        return cast("IO[bytes]", RetryingFile(file, name))


_FILE_MARK = b"ARROW1"


def is_stream(file: IO[bytes], name: str, stream: bool) -> bool:
    """Returns whether an opened file is an Arrow stream, as ``datasets`` writes it, and no file
    with a footer.

    Args:
        stream: the reader's argument. It decides for the streams of old releases of Arrow, which
            have no mark.

    Raises:
        InputError: the file is neither.
    """
    begin = file.read(len(_FILE_MARK))
    file.seek(0)
    if begin[:4] == b"\xff\xff\xff\xff" or (stream and begin != _FILE_MARK):
        return True
    if begin and not _FILE_MARK.startswith(begin):
        raise InputError(
            f"The input file {name!r} is no Arrow file: it begins with {begin!r}. If it was one, "
            "replace it by a complete copy; else move it out of the input, or choose the files by "
            "a pattern (*.arrow). Then run the same command again."
        )
    return False


_GROUP_BYTES = 2**25  # of rows with pictures a thousand may be 10 GB
_BUFFER_BYTES = 2**20
_MOST_PADDING = 2**8  # of the mark: 2 bytes in most files with a footer, 58 in those of Rust
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(eq=False)
class RetryingFile:
    _file: IO[bytes]
    _name: str

    def read(self, size: int = -1) -> bytes:
        return bytes(retrying.READING.run(lambda: self._file.read(size), self._name))

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def refuse_equal_fields(fields: Iterable[pa.Field], file: str, above: str = "") -> None:
    columns = list(fields)
    refuse_equal_names([column.name for column in columns], file, above)
    for column in columns:
        kind = column.type
        inner = map(kind.field, range(kind.num_fields))
        refuse_equal_fields(inner, file, f"{above}{column.name}.")


class TableFile(BlockFile):
    schema: pa.Schema

    def read(self, first: int, rows: int, columns: Sequence[str] | None = None) -> pa.Table:
        with naming_damage(self.name):
            check_columns(self.schema.names, columns, self.name)
            table = self._read(*self.part_of(first), rows, columns)
        if columns is None:
            return table
        return table.select(list(columns))

    @abstractmethod
    def forward(
        self, place: tuple[int, int], most: int, columns: Sequence[str] | None, extent: FileExtent
    ) -> Iterator[tuple[int, int, Batch]]:
        """Yields the rows from a place (part, row in it) on: place of the first one, and at most
        ``most`` of them, of one part.
        """

    @abstractmethod
    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        """Reads so many rows of a part from ``row`` on, with at least these columns."""

    def _index_of(self, groups: Iterable[Group]) -> FileIndex:
        refuse_equal_fields(self.schema, self.name)
        # Without what pandas or Spark have written beside the schema.
        return FileIndex(tuple(groups), schema=bytes(self.schema.remove_metadata().serialize()))


class ArrowBlocks(TableFile):
    """One Arrow file or stream. ``stream``: see ``is_stream``."""

    def __init__(self, folder: DataFolder, name: str, stream: bool) -> None:
        self.name = name
        self._is_local = folder.is_local()
        self._readers: dict[tuple[str, ...], pa.RecordBatchFileReader] = {}
        self._last: tuple[object, pa.RecordBatch] = (None, None)  # key and batch
        with naming_damage(name):
            if self._is_local:
                self._source = pa.memory_map(folder.resolve_paths(name))
            else:
                self._source = opened(folder, name)
            try:
                self._is_stream = is_stream(self._source, name, stream)
                open_table = pa.ipc.open_stream if self._is_stream else pa.ipc.open_file
                self._reader = open_table(self._source)
            except BaseException:
                self._source.close()
                raise
        self.schema = self._reader.schema

    def count(self) -> FileIndex:
        """Raises ConfigError for a stream of which no batch can be read without the dictionaries
        before it.
        """
        with naming_damage(self.name):
            return self._index_of(self._groups())

    def forward(
        self, place: tuple[int, int], most: int, columns: Sequence[str] | None, extent: FileExtent
    ) -> Iterator[tuple[int, int, Batch]]:
        for number, batch in self._batches(place[0], extent):
            first = place[1] if number == place[0] else 0
            step = _fitting(most, batch.num_rows, batch.nbytes)
            for row in range(first, batch.num_rows, step):
                yield number, row, batch.slice(row, step)

    def let_go(self) -> None:
        self._last = (None, None)

    def close(self) -> None:
        self._readers = {}
        self.let_go()
        self._source.close()

    def _batches(self, first: int, extent: FileExtent) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields the record batches from the ``first`` on, each after its number."""
        if not self._is_stream:
            count = self._reader.num_record_batches
            extent.starts = [number / max(1, count) for number in range(count + 1)]
            for number in range(first, count):
                batch = self._reader.get_batch(number)
                extent.lengths[number] = batch.num_rows
                yield number, batch
            return
        extent.starts = [0.0]
        for number, batch in enumerate(self._reader):
            extent.starts.append(self._source.tell() / max(1.0, extent.size))
            extent.lengths[number] = batch.num_rows
            if number >= first:
                yield number, batch
        _check_end_of_stream(self._source)

    def _groups(self) -> Iterator[Group]:
        """Yields the record batches, whose rows pyarrow knows only with the batch itself."""
        start = number = 0
        if not self._is_stream:
            self._source.seek(len(_FILE_MARK))
            padded = self._source.read(_MOST_PADDING)
            start = (len(_FILE_MARK) + len(padded) - len(padded.lstrip(b"\0"))) // 8 * 8
        while self._is_stream or number < self._reader.num_record_batches:
            self._source.seek(start)
            try:
                message = pa.ipc.read_message(self._source)
            except EOFError:
                break
            if message.type == "dictionary" and self._is_stream:
                raise ConfigError(
                    f"The input file {self.name!r} is an Arrow stream with dictionaries, of which "
                    "no part can be read without what comes before. Write it as an Arrow file, as "
                    "Parquet, or without dictionaries."
                )
            end = self._source.tell()
            if message.type == "record batch":
                if self._is_stream:
                    rows = pa.ipc.read_record_batch(message, self.schema).num_rows
                else:
                    rows = self._batch(number, tuple(self.schema.names[:1])).num_rows
                yield Group(rows, message.body.size, start)
                number += 1
            start = end
        if self._is_stream:
            _check_end_of_stream(self._source)
        elif number < self._reader.num_record_batches:
            raise EOFError(f"only {number} of its record batches are there")

    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        chosen: tuple[str, ...] = ()
        # Choosing columns copies them out of a mapped file.
        if columns is not None and not self._is_local and not self._is_stream:
            chosen = tuple(columns)
        key = (part, chosen)
        if self._last[0] != key:
            self.let_go()  # not two batches at once
            self._last = (key, self._batch(part, chosen))
        batch = self._last[1]
        if batch.num_rows != self.index.groups[part].rows:
            raise changed(self.name)
        return pa.Table.from_batches([batch.slice(row, rows)])

    def _batch(self, number: int, columns: tuple[str, ...]) -> pa.RecordBatch:
        if self._is_stream:
            group = self.index.groups[number]
            self._source.seek(group.start)
            message = pa.ipc.read_message(self._source)
            if message.type != "record batch" or message.body.size != group.bytes:
                raise changed(self.name)
            return pa.ipc.read_record_batch(message, self.schema)
        if not columns:
            return self._reader.get_batch(number)
        if columns not in self._readers:
            fields = [self.schema.get_field_index(name) for name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            self._readers[columns] = pa.ipc.open_file(self._source, options=options)
        return self._readers[columns].get_batch(number)


def _fitting(most: int, rows: int, size: int) -> int:
    return max(1, min(most, rows * _GROUP_BYTES // max(1, size)))


def _check_end_of_stream(file: IO[bytes]) -> None:
    """Raises EOFError where pyarrow sees nothing: at a stream cut between two batches, and before a
    second stream.
    """
    if file.read(1):
        raise EOFError("other bytes follow the end of its stream")
    size = file.tell()
    file.seek(max(0, size - len(_END_OF_STREAM)))
    if file.read() != _END_OF_STREAM:
        raise EOFError("the end of its stream is missing")


# The largest batch. Rows keep all of it in memory.
_BATCH_ROWS = 2**14
_BATCH_BYTES = 2**21


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
    """One Parquet file.

    Args:
        buffer: read a column in requests of so many bytes; 0: each row group's column in one.

    Attributes:
        size: bytes of a row in memory, in quarters of its bytes by the file's footer.
    """

    size = 4

    def __init__(self, folder: DataFolder, name: str, buffer: int = _BUFFER_BYTES) -> None:
        self.name = name
        self._run: _GroupReading | None = None
        self._source = opened(folder, name)
        try:
            with naming_damage(name):
                # Pre-buffering would always read whole columns of a row group.
                self._file = pq.ParquetFile(self._source, buffer_size=buffer, pre_buffer=False)
                metadata = self._file.metadata
                groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        except BaseException:
            self._source.close()
            raise
        self.schema = self._file.schema_arrow
        self._groups = tuple(Group(group.num_rows, group.total_byte_size) for group in groups)

    def count(self) -> FileIndex:
        return self._index_of(self._groups)

    def use(self, index: FileIndex) -> None:
        """Raises CheckpointMismatch if the file has other parts."""
        if index.groups != self._groups:
            raise changed(self.name)
        super().use(index)

    def forward(
        self, place: tuple[int, int], most: int, columns: Sequence[str] | None, extent: FileExtent
    ) -> Iterator[tuple[int, int, Batch]]:
        self.use(FileIndex(self._groups))
        extent.set_groups([group.rows for group in self._groups])
        self.expected = range(len(self._groups))
        for number in self.expected[place[0] :]:
            rows, size, _ = self._groups[number]
            step = _fitting(most, rows, size)
            for row in range(place[1] if number == place[0] else 0, rows, step):
                yield number, row, self._read(number, row, min(step, rows - row), columns)

    def let_go(self) -> None:
        self._run = None  # at least a page of each column and its dictionary

    def close(self) -> None:
        self._run = None
        self._file.close()
        self._source.close()

    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        found = self._seek(part, row, columns)
        table = pa.Table.from_batches(found.read(rows))
        self._run = found
        return table

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
        sizes = self._groups[group]
        rows = min(
            _BATCH_ROWS, max(1, 4 * _BATCH_BYTES * sizes.rows // max(1, self.size * sizes.bytes))
        )
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
