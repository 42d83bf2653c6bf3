"""Arrow IPC as blocks of rows: a slice of a record batch, of which only the slice is read from the disk.

A record batch may be a whole file. Local files are mapped into memory, so a slice of a batch costs its own pages. A
batch with compressed buffers, or of a remote file, is read as a whole, but only its columns that are asked for.

How many rows a batch has is written before it, in a flatbuffer of some hundred bytes, and nowhere else. pyarrow tells
it only with the batch, so it is read here: format/Message.fbs and format/File.fbs of Apache Arrow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from datatrove.io import DataFolder

from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.block_files import BlockFile, FileIndex, Group, changed, check_columns, opened, serialized
from datatrove_ckpt.readers.compressed import naming_damage

if TYPE_CHECKING:
    import pyarrow as pa

_CONTINUATION = 0xFFFFFFFF
_FILE_MARK, _STREAM_MARK = b"ARROW1", b"\xff\xff\xff\xff"
_DICTIONARY, _RECORD_BATCH = 2, 3  # MessageHeader


def map_or_open(folder: DataFolder, name: str) -> Any:
    """A local file as memory, or a remote one whose reads are repeated."""
    import pyarrow as pa

    return pa.memory_map(folder.resolve_paths(name)) if folder.is_local() else opened(folder, name)


def is_stream(file: IO[bytes], name: str, stream: bool) -> bool:
    """Whether an opened file is an Arrow stream, as ``datasets`` writes it, and not a file with a table of contents.

    Args:
        stream: what the reader was told. It decides for the streams of old releases of Arrow, which have no mark.

    Raises:
        InputError: the file is neither.
    """
    begin = file.read(len(_FILE_MARK))
    file.seek(0)
    if begin[:4] == _STREAM_MARK or (stream and begin != _FILE_MARK):
        return True
    if begin and not _FILE_MARK.startswith(begin):
        raise InputError(
            f"The input file {name!r} is no Arrow file: it begins with {begin!r}. If it was one, replace it by a "
            'complete copy; else move it out of the input, or start with glob_pattern="*.arrow". Then run the same '
            "command again."
        )
    return False


class ArrowBlocks(BlockFile):
    """One Arrow file or stream. See ``block_files.BlockFile``.

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
        self.set_index(FileIndex(groups, self._stream and dictionaries, serialized(self._schema)))
        if known not in (None, self.index):
            self._source.close()
            raise changed(name)

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
            return table if columns is None else table.select(list(columns))

    def let_go(self) -> None:
        """Lets go of the latest record batch."""
        self._last = (None, None)

    def close(self) -> None:
        """Closes the file."""
        self._readers, self._last, self._cursor = {}, (None, None), None
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
            after, batches = 0, iter(pa.ipc.open_stream(self._source))
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
        try:
            if self._stream:
                schema = pa.ipc.open_stream(self._source).schema
                messages = list(_stream_messages(self._source, size))
            else:
                schema = pa.ipc.open_file(self._source).schema
                messages = list(_file_messages(self._source, size))
        except (struct.error, IndexError) as error:
            raise EOFError("the description of a record batch cannot be read") from error
        batches = [message for kind, message in messages if kind == _RECORD_BATCH]
        dictionaries = any(kind == _DICTIONARY for kind, _ in messages)
        return schema, [batch[:3] for batch in batches], dictionaries, any(batch[3] for batch in batches)


_Message: TypeAlias = tuple[int, tuple[int, int, int, bool]]
"""Kind; offset, rows and bytes; whether its buffers are compressed."""


def _stream_messages(file: IO[bytes], size: int) -> Iterator[_Message]:
    """The messages. Raises EOFError if the stream was cut off, or another follows."""
    offset = 0
    while True:
        file.seek(offset)
        start = file.read(8)
        if len(start) < 8 or struct.unpack_from("<I", start)[0] != _CONTINUATION:
            raise EOFError("the end of its stream is missing")
        length = struct.unpack_from("<i", start, 4)[0]
        if length == 0:
            if offset + 8 != size:
                raise EOFError("other bytes follow the end of its stream")
            return
        kind, rows, body, compressed = _message(file.read(length))
        yield kind, (offset, rows, body, compressed)
        offset += 8 + length + body
        if offset > size:
            raise EOFError("its last record batch is incomplete")


def _file_messages(file: IO[bytes], size: int) -> Iterator[_Message]:
    """As ``_stream_messages``, for the record batches that the table of contents at a file's end lists."""
    file.seek(size - 10)
    length = struct.unpack_from("<i", file.read(4))[0]
    file.seek(size - 10 - length)
    footer = file.read(length)
    vector = _field(footer, _root(footer), 3)
    if not vector:
        return
    vector += struct.unpack_from("<I", footer, vector)[0]
    for number in range(struct.unpack_from("<I", footer, vector)[0]):
        offset, metadata, body = struct.unpack_from("<qi4xq", footer, vector + 4 + 24 * number)
        file.seek(offset)
        message = file.read(metadata)
        has_marker = struct.unpack_from("<I", message)[0] == _CONTINUATION
        kind, rows, _, compressed = _message(message[8 if has_marker else 4 :])
        yield kind, (offset, rows, body, compressed)


def _message(buffer: bytes) -> tuple[int, int, int, bool]:
    """Kind, rows and bytes of what follows, and whether it is compressed. Only a record batch has rows."""
    root = _root(buffer)
    kind = _number("<B", buffer, _field(buffer, root, 1))
    rows, compressed = 0, False
    if kind == _RECORD_BATCH:
        header = _field(buffer, root, 2)
        header += struct.unpack_from("<I", buffer, header)[0]
        rows = _number("<q", buffer, _field(buffer, header, 0))
        compressed = _field(buffer, header, 3) > 0
    return kind, rows, _number("<q", buffer, _field(buffer, root, 3)), compressed


def _root(buffer: bytes) -> int:
    return int(struct.unpack_from("<I", buffer)[0])


def _field(buffer: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table lies; 0: it has its default."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", buffer, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", buffer, vtable + entry)[0]
    return int(table + offset) if offset else 0


def _number(kind: str, buffer: bytes, place: int) -> int:
    return int(struct.unpack_from(kind, buffer, place)[0]) if place else 0
