"""A file as parts that can be read alone, and the rows of a part, for each format.

JSONL: the lines are counted once, and read again from the noted places. A row is a line that is not
blank, even if it is damaged, which only parsing shows. A part is about 1 MiB of whole lines. A
compressed file stays open, so parts in order are decompressed once.

Arrow IPC: a part is a slice of a record batch, of which only the slice is read from the disk. Local
files are mapped into memory, so a slice costs its own pages. A batch with compressed buffers, or of
a remote file, is read as a whole, in the wanted columns. pyarrow returns the number of rows only
with the batch, so the flatbuffer before the batch is parsed here (format/Message.fbs of Apache
Arrow).

Parquet: a part is a slice of a row group. pyarrow reads row groups from their beginning, so earlier
rows are decoded in small batches, and dropped. Most slices continue after the slice before. A call
takes 0.2 ms, so small row groups are read together.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import orjson
from datatrove.io import DataFolder

from datatrove_ckpt.common.exact_json import loads
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.inputs import misfit
from datatrove_ckpt.readers.jsonl import JsonlReader
from datatrove_ckpt.readers.positions import Row
from datatrove_ckpt.readers.tables import is_stream, map_or_open, opened, refuse_equal_fields

if TYPE_CHECKING:
    import pyarrow as pa


Rows: TypeAlias = "pa.Table | list[Row | None]"
"""The rows of a block: a table, or for JSONL dicts, and None for a damaged line."""


class Group(NamedTuple):
    """A row group, record batch, or other part of a file that can be read alone."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The parts of one file.

    Attributes:
        groups: in the order of the file.
        sequential: reading a part takes reading the earlier ones.
        schema: Arrow's, serialized; empty for JSONL.
    """

    groups: tuple[Group, ...]
    sequential: bool = False
    schema: bytes = field(default=b"", compare=False)  # its bytes may change with pyarrow's version

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


class BlockFile(ABC):
    _name: str
    expected: Sequence[int] = ()
    """The parts that are read next, in their order."""

    def set_index(self, index: FileIndex, known: FileIndex | None) -> None:
        """Closes the file and raises CheckpointMismatch if its known parts are others."""
        if known not in (None, index):
            self.close()
            raise changed(self._name)
        self.index = index
        self._starts = [0, *accumulate(group.rows for group in index.groups)]

    def part_of(self, row: int) -> tuple[int, int]:
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]

    @abstractmethod
    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> Rows: ...

    def let_go(self) -> None:  # noqa: B027 (LineBlocks keeps the lines of one part)
        """Frees what makes the next part faster to read."""

    @abstractmethod
    def close(self) -> None: ...


class TableFile(BlockFile):
    _schema: pa.Schema

    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        with naming_damage(self._name):
            check_columns(self._schema.names, columns, self._name)
            table = self._read(*self.part_of(first), rows, columns)
        if columns is None:
            return table
        return table.select(list(columns))

    @abstractmethod
    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        """Reads so many rows of a part from ``row`` on, with at least these columns."""

    def index_of(self, groups: Iterable[Group]) -> FileIndex:
        refuse_equal_fields(self._schema, self._name)
        # Without what pandas or Spark have written beside the schema.
        return FileIndex(tuple(groups), schema=bytes(self._schema.remove_metadata().serialize()))


def check_columns(found: Sequence[str], wanted: Sequence[str] | None, name: str) -> None:
    """Raises ConfigError if a file lacks a column, which pyarrow would leave out."""
    if wanted is None:
        return
    missing = [column for column in wanted if column not in found]
    if missing:
        raise ConfigError(
            f"The input file {name!r} has no column {', '.join(map(repr, missing))}. It has "
            f"{', '.join(map(repr, found[:20]))}. Name columns that all files have."
        )


def changed(name: str) -> CheckpointMismatch:
    return misfit(f"The input file {name!r} has changed since its rows were counted.")


GROUP_BYTES = 2**20
"""The size of a part, up to the rest of its last line. Counts depend on it."""
_SKIP_BYTES = 2**20


class LineBlocks(BlockFile):
    """One JSONL file. ``keys``: columns that some line of the input had, to which this file adds
    its own.
    """

    def __init__(
        self, reader: JsonlReader, name: str, known: FileIndex | None, keys: set[str]
    ) -> None:
        self._keys = keys
        self._reader = reader
        self._name = name
        self._is_plain = reader.codec(name) is None
        self._stack = ExitStack()
        self._file: IO[bytes] | None = None
        self._at = 0  # offset in the content
        self._last: tuple[int, list[bytes]] = (-1, [])  # number and lines of a part
        self._part = b""
        self.set_index(
            known or FileIndex(tuple(self._count()), sequential=not self._is_plain), known
        )
        self._offsets = [0, *accumulate(group.bytes for group in self.index.groups)]

    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> list[Row | None]:
        """Reads rows of a part. A row that lacks one of the ``columns`` has None there."""
        number, start = self.part_of(first)
        if self._last[0] != number:
            with ExitStack() as stack:
                if not self._is_plain:
                    stack.enter_context(naming_damage(self._name))
                self._last = (number, self._lines(number))
        parsed = [self._row(line, number) for line in self._last[1][start : start + rows]]
        if columns is None:
            return parsed
        if not self._keys.issuperset(columns):
            # Keys that no line of the first block has are refused. Later blocks may lack a key that
            # few lines have.
            found = {key: None for row in parsed if row for key in row}
            check_columns([*found, *self._keys.difference(found)], columns, self._name)
            self._keys.update(columns)
        return [row and {column: row.get(column) for column in columns} for row in parsed]

    def close(self) -> None:
        self._stack.close()
        self._file = None
        self._last = (-1, [])
        self._part = b""

    def _count(self) -> Iterator[Group]:
        with self._reader.open_content(self._name) as file:
            while part := file.read(GROUP_BYTES):
                if not part.endswith(b"\n"):
                    part += file.readline()
                yield Group(_count_lines(part), len(part))

    def _lines(self, number: int) -> list[bytes]:
        offset = self._offsets[number]
        group = self.index.groups[number]
        if self._file is None or (offset < self._at and not self._is_plain):
            self.close()
            self._file = self._stack.enter_context(self._reader.open_content(self._name))
            self._at = 0
        if self._is_plain:
            self._file.seek(offset)
        else:
            while self._at < offset:
                skipped = len(self._file.read(min(_SKIP_BYTES, offset - self._at)))
                if not skipped:
                    raise changed(self._name)
                self._at += skipped
        part = self._file.read(group.bytes)
        self._at = offset + len(part)
        self._part = part
        lines = _split(part)
        # A line that was moved across the ends of a part shows, too.
        is_whole = part.endswith(b"\n") or number == len(self.index.groups) - 1
        if len(part) != group.bytes or len(lines) != group.rows or not is_whole:
            raise changed(self._name)
        return lines

    def _row(self, line: bytes, number: int) -> Row | None:
        try:
            row = loads(line)
            if type(row) is dict and "media" not in row:
                return row
        except orjson.JSONDecodeError:
            pass
        place = self._offsets[number] + self._part.find(line)
        return self._reader.parse_row(line, self._name, f"@{place}")


def _count_lines(part: bytes) -> int:
    """Counts lines that are not blank: fast for most files, without blank lines and carriage
    returns.
    """
    content = np.frombuffer(part, dtype=np.uint8)
    firsts = content[np.flatnonzero(content[:-1] == ord("\n")) + 1]
    if b"\r" in part or content[0] <= ord(" ") or (firsts <= ord(" ")).any():
        return len(_split(part))
    return len(firsts) + 1


def _split(part: bytes) -> list[bytes]:
    return [line for line in part.splitlines() if line and not line.isspace()]


_CONTINUATION = 0xFFFFFFFF
_MARK_BYTES = 2**8
"""Holds the mark of a file, padding, and the start of the first message."""
# MessageHeader
_DICTIONARY = 2
_RECORD_BATCH = 3


class ArrowBlocks(TableFile):
    """One Arrow file or stream. ``stream``: see ``is_stream``.

    Raises:
        ConfigError: no batch of the stream can be read without the dictionaries before it.
    """

    def __init__(
        self, folder: DataFolder, name: str, known: FileIndex | None, stream: bool
    ) -> None:
        self._name = name
        self._readers: dict[tuple[str, ...] | None, pa.RecordBatchFileReader] = {}
        self._last: tuple[object, pa.RecordBatch] = (None, None)  # key and batch
        with naming_damage(name):
            self._source = map_or_open(folder, name)
            try:
                self._stream = is_stream(self._source, name, stream)
                self._schema, self._batches = self._walk()
            except BaseException:
                self._source.close()
                raise
        # Choosing columns copies them, also out of a mapped file. It pays where all columns would
        # be read.
        self._chooses = not folder.is_local() or any(batch.is_compressed for batch in self._batches)
        self.set_index(
            self.index_of(Group(batch.rows, batch.bytes) for batch in self._batches), known
        )

    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        import pyarrow as pa

        chosen = None
        if columns is not None and self._chooses:
            chosen = tuple(columns)
        key = (part, chosen)
        if self._last[0] != key:
            self.let_go()  # not two batches at once
            self._last = (key, self._batch(part, chosen))
        batch = self._last[1]
        if batch.num_rows != self.index.groups[part].rows:
            raise changed(self._name)
        return pa.Table.from_batches([batch.slice(row, rows)])

    def let_go(self) -> None:
        self._last = (None, None)

    def close(self) -> None:
        self._readers = {}
        self.let_go()
        self._source.close()

    def _batch(self, number: int, columns: tuple[str, ...] | None) -> pa.RecordBatch:
        import pyarrow as pa

        if not self._stream:
            return self._reader(columns).get_batch(number)
        self._source.seek(self._batches[number].offset)
        return pa.ipc.read_record_batch(pa.ipc.read_message(self._source), self._schema)

    def _reader(self, columns: tuple[str, ...] | None) -> pa.RecordBatchFileReader:
        import pyarrow as pa

        if columns not in self._readers:
            options = pa.ipc.IpcReadOptions()
            if columns:
                options.included_fields = [self._schema.get_field_index(name) for name in columns]
            self._readers[columns] = pa.ipc.open_file(self._source, options=options)
        return self._readers[columns]

    def _walk(self) -> tuple[pa.Schema, list[_Message]]:
        import pyarrow as pa

        size = self._source.seek(0, 2) or self._source.tell()
        self._source.seek(0)
        if self._stream:
            schema = pa.ipc.open_stream(self._source).schema
            count = None
        else:
            reader = pa.ipc.open_file(self._source)
            schema = reader.schema
            count = reader.num_record_batches
        try:
            messages = list(_messages(self._source, size, count))
        except struct.error as error:
            raise EOFError("the description of a record batch cannot be read") from error
        if self._stream and any(message.kind == _DICTIONARY for message in messages):
            raise ConfigError(
                f"The input file {self._name!r} is an Arrow stream with dictionaries, of which no "
                "part can be read without what comes before. Write it as an Arrow file, as "
                "Parquet, or without dictionaries."
            )
        batches = [message for message in messages if message.kind == _RECORD_BATCH]
        if count not in (None, len(batches)):
            raise EOFError(f"it should hold {count} record batches, and {len(batches)} are there")
        return schema, batches


class _Message(NamedTuple):
    kind: int
    rows: int
    bytes: int
    is_compressed: bool
    offset: int = 0


def _messages(file: IO[bytes], size: int, count: int | None) -> Iterator[_Message]:
    """Yields the messages of a stream, or of the stream in a file.

    Args:
        count: the record batches of the file, whose stream may lack an end (Arrow for Go before
            2025); None: a stream.

    Raises:
        EOFError: the stream was cut off, or another stream follows.
    """
    file.seek(0)
    found = 0
    offset = 0
    if count is not None:
        offset = max(0, file.read(_MARK_BYTES).find(b"\xff\xff\xff\xff"))
    while found != count:
        file.seek(offset)
        start = file.read(8)
        if len(start) < 8 or struct.unpack_from("<I", start)[0] != _CONTINUATION:
            raise EOFError(
                "the end of its stream is missing, or Arrow before release 0.15 wrote it"
            )
        length = struct.unpack_from("<i", start, 4)[0]
        if length == 0:
            if count is None and offset + 8 != size:
                raise EOFError("other bytes follow the end of its stream")
            return
        message = _message(file.read(length))._replace(offset=offset)
        yield message
        found += message.kind == _RECORD_BATCH
        offset += 8 + length + message.bytes
        if offset > size:
            raise EOFError("its last record batch is incomplete")


def _message(buffer: bytes) -> _Message:
    root = int(struct.unpack_from("<I", buffer)[0])
    kind = _number("<B", buffer, _field(buffer, root, 1))
    size = _number("<q", buffer, _field(buffer, root, 3))
    if kind != _RECORD_BATCH:
        return _Message(kind, 0, size, False)
    header = _field(buffer, root, 2)
    header += struct.unpack_from("<I", buffer, header)[0]
    rows = _number("<q", buffer, _field(buffer, header, 0))
    return _Message(kind, rows, size, _field(buffer, header, 3) > 0)


def _field(buffer: bytes, table: int, number: int) -> int:
    """Returns the offset of a field of a flatbuffer's table; 0: the field has its default."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", buffer, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", buffer, vtable + entry)[0]
    if offset:
        return int(table + offset)
    return 0


def _number(kind: str, buffer: bytes, place: int) -> int:
    if place:
        return int(struct.unpack_from(kind, buffer, place)[0])
    return 0


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
