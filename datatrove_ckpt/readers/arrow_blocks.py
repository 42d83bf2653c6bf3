"""Reads Arrow IPC: files with a footer, and streams, as ``datasets`` writes them.

A part is a slice of a record batch. Local files are mapped into memory, so a slice costs its own
pages. A batch with compressed buffers, or of a remote file, is read as a whole; only the requested
columns of a remote file with a footer are read. A stream's batches are found by the messages before
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO

from datatrove.io import DataFolder

from datatrove_ckpt.common.lazy_pyarrow import pa
from datatrove_ckpt.errors import ConfigError, InputError
from datatrove_ckpt.readers.block_file import FileIndex, Group, TableFile, changed_error, open_input
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.input_progress import FileProgress

_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowBlocks(TableFile):
    """One Arrow file or stream."""

    def __init__(self, folder: DataFolder, name: str) -> None:
        self.name = name
        self._is_local = folder.is_local()
        self._readers: dict[tuple[str, ...], pa.RecordBatchFileReader] = {}
        self._last: tuple[object, pa.RecordBatch] = (None, None)  # key and batch
        with naming_damage(name):
            if self._is_local:
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
        self._last = (None, None)

    def close(self) -> None:
        self._readers = {}
        self.drop_buffers()
        self._source.close()

    def _parts(self, first: int, extent: FileProgress) -> Iterator[tuple[int, int, int]]:
        for number, batch in self._batches(first, extent):
            extent.lengths[number] = batch.num_rows
            if number >= first:
                self._last = ((number, ()), batch)
                yield number, batch.num_rows, batch.nbytes

    def _batches(self, first: int, extent: FileProgress) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields record batches with their numbers; of a file with a footer, from ``first`` on."""
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
        """Yields the sizes of record batches. pyarrow must read each batch to count its rows."""
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
            self.drop_buffers()  # so that memory never holds two batches
            batch = self._batch(part, chosen)
            if batch.num_rows != self.groups[part].rows:
                raise changed_error(self.name)
            self._last = (key, batch)
        return pa.Table.from_batches([self._last[1].slice(row, rows)])

    def _batch(self, number: int, columns: tuple[str, ...]) -> pa.RecordBatch:
        if self._is_stream:
            group = self.groups[number]
            self._source.seek(group.start)
            message = pa.ipc.read_message(self._source)
            if message.type != "record batch" or message.body.size != group.bytes:
                raise changed_error(self.name)
            return pa.ipc.read_record_batch(message, self.schema)
        if not columns:
            return self._reader.get_batch(number)
        if columns not in self._readers:
            fields = [self.schema.get_field_index(name) for name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            self._readers[columns] = pa.ipc.open_file(self._source, options=options)
        return self._readers[columns].get_batch(number)


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
        raise InputError(
            f"The input file {name!r} is no Arrow file: it begins with {begin!r}. If it was one, "
            "replace it by a complete copy; else move it out of the input, or choose the files by "
            "a pattern (*.arrow). Then run the same command again."
        )
    return False


def _check_end_of_stream(file: IO[bytes]) -> None:
    """Checks the end of a stream, because pyarrow does not: it may be cut between two batches, or
    be followed by a second stream.

    Raises:
        EOFError: the end is missing, or other bytes follow it.
    """
    if file.read(1):
        raise EOFError("other bytes follow the end of its stream")
    size = file.tell()
    file.seek(max(0, size - len(_END_OF_STREAM)))
    if file.read() != _END_OF_STREAM:
        raise EOFError("the end of its stream is missing")
