"""Reads files that consist of parts, each of which can be read alone: Parquet and Arrow IPC.

A reader of a pipeline reads a file forward, from any position, without an index (``blocks``). A
training counts the rows of each part once (``index``), and reads rows by their numbers (``read``).

Parquet is read by row group and row: a part is a slice of a row group. pyarrow reads row groups
from their beginning, so earlier rows are decoded in small batches, and dropped. A call takes 0.2
ms, so small row groups are read together.

Arrow IPC is read from files with a footer, and from streams: a part is a slice of a record batch.
Local files are mapped into memory, so a slice costs its own pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import IO, NamedTuple, TypeAlias, cast

from datatrove.io import DataFolder

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.inputs import (
    FilePosition,
    FileProgress,
    Row,
    RowBlock,
    file_error,
    naming_hub_input,
    position_mismatch,
    refuse_equal_names,
)

_PART_BYTES = 2**25  # a thousand rows with pictures may be 10 GB

BlockRows: TypeAlias = "pa.Table | list[Row | None]"
"""Rows of a file: a table, or for JSONL dicts, and None for a damaged line."""


class Group(NamedTuple):
    """A row group, record batch, or other part of a file that can be read alone.

    Attributes:
        start: offset in the content, for formats that seek.
    """

    rows: int
    bytes: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The parts of one file.

    Attributes:
        sequential: whether a part can be read only after the earlier parts.
        schema: serialized Arrow schema; empty for JSONL.
    """

    groups: tuple[Group, ...]
    sequential: bool = False
    schema: bytes = field(default=b"", compare=False)  # its bytes may change with pyarrow's version

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


class BlockFile(ABC):
    name: str
    groups: tuple[Group, ...]
    expected: Sequence[int] = ()
    """Numbers of the parts that will be read next, in order."""

    @abstractmethod
    def blocks(self, file_position: FilePosition, extent: FileProgress) -> Iterator[RowBlock]:
        """Yields the rows after a position, and records the share of the file that was read."""

    @abstractmethod
    def index(self) -> FileIndex:
        """Counts the rows of each part.

        Raises:
            InputError: the file is damaged.
        """

    def use(self, index: FileIndex) -> None:
        """Sets the index that ``read`` needs."""
        self.groups = index.groups
        self._firsts = [0, *accumulate(group.rows for group in index.groups)]

    def part_of(self, row: int) -> tuple[int, int]:
        number = bisect_right(self._firsts, row) - 1
        return number, row - self._firsts[number]

    @abstractmethod
    def read(self, first: int, rows: int, columns: Sequence[str] | None = None) -> BlockRows:
        """Reads rows of one part, from the ``first`` row of the file on.

        Raises:
            ConfigError: the file has no such column.
            InputError: the file is damaged.
            CheckpointMismatch: the file has changed since its rows were counted.
        """

    def drop_buffers(self) -> None:  # noqa: B027 (most files keep no buffers)
        """Frees memory that would make the next part faster to read."""

    @abstractmethod
    def close(self) -> None: ...


class TableFile(BlockFile):
    schema: pa.Schema

    def read(self, first: int, rows: int, columns: Sequence[str] | None = None) -> pa.Table:
        with naming_damage(self.name):
            check_columns(self.schema.names, columns, self.name)
            table = self._read(*self.part_of(first), rows, columns)
        if columns is None:
            return table
        return table.select(list(columns))

    def blocks(
        self,
        file_position: FilePosition,
        extent: FileProgress,
        max_rows: int = 1000,
        columns: Sequence[str] | None = None,
    ) -> Iterator[RowBlock]:
        first, row = file_position[:2] or (0, 0)
        with naming_damage(self.name):
            for part, rows, size in self._parts(first, extent):
                label = f"row {{}} of group {part + 1}"
                step = max(1, min(max_rows, rows * _PART_BYTES // max(1, size)))
                for start in range(row, rows, step):
                    table = self._read(part, start, min(step, rows - start), columns)
                    numbers = range(start + 1, rows + 1)
                    positions = zip(repeat(part), numbers)
                    read = _python_rows(table, self.name)
                    yield RowBlock(label, zip(read, repeat(None), positions, numbers))
                row = 0

    @abstractmethod
    def _parts(self, first: int, extent: FileProgress) -> Iterator[tuple[int, int, int]]:
        """Yields number, rows and size of each part before it is read."""

    @abstractmethod
    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        """May also read other columns."""

    def _index_of(self, groups: Iterable[Group]) -> FileIndex:
        refuse_equal_names(self.schema.names, self.name)
        # The metadata of pandas or Spark is no part of the schema.
        return FileIndex(tuple(groups), schema=bytes(self.schema.remove_metadata().serialize()))


@dataclass(eq=False)
class RetryingFile:
    """A remote file whose reads are retried."""

    _file: IO[bytes]
    _name: str

    def read(self, size: int = -1) -> bytes:
        return bytes(retrying.READING.run(lambda: self._file.read(size), self._name))

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def open_input(folder: DataFolder, name: str) -> IO[bytes]:
    with naming_hub_input(folder, name):
        if folder.is_local():
            return cast("IO[bytes]", folder.open(name, "rb"))
        file = retrying.READING.run(lambda: folder.open(name, "rb"), name)
        return cast("IO[bytes]", RetryingFile(file, name))


def check_columns(existing: Sequence[str], needed: Sequence[str] | None, name: str) -> None:
    """Raises ConfigError if a file lacks a column: pyarrow would silently omit it."""
    if needed is None:
        return
    missing = [column for column in needed if column not in existing]
    if missing:
        raise ConfigError(
            f"The input file {name!r} has no column {', '.join(map(repr, missing))}. It has "
            f"{', '.join(map(repr, existing[:20]))}. Name columns that all files have."
        )


def changed_error(name: str) -> CheckpointMismatch:
    return position_mismatch(f"The input file {name!r} has changed since its rows were counted.")


_SHORTER = {"time64[ns]": "time64[us]", "duration[ns]": "duration[us]"}
"""The types whose values Python holds only without nanoseconds."""


def _python_rows(batch: pa.Table, name: str) -> list[Row]:
    try:
        for column in batch.columns:
            _refuse_lost_digits(column)
        return cast("list[Row]", batch.to_pylist())
    except (OverflowError, ValueError):
        for field, column in zip(batch.schema, batch.columns, strict=True):
            try:
                _refuse_lost_digits(column)
                column.to_pylist()
            except (OverflowError, ValueError) as error:
                raise file_error(
                    name,
                    f"has in the column {field.name!r}, of type {field.type}, a value that "
                    f"Python cannot hold: {error}",
                    "Convert the column, for example to text",
                ) from error
        raise


def _refuse_lost_digits(column: pa.ChunkedArray) -> None:
    kind = str(column.type)
    if kind in _SHORTER:
        column.cast(_SHORTER[kind])
    elif any(shorter in kind for shorter in _SHORTER):
        raise ValueError("nanoseconds within lists, structs and dictionaries")


# Parquet ------------------------------------------------------------------------------------------


_BUFFER_BYTES = 2**20


@dataclass(eq=False)
class _GroupReading:
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
        if index.groups != self._groups:
            raise changed_error(self.name)
        super().use(index)

    def _parts(self, first: int, extent: FileProgress) -> Iterator[tuple[int, int, int]]:
        self.use(FileIndex(self._groups))
        if not self._is_local:
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
        self._run = None
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


# Arrow IPC ----------------------------------------------------------------------------------------


_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowBlocks(TableFile):
    def __init__(self, folder: DataFolder, name: str) -> None:
        self.name = name
        self._last: tuple[int, pa.RecordBatch] = (-1, None)
        with naming_damage(name):
            if folder.is_local():
                self._source = pa.memory_map(folder.resolve_paths(name))
            else:
                self._source = open_input(folder, name)
            try:
                self._is_stream = is_stream(self._source, name)
                open_table = pa.ipc.open_stream if self._is_stream else pa.ipc.open_file
                self._reader = open_table(self._source)
            except BaseException:
                self._source.close()
                raise
        self.schema = self._reader.schema

    def index(self) -> FileIndex:
        """Counts the rows of each record batch.

        Raises:
            ConfigError: the file is a stream with dictionaries, which every later batch needs.
        """
        with naming_damage(self.name):
            return self._index_of(self._groups())

    def drop_buffers(self) -> None:
        self._last = (-1, None)

    def close(self) -> None:
        self.drop_buffers()
        self._source.close()

    def _parts(self, first: int, extent: FileProgress) -> Iterator[tuple[int, int, int]]:
        for number, batch in self._batches(first, extent):
            extent.lengths[number] = batch.num_rows
            if number >= first:
                self._last = (number, batch)
                yield number, batch.num_rows, batch.nbytes

    def _batches(self, first: int, extent: FileProgress) -> Iterator[tuple[int, pa.RecordBatch]]:
        if not self._is_stream:
            count = self._reader.num_record_batches
            extent.starts = [number / max(1, count) for number in range(count + 1)]
            for number in range(first, count):
                yield number, self._reader.get_batch(number)
            return
        extent.starts = [0.0]
        for number, batch in enumerate(self._reader):
            extent.starts.append(self._source.tell() / max(1.0, extent.size))
            yield number, batch
        _check_end_of_stream(self._source)

    def _groups(self) -> Iterator[Group]:
        """Yields the sizes of record batches, from their messages: without columns, a batch has its
        rows.
        """
        start = number = 0
        if not self._is_stream:
            self._source.seek(len(_FILE_MAGIC))
            # The magic bytes are padded by 2 bytes in most files with a footer, by 58 in Rust's.
            padded = self._source.read(2**8)
            start = (len(_FILE_MAGIC) + len(padded) - len(padded.lstrip(b"\0"))) // 8 * 8
        while self._is_stream or number < self._reader.num_record_batches:
            self._source.seek(start)
            try:
                message = pa.ipc.read_message(self._source)
            except EOFError:
                break
            if message.type == "dictionary" and self._is_stream:
                raise ConfigError(
                    f"The input file {self.name!r} is an Arrow stream with dictionaries. Write "
                    "it as an Arrow file or Parquet."
                )
            end = self._source.tell()
            if message.type == "record batch":
                rows = pa.ipc.read_record_batch(message, pa.schema([])).num_rows
                yield Group(rows, message.body.size, start)
                number += 1
            start = end
        if self._is_stream:
            _check_end_of_stream(self._source)
        elif number < self._reader.num_record_batches:
            raise EOFError(f"only {number} of its record batches are there")

    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        if self._last[0] != part:
            self.drop_buffers()
            batch = self._batch(part)
            if batch.num_rows != self.groups[part].rows:
                raise changed_error(self.name)
            self._last = (part, batch)
        return pa.Table.from_batches([self._last[1].slice(row, rows)])

    def _batch(self, number: int) -> pa.RecordBatch:
        if self._is_stream:
            group = self.groups[number]
            self._source.seek(group.start)
            message = pa.ipc.read_message(self._source)
            if message.type != "record batch" or message.body.size != group.bytes:
                raise changed_error(self.name)
            return pa.ipc.read_record_batch(message, self.schema)
        return self._reader.get_batch(number)


def is_stream(file: IO[bytes], name: str) -> bool:
    """Whether an open file is an Arrow stream, as ``datasets`` writes it, without a footer.

    Raises:
        InputError: the file is no Arrow file.
    """
    begin = file.read(len(_FILE_MAGIC))
    file.seek(0)
    if begin[:4] == b"\xff\xff\xff\xff":
        return True
    if begin and not _FILE_MAGIC.startswith(begin):
        advice = "Replace it by a complete copy, or choose the files by a pattern (*.arrow)"
        raise file_error(name, f"is no Arrow file: it begins with {begin!r}", advice)
    return False


def _check_end_of_stream(file: IO[bytes]) -> None:
    """Checks the end of a stream, because pyarrow does not: it may be cut between two batches, or
    be followed by a second stream.
    """
    if file.read(1):
        raise EOFError("other bytes follow the end of its stream")
    size = file.tell()
    file.seek(max(0, size - len(_END_OF_STREAM)))
    if file.read() != _END_OF_STREAM:
        raise EOFError("the end of its stream is missing")
