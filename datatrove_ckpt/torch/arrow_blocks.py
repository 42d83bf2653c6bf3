"""Arrow IPC as blocks: a slice of a record batch, of which only the slice is read from the disk.

Local files are mapped into memory, so a slice costs its own pages. A batch with compressed buffers,
or of a remote file, is read as a whole, in the wanted columns. pyarrow returns the number of rows
only with the batch, so the flatbuffer before the batch is parsed here (format/Message.fbs of Apache
Arrow).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple

from datatrove.io import DataFolder

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.tables import is_stream, map_or_open
from datatrove_ckpt.torch.block_file import FileIndex, Group, TableFile, changed

if TYPE_CHECKING:
    import pyarrow as pa

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
