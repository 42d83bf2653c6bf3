"""Parquet by row group and row, Arrow IPC by record batch and row.

A ``FilePosition`` is (group, rows of it, documents of the file so far). A group is a row group or a
record batch. datatrove's default id counts documents with text, not rows. Groups before the
position are not read (in an IPC stream: not converted). In the position's own group, earlier rows
are decoded and dropped.

Rows become Python objects a thousand at a time, because a record batch may be a whole file.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from datatrove.io import DataFolder
from datatrove.pipeline.readers import ipc, parquet

from datatrove_ckpt.checkpoint.skipped import Skipped
from datatrove_ckpt.common import retrying
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.input_errors import naming_hub_input, refuse_equal_names
from datatrove_ckpt.readers.inputs import list_input
from datatrove_ckpt.readers.positions import FilePosition, FileRead, ReadResult, Row

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    Batch: TypeAlias = pa.RecordBatch | pa.Table


Numbers = npt.NDArray[np.int64]


def opened(folder: DataFolder, name: str) -> IO[bytes]:
    with naming_hub_input(folder, name):
        if folder.is_local():
            return cast("IO[bytes]", folder.open(name, "rb"))
        file: Any = retrying.READING.run(lambda: folder.open(name, "rb"), name)
        return cast("IO[bytes]", RetryingFile(file, name))


_FILE_MARK = b"ARROW1"
_STREAM_MARK = b"\xff\xff\xff\xff"


def map_or_open(folder: DataFolder, name: str) -> pa.NativeFile | IO[bytes]:
    import pyarrow as pa

    if not folder.is_local():
        return opened(folder, name)
    return pa.memory_map(folder.resolve_paths(name))


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
    if begin[:4] == _STREAM_MARK or (stream and begin != _FILE_MARK):
        return True
    if begin and not _FILE_MARK.startswith(begin):
        raise InputError(
            f"The input file {name!r} is no Arrow file: it begins with {begin!r}. If it was one, "
            "replace it by a complete copy; else move it out of the input, or choose the files by "
            "a pattern (*.arrow). Then run the same command again."
        )
    return False


_Rows = TypeVar("_Rows", "pa.Table", "pa.RecordBatch")


def take_rows(table: _Rows, rows: Sequence[int] | Numbers) -> _Rows:
    """Takes rows by their numbers, also of types that pyarrow cannot take: string views, run-end
    encoding.
    """
    import pyarrow as pa

    numbers = pa.array(np.asarray(rows, dtype=np.int64))
    try:
        return table.take(numbers)
    except pa.ArrowNotImplementedError:
        columns = []
        for column in table.columns:
            if isinstance(column, pa.ChunkedArray):
                column = column.combine_chunks()
            try:
                columns.append(column.take(numbers))
            except pa.ArrowNotImplementedError:
                columns.append(pa.array([column[int(row)].as_py() for row in rows], column.type))
        return type(table).from_arrays(columns, schema=table.schema)


_SCHEMAS_AT_ONCE = 16
_CONVERTED_ROWS = 1000
_SKIPPED_ROWS = 2**13
_BATCH_BYTES = 2**25  # of rows with pictures a thousand may be 10 GB
_BUFFER_BYTES = 2**20
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(eq=False)
class RetryingFile:
    _file: IO[bytes]
    _name: str

    def read(self, size: int = -1) -> bytes:
        return bytes(retrying.READING.run(lambda: self._file.read(size), self._name))

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class _TableReader(SeekingReader):
    @contextmanager
    def _opened(
        self, name: str, open_file: Callable[[DataFolder, str], IO[bytes]] = opened
    ) -> Iterator[IO[bytes]]:
        with (
            closing(open_file(self.data_folder, name)) as file,
            naming_hub_input(self.data_folder, name),
        ):
            yield file

    def schemas(self) -> Iterator[tuple[str, pa.Schema]]:
        names = list_input(self).names
        with ThreadPoolExecutor(_SCHEMAS_AT_ONCE) as threads:
            yield from zip(names, threads.map(self._schema, names), strict=True)

    @abstractmethod
    def _schema(self, name: str) -> pa.Schema: ...

    @abstractmethod
    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Batch]]:
        """Yields from (group, row) on: group, number of the batch's first row in it, batch.

        No batch spans two groups.
        """

    def _read(self, name: str, file_position: FilePosition) -> FileRead:
        group, row, number = file_position or (0, 0, 0)
        for group, row, batch in self._batches(name, group, row):  # noqa: B020 (only the first position is needed)
            refuse_equal_fields(batch.schema, name)
            documents: list[ReadResult] = []
            with self.track_time("batch"):
                for data in _python_rows(batch, name):
                    document = self.get_document_from_dict(data, name, number)
                    number += document is not None
                    row += 1
                    documents.append((document or Skipped.WITHOUT_TEXT, (group, row, number)))
            yield from documents


def _python_rows(batch: Batch, name: str) -> list[Row]:
    """Returns the rows with Python's values.

    Raises:
        InputError: a value has no form in Python, or would lose digits.
    """
    import pyarrow as pa

    shorter = {"time64[ns]": pa.time64("us"), "duration[ns]": pa.duration("us")}
    for field in batch.schema:
        if not any(kind in str(field.type) for kind in shorter):
            continue
        try:
            for values in _leaves(batch.column(field.name)):
                if str(values.type) in shorter:
                    values.cast(shorter[str(values.type)])
        except pa.ArrowInvalid as error:
            raise _without_form(field, name, error) from error
    try:
        return cast("list[Row]", batch.to_pylist())
    except (OverflowError, ValueError):
        for field in batch.schema:
            try:
                batch.column(field.name).to_pylist()
            except (OverflowError, ValueError) as error:
                raise _without_form(field, name, error) from error
        raise


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    """Yields the arrays of a column that hold its values."""
    import pyarrow as pa

    parts = []
    if isinstance(column, pa.ChunkedArray):
        parts = column.chunks
    elif isinstance(column, pa.DictionaryArray):
        parts = [column.dictionary]
    elif isinstance(column, pa.RunEndEncodedArray):
        parts = [column.values]
    elif isinstance(column, pa.MapArray):
        parts = [column.keys, column.items]
    elif isinstance(column, pa.StructArray):
        parts = column.flatten()
    elif hasattr(column, "flatten"):  # a list
        parts = [column.flatten()]
    else:
        yield column
    for part in parts:
        yield from _leaves(part)


def _without_form(field: pa.Field, name: str, error: Exception) -> InputError:
    return InputError(
        f"The input file {name!r} has a value in the column {field.name!r}, of type {field.type}, "
        f"that Python cannot hold: {error}. Convert the column, for example to microseconds or "
        "to text, and run the same command again."
    )


def refuse_equal_fields(fields: Iterable[pa.Field], file: str, above: str = "") -> None:
    columns = list(fields)
    refuse_equal_names([column.name for column in columns], file, above)
    for column in columns:
        kind = column.type
        inner = map(kind.field, range(kind.num_fields))
        refuse_equal_fields(inner, file, f"{above}{column.name}.")


def _fitting(most: int, rows: int, size: int) -> int:
    return max(1, min(most, rows * _BATCH_BYTES // max(1, size)))


class ParquetReader(_TableReader, parquet.ParquetReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``ParquetReader``, with its arguments and a position on each document.

    Args:
        shuffle_seed: shuffles the files by this number; ``shuffle_files`` is refused.
        path_columns: folders such as ``lang=en`` are columns.
    """

    format = "parquet"

    @contextmanager
    def _open(self, name: str) -> Iterator[pq.ParquetFile]:
        import pyarrow.parquet as pq

        # Without a buffer, a row group's column is one request to a remote file.
        size = _BUFFER_BYTES if self.data_folder.is_local() else 0
        # Pre-buffering, pyarrow's default since 26, would always read whole columns of a row group.
        options = {"buffer_size": size, "pre_buffer": False}
        with (
            naming_damage(name),
            self._opened(name) as file,
            pq.ParquetFile(file, **options) as parquet_file,
        ):
            yield parquet_file

    @property
    def _columns(self) -> list[str] | None:
        if self.read_metadata:
            return None
        return [self.text_key or "text", self.id_key]

    def _schema(self, name: str) -> pa.Schema:
        with self._open(name) as file:
            return file.schema_arrow

    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Batch]]:
        with self._open(name) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            counts = [one.num_rows for one in groups]
            self._file_extent.set_groups(counts)
            starts = [0, *accumulate(counts)]
            first = starts[group] + row
            group = bisect_right(starts, first) - 1
            place = starts[group]
            # Large ones pass `first` faster.
            most = max(self.batch_size, _SKIPPED_ROWS) if first > place else self.batch_size
            sizes = [
                _fitting(most, one.num_rows, one.total_byte_size)
                for one in groups[group:]
                if one.num_rows
            ]
            # All groups in one call, so a batch may span some: a call for each tiny group is slow.
            following = range(group, len(groups))
            for batch in file.iter_batches(min(sizes, default=most), following, self._columns):
                end = place + batch.num_rows
                begin = max(first, place)
                while begin < end:
                    number = bisect_right(starts, begin) - 1
                    stop = min(end, starts[number + 1], begin + self.batch_size)
                    yield number, begin - starts[number], batch.slice(begin - place, stop - begin)
                    begin = stop
                place = end


class IpcReader(_TableReader, ipc.IpcReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``IpcReader``, with its arguments and a position on each document.

    The first bytes of a file decide whether it is a stream.

    Args:
        shuffle_seed: shuffles the files by this number; ``shuffle_files`` is refused.
        path_columns: folders such as ``lang=en`` are columns.
    """

    format = "ipc"
    _order_options = (*SeekingReader._order_options, "stream")

    def _schema(self, name: str) -> pa.Schema:
        import pyarrow as pa

        with naming_damage(name), self._opened(name, map_or_open) as file:
            if is_stream(file, name, self.stream):
                with pa.ipc.open_stream(file) as stream:
                    return stream.schema
            with pa.ipc.open_file(file) as reader:
                return reader.schema

    def _groups(self, name: str, first: int) -> Iterator[tuple[int, Batch]]:
        """Yields the record batches from the ``first`` on, each after its number."""
        import pyarrow as pa

        with naming_damage(name), self._opened(name, map_or_open) as file:
            extent = self._file_extent
            if is_stream(file, name, self.stream):
                extent.starts = [0.0]
                with pa.ipc.open_stream(file) as stream:
                    for number, batch in enumerate(stream):
                        extent.starts.append(file.tell() / max(1.0, extent.size))
                        extent.lengths[number] = batch.num_rows
                        if number >= first:
                            yield number, batch
                    _check_end_of_stream(file)
                return
            with pa.ipc.open_file(file) as reader:
                count = reader.num_record_batches
                extent.starts = [number / max(1, count) for number in range(count + 1)]
                for number in range(first, count):
                    batch = reader.get_batch(number)
                    extent.lengths[number] = batch.num_rows
                    yield number, batch

    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Batch]]:
        for number, batch in self._groups(name, group):
            size = _fitting(_CONVERTED_ROWS, batch.num_rows, batch.nbytes)
            for start in range(row if number == group else 0, batch.num_rows, size):
                yield number, start, batch.slice(start, size)


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
