"""Formats as blocks of rows: the parts of a file, and rows of it, for ``blocks``.

Parquet: a slice of a row group, without holding more of the group than the slice. Row groups of a million rows are
usual. pyarrow reads them from their beginning, so earlier rows of the group are decoded in small batches, and dropped.
The batches go on where the last slice ended, because slices are mostly asked for in order.

Arrow IPC: a slice of a record batch, of which only the slice is read from the disk.

A record batch may be a whole file. Local files are mapped into memory, so a slice of a batch costs its own pages. A
batch with compressed buffers, or of a remote file, is read as a whole, but only its columns that are asked for.

How many rows a batch has is written before it, in a flatbuffer of some hundred bytes, and nowhere else. pyarrow tells
it only with the batch, so it is read here: format/Message.fbs of Apache Arrow.

JSONL: the lines are counted once, and read again from places that the count has noted.

A row is a line that is not blank. A part is about 1 MiB of whole lines, so the places are the sums of the parts' sizes.
A damaged line is a row, because only parsing shows it. A compressed file is decompressed from its beginning up to the
part; it stays open, so parts that are asked for in order are decompressed once.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import orjson
from datatrove.io import DataFolder

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.inputs import remedy
from datatrove_ckpt.readers.jsonl import JsonlReader
from datatrove_ckpt.readers.positions import Row
from datatrove_ckpt.readers.tables import is_stream, map_or_open, opened

if TYPE_CHECKING:
    import pyarrow as pa


Rows: TypeAlias = "pa.Table | list[Row | None]"
"""The rows of a block: a table, or for JSONL a dict for each line, and None for a damaged one."""


class Group(NamedTuple):
    """A row group, record batch, or other part of a file that can be read without the other parts."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The parts of one file.

    Attributes:
        groups: in the order of the file.
        sequential: a part cannot be read without what comes before it in the file.
        schema: Arrow's, serialized; empty for JSONL.
    """

    groups: tuple[Group, ...]
    sequential: bool = False
    schema: bytes = field(default=b"", compare=False)  # its bytes may change with pyarrow's version


class BlockFile(ABC):
    """One open file. ``index``: its parts."""

    def set_index(self, index: FileIndex, known: FileIndex | None, name: str) -> None:
        """Closes the file and raises CheckpointMismatch if other parts are known of it."""
        if known not in (None, index):
            self.close()
            raise changed(name)
        self.index = index
        self._starts = [0, *accumulate(group.rows for group in index.groups)]

    def part_of(self, row: int) -> tuple[int, int]:
        """The part that has a row, and the row's number there."""
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]

    @abstractmethod
    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> Rows:
        """So many rows from ``first`` on, all of the same part."""

    def let_go(self) -> None:  # noqa: B027 (LineBlocks keeps what it has: the lines of one part)
        """Frees what is kept so that the next part can be read faster."""

    @abstractmethod
    def close(self) -> None:
        """Closes the file."""


def serialized(schema: pa.Schema) -> bytes:
    """A schema without what pandas or Spark have written beside it."""
    return bytes(schema.remove_metadata().serialize())


def check_columns(found: Sequence[str], wanted: Sequence[str] | None, name: str) -> None:
    """Refuses columns that a file does not have, which pyarrow would leave out without a word.

    Raises:
        ConfigError: there is no such column, or there are two.
    """
    twice = [column for column in dict.fromkeys(wanted or ()) if found.count(column) > 1]
    if twice:
        raise ConfigError(f"The input file {name!r} has two columns {twice[0]!r}. Rename one, or read other columns.")
    missing = [column for column in wanted or () if column not in found]
    if missing:
        raise ConfigError(
            f"The input file {name!r} has no column {', '.join(map(repr, missing))}. It has "
            f"{', '.join(map(repr, found[:20]))}. Name columns that all files have."
        )


def changed(name: str) -> CheckpointMismatch:
    """The error for a file that is not the one whose parts are known."""
    return CheckpointMismatch(f"The input file {name!r} has changed since its rows were counted. {remedy()}")


_BATCH_ROWS = 2**14
_BATCH_BYTES = 2**21
"""The most that is decoded together. Rows keep all of their batch, so it must be small beside a block."""
_BUFFER_BYTES = 2**20


class _GroupRows:
    """The rows of one row group, from its beginning on. ``row``: how many were read."""

    def __init__(self, group: int, columns: tuple[str, ...] | None, batches: Iterator[Any]) -> None:
        self.key = (group, columns)
        self.row = 0
        self._batches = batches
        self._rest = None

    def read(self, rows: int) -> Iterator[Any]:
        """The next rows, in parts of batches."""
        while rows:
            batch = self._rest or next(self._batches)
            part = batch.slice(0, rows)
            self._rest = batch.slice(part.num_rows) if batch.num_rows > rows else None
            self.row = self.row + part.num_rows
            rows = rows - part.num_rows
            yield part


class ParquetBlocks(BlockFile):
    """One Parquet file. See ``block_formats.BlockFile``.

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
            found = self._seek(*self.part_of(first), None if columns is None else tuple(columns))
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

    def _seek(self, group: int, row: int, columns: tuple[str, ...] | None) -> _GroupRows:
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


_CONTINUATION = 0xFFFFFFFF
_MARK_BYTES = 2**8
"""The mark of a file, what aligns the messages behind it (to 64 bytes for Arrow in Rust), and the first of them."""
# MessageHeader
_DICTIONARY = 2
_RECORD_BATCH = 3


class ArrowBlocks(BlockFile):
    """One Arrow file or stream. See ``block_formats.BlockFile``.

    Args:
        stream: see ``is_stream``.
    """

    def __init__(self, folder: DataFolder, name: str, known: FileIndex | None, stream: bool) -> None:
        self._name = name
        self._readers: dict[Any, Any] = {}
        self._last: tuple[Any, Any] = (None, None)  # key and batch
        self._cursor: tuple[int, Iterator[Any]] | None = None  # batches of a stream with dictionaries
        with naming_damage(name):
            self._source = map_or_open(folder, name)
            try:
                self._stream = is_stream(self._source, name, stream)
                self._schema, self._batches, dictionaries, compressed = self._walk()
            except BaseException:
                self._source.close()
                raise
        # Choosing columns copies them, also out of a mapped file. It pays where the others must be read, too.
        self._chooses = compressed or not folder.is_local()
        groups = tuple(Group(rows, size) for _, rows, size in self._batches)
        self.set_index(FileIndex(groups, self._stream and dictionaries, serialized(self._schema)), known, name)

    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        """The rows of a part of a record batch."""
        import pyarrow as pa

        with naming_damage(self._name):
            check_columns(self._schema.names, columns, self._name)
            number, start = self.part_of(first)
            key = (number, tuple(columns) if columns is not None and self._chooses else None)
            if self._last[0] != key:
                self._last = (None, None)  # not two batches at once
                self._last = (key, self._batch(number, key[1]))
            batch = self._last[1]
            if batch.num_rows != self.index.groups[number].rows:
                raise changed(self._name)
            table = pa.Table.from_batches([batch.slice(start, rows)])
            if columns is None:
                return table
            return table.select(list(columns))

    def let_go(self) -> None:
        """Lets go of the latest record batch."""
        self._last = (None, None)

    def close(self) -> None:
        """Closes the file."""
        self._readers = {}
        self._last = (None, None)
        self._cursor = None
        self._source.close()

    def _batch(self, number: int, columns: tuple[str, ...] | None) -> Any:
        import pyarrow as pa

        if not self._stream:
            return self._reader(columns).get_batch(number)
        if not self.index.sequential:
            self._source.seek(self._batches[number][0])
            return pa.ipc.read_record_batch(pa.ipc.read_message(self._source), self._schema)
        after, batches = self._cursor or (0, iter(()))
        if self._cursor is None or after > number:
            self._source.seek(0)
            after = 0
            batches = iter(pa.ipc.open_stream(self._source))
        self._cursor = None  # it may not be used again if this fails
        for _ in range(number - after):
            next(batches)
        batch = next(batches)
        self._cursor = (number + 1, batches)
        return batch

    def _reader(self, columns: tuple[str, ...] | None) -> Any:
        import pyarrow as pa

        if columns not in self._readers:
            fields = None if not columns else [self._schema.get_field_index(name) for name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            self._readers[columns] = pa.ipc.open_file(self._source, options=options)
        return self._readers[columns]

    def _walk(self) -> tuple[Any, list[tuple[int, int, int]], bool, bool]:
        """Schema; offset, rows and bytes of each record batch; whether there are dictionaries; whether compressed."""
        import pyarrow as pa

        size = self._source.seek(0, 2) or self._source.tell()
        self._source.seek(0)
        reader = (pa.ipc.open_stream if self._stream else pa.ipc.open_file)(self._source)
        try:
            count = None if self._stream else reader.num_record_batches
            messages = list(_messages(self._source, size, count))
        except (struct.error, IndexError) as error:
            raise EOFError("the description of a record batch cannot be read") from error
        batches = [message for kind, message in messages if kind == _RECORD_BATCH]
        dictionaries = any(kind == _DICTIONARY for kind, _ in messages)
        if not self._stream and reader.num_record_batches != len(batches):
            raise EOFError(f"it should hold {reader.num_record_batches} record batches, and {len(batches)} are there")
        return reader.schema, [batch[:3] for batch in batches], dictionaries, any(batch[3] for batch in batches)


_Message: TypeAlias = tuple[int, tuple[int, int, int, bool]]
"""Kind; offset, rows and bytes; whether its buffers are compressed."""


def _messages(file: IO[bytes], size: int, count: int | None) -> Iterator[_Message]:
    """The messages of a stream, or of the stream that a file with a table of contents holds.

    Args:
        count: the record batches of that file, whose stream may have no end (Arrow for Go before 2025); None: a stream.

    Raises EOFError if it was cut off, or another follows.
    """
    file.seek(0)
    is_stream = count is None
    found = 0
    offset = 0 if is_stream else max(0, file.read(_MARK_BYTES).find(b"\xff\xff\xff\xff"))
    while is_stream or found != count:
        file.seek(offset)
        start = file.read(8)
        if len(start) < 8 or struct.unpack_from("<I", start)[0] != _CONTINUATION:
            raise EOFError("the end of its stream is missing, or Arrow before release 0.15 wrote it")
        length = struct.unpack_from("<i", start, 4)[0]
        if length == 0:
            if is_stream and offset + 8 != size:
                raise EOFError("other bytes follow the end of its stream")
            return
        kind, rows, body, compressed = _message(file.read(length))
        yield kind, (offset, rows, body, compressed)
        found += kind == _RECORD_BATCH
        offset += 8 + length + body
        if offset > size:
            raise EOFError("its last record batch is incomplete")


def _message(buffer: bytes) -> tuple[int, int, int, bool]:
    """Kind, rows and bytes of what follows, and whether it is compressed. Only a record batch has rows."""
    root = int(struct.unpack_from("<I", buffer)[0])
    kind = _number("<B", buffer, _field(buffer, root, 1))
    rows = 0
    compressed = False
    if kind == _RECORD_BATCH:
        header = _field(buffer, root, 2)
        header += struct.unpack_from("<I", buffer, header)[0]
        rows = _number("<q", buffer, _field(buffer, header, 0))
        compressed = _field(buffer, header, 3) > 0
    return kind, rows, _number("<q", buffer, _field(buffer, root, 3)), compressed


def _field(buffer: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table lies; 0: it has its default."""
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


GROUP_BYTES = 2**20
"""The size of a part of a JSONL file, up to the rest of its last line. Counts depend on it."""
_SKIP_BYTES = 2**20


class LineBlocks(BlockFile):
    """One JSONL file. See ``block_formats.BlockFile``.

    Args:
        keys: columns that some line of the input had; this adds to them.
    """

    def __init__(self, reader: JsonlReader, name: str, known: FileIndex | None, keys: set[str]) -> None:
        self._keys = keys
        self._reader = reader
        self._name = name
        self._is_plain = reader._codec(name) is None
        self._stack = ExitStack()
        self._file: IO[bytes] | None = None
        self._at = 0  # offset in the content
        self._last: tuple[int, list[bytes]] = (-1, [])  # number and lines of a part
        self._part = b""
        self.set_index(known or FileIndex(tuple(self._count()), sequential=not self._is_plain), known, name)
        self._offsets = [0, *accumulate(group.bytes for group in self.index.groups)]

    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> list[Row | None]:
        """The rows of a part. A row without a column that is asked for has None there."""
        number, start = self.part_of(first)
        if self._last[0] != number:
            with nullcontext() if self._is_plain else naming_damage(self._name):
                self._last = (number, self._lines(number))
        parsed = [self._row(line, number) for line in self._last[1][start : start + rows]]
        if columns is None:
            return parsed
        if not self._keys.issuperset(columns):
            # Keys that no line of the first block has are refused. Later, a key that few lines have may be missing.
            found = {key: None for row in parsed if row for key in row}
            check_columns([*found, *self._keys.difference(found)], columns, self._name)
            self._keys.update(columns)
        return [row and {column: row.get(column) for column in columns} for row in parsed]

    def close(self) -> None:
        """Closes the file."""
        self._stack.close()
        self._file = None
        self._last = (-1, [])
        self._part = b""

    def _count(self) -> Iterator[Group]:
        with self._reader._open(self._name) as file:
            while part := file.read(GROUP_BYTES):
                if not part.endswith(b"\n"):
                    part += file.readline()
                yield Group(_count_lines(part), len(part))

    def _lines(self, number: int) -> list[bytes]:
        """The lines of a part that are not blank. Raises CheckpointMismatch if they are not those that were counted."""
        offset = self._offsets[number]
        group = self.index.groups[number]
        if self._file is None or (offset < self._at and not self._is_plain):
            self.close()
            self._file = self._stack.enter_context(self._reader._open(self._name))
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
        # The lines around it are those of other parts, so a line that was moved across its ends shows, too.
        is_whole = part.endswith(b"\n") or number == len(self.index.groups) - 1
        if len(part) != group.bytes or len(lines) != group.rows or not is_whole:
            raise changed(self._name)
        return lines

    def _row(self, line: bytes, number: int) -> Row | None:
        try:
            row = orjson.loads(line)
            if type(row) is dict and "media" not in row:
                return row
        except orjson.JSONDecodeError:
            pass
        place = self._offsets[number] + self._part.find(line)
        return self._reader.parse_row(line, self._name, f"@{place}")


def _count_lines(part: bytes) -> int:
    """How many lines are not blank. Most files have neither blank lines nor lone carriage returns, and no last one."""
    if b"\r" in part:
        return len(_split(part))
    content = np.frombuffer(part, dtype=np.uint8)
    ends = np.flatnonzero(content == ord("\n"))
    firsts = content[ends[:-1] + 1] if len(ends) and ends[-1] == len(content) - 1 else content[ends + 1]
    if content[0] <= ord(" ") or (firsts <= ord(" ")).any():
        return len(_split(part))
    return len(firsts) + 1


def _split(part: bytes) -> list[bytes]:
    return [line for line in part.splitlines() if line and not line.isspace()]
