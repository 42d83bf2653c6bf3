"""Parquet by row group and row, Arrow IPC by record batch and row.

A ``FilePosition`` is (group, rows of it, documents of the file so far). A group is a row group or a record batch. The
number of documents is needed because datatrove's default id counts documents with text, not rows. Groups before the
position are not read (those of an IPC stream are read, but not converted). In the position's own group, earlier rows
are decoded and dropped.

Rows become Python objects a thousand at a time, because a record batch may be a whole file. Local Arrow files are
mapped into memory, so a batch costs what is used of it.

With ``shuffle_seed`` a position is (groups started, rows of the last of them). Groups come in a shuffled order, and so
do the rows of each. Of a large row group, only the next ``_HELD_BYTES`` in that order are kept while it is decoded, so
it is decoded several times. A resume keeps only rows that are still to come.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from datatrove.io import DataFileLike, DataFolder, DataFolderLike
from datatrove.pipeline.readers import ipc, parquet

from datatrove_ckpt import retrying
from datatrove_ckpt.checkpoint.skipped import Skipped
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.base import SeekingReader, datatrove_arguments
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.input_errors import naming_hub_input
from datatrove_ckpt.readers.permutations import permutation
from datatrove_ckpt.readers.positions import Adapter, FilePosition, FileRead, Row

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    Batch: TypeAlias = pa.RecordBatch | pa.Table


Numbers: TypeAlias = npt.NDArray[np.int64]


def opened(folder: DataFolder, name: str) -> IO[bytes]:
    """The file, whose reads are repeated if it is a remote one."""
    with naming_hub_input(folder, name):
        if folder.is_local():
            return cast("IO[bytes]", folder.open(name, "rb"))
        file: Any = retrying.READING.run(lambda: folder.open(name, "rb"), name)
        return cast("IO[bytes]", RetryingFile(file, name))


_FILE_MARK, _STREAM_MARK = b"ARROW1", b"\xff\xff\xff\xff"


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


_Rows = TypeVar("_Rows", "pa.Table", "pa.RecordBatch")


def take_rows(table: _Rows, rows: Sequence[int] | Numbers) -> _Rows:
    """The rows with these numbers. pyarrow does not take values of each type, as string views; this does."""
    import pyarrow as pa

    numbers = np.asarray(rows, dtype=np.int64)
    try:
        return table.take(pa.array(numbers))
    except pa.ArrowNotImplementedError:
        columns = [one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one for one in table.columns]
        return type(table).from_arrays([take_values(column, numbers) for column in columns], schema=table.schema)


def take_values(chunk: Any, rows: Numbers) -> Any:
    import pyarrow as pa

    try:
        return chunk.take(pa.array(rows))
    except pa.ArrowNotImplementedError:  # string views, run-end encoding
        return pa.array([chunk[row].as_py() for row in rows.tolist()], chunk.type)


_CONVERTED_ROWS = 1000
_SKIPPED_ROWS = 2**13
_PICKED_ROWS = 2**13
_BATCH_BYTES = 2**25  # of rows with pictures a thousand may be 10 GB
_HELD_BYTES = 2**27
"""The most that is kept of a shuffled row group at once, uncompressed."""
_BUFFER_BYTES = 2**20
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class RetryingFile:
    """A remote file opened for reading, whose reads are repeated."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def read(self, size: int = -1) -> bytes:
        return bytes(retrying.READING.run(lambda: self._file.read(size), self._name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_Group: TypeAlias = tuple[int, int, int, int, "Callable[[Numbers], tuple[Batch, Numbers]]"]
"""One group of a shuffled file: groups started, with this one; its number in the file; how many rows it has; how many
may be in memory at once; and what reads the rows with these numbers: a batch, and for each of them its place there."""


class _TableReader(SeekingReader):
    @contextmanager
    def _opened(self, name: str, open_file: Callable[[DataFolder, str], Any] = opened) -> Iterator[Any]:
        with closing(open_file(self.data_folder, name)) as file, naming_hub_input(self.data_folder, name):
            yield file

    @abstractmethod
    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Batch]]:
        """From (group, row) on: group, number of the batch's first row in it, batch. No batch spans two groups."""

    @abstractmethod
    def _shuffled_groups(self, name: str, started: int, seed: int) -> Iterator[_Group]:
        """From the ``started``-th group in shuffled order on."""

    def _read(self, name: str, size: int, file_position: FilePosition) -> FileRead:
        if self.shuffle_seed is None:
            return self._read_in_order(name, file_position)
        return self._read_shuffled(name, file_position, self.shuffle_seed)

    def _read_in_order(self, name: str, file_position: FilePosition) -> FileRead:
        group, row, number = file_position or (0, 0, 0)
        for group, row, batch in self._batches(name, group, row):  # noqa: B020 (only the first position is needed)
            rows = range(row, row + batch.num_rows)
            for document, row in self._convert(batch, rows, name, group, number):
                number += document is not Skipped.WITHOUT_TEXT
                yield document, (group, row + 1, number)

    def _read_shuffled(self, name: str, file_position: FilePosition, seed: int) -> FileRead:
        started, done = file_position or (1, 0)
        for turn, group, length, held, pick in self._shuffled_groups(name, started, seed):
            whole = permutation(length, seed, name, group)
            for first in range(done, length, max(1, held)):
                order = whole[first : first + held]
                table, places = pick(order)
                for start in range(0, len(order), _CONVERTED_ROWS):
                    rows = order[start : start + _CONVERTED_ROWS].tolist()
                    found = take_rows(table, places[start : start + _CONVERTED_ROWS])
                    documents = self._convert(found, rows, name, group, None)
                    for after, (document, _) in enumerate(documents, start=first + start + 1):
                        yield document, (turn, after)
            done = 0

    def _convert(
        self, batch: Batch, rows: Sequence[int], name: str, group: int, number: int | None
    ) -> list[tuple[Document | Skipped, int]]:
        """The documents of a batch, each with its row. ``number`` is the first document's, for default ids.

        If ``number`` is None, default ids are made of group and row.
        """
        documents: list[tuple[Document | Skipped, int]] = []
        with self.track_time("batch"):
            for row, data in zip(rows, batch.to_pylist(), strict=True):
                id_in_file = f"@{group}.{row}" if number is None else number
                document = self.get_document_from_dict(data, name, id_in_file)
                documents.append((document or Skipped.WITHOUT_TEXT, row))
                if number is not None:
                    number += document is not None
        return documents


def _fitting(most: int, rows: int, size: int) -> int:
    """How many rows to take at once, if ``rows`` of them have ``size`` bytes."""
    return max(1, min(most, rows * _BATCH_BYTES // max(1, size)))


class ParquetReader(_TableReader, parquet.ParquetReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``ParquetReader``, with a position on each document.

    Args:
        shuffle_seed: read files, row groups, and the rows in a group in an order that depends on this number.
        The others are datatrove's.
    """

    _format: ClassVar[str] = "parquet"

    def __init__(
        self,
        data_folder: DataFolderLike,
        paths_file: DataFileLike | None = None,
        limit: int = -1,
        skip: int = 0,
        batch_size: int = 1000,
        read_metadata: bool = True,
        file_progress: bool = False,
        doc_progress: bool = False,
        adapter: Adapter | None = None,
        text_key: str = "text",
        id_key: str = "id",
        default_metadata: Row | None = None,
        recursive: bool = True,
        glob_pattern: str | None = None,
        shuffle_files: bool = False,
        shuffle_seed: int | None = None,
    ) -> None:
        super().__init__(**datatrove_arguments(locals()))

    @contextmanager
    def _open(self, name: str) -> Iterator[pq.ParquetFile]:
        import pyarrow.parquet as pq

        # Without a buffer, all of a row group's column is read at once; of a remote file, this saves requests.
        size = _BUFFER_BYTES if self.data_folder.is_local() else 0
        # Pre-buffering, pyarrow's default since version 26, would read a row group's columns as a whole, always.
        options = {"buffer_size": size, "pre_buffer": False}
        with naming_damage(name), self._opened(name) as file, pq.ParquetFile(file, **options) as parquet_file:
            yield parquet_file

    @property
    def _columns(self) -> list[str] | None:
        return None if self.read_metadata else [self.text_key, self.id_key]

    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Batch]]:
        with self._open(name) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            rows_of = [one.num_rows for one in groups]
            self._file_extent.set_groups(rows_of, first=0)
            if group < len(rows_of) and row == rows_of[group]:
                group, row = group + 1, 0
            current, start = group, 0
            # All groups in one call, although a batch may then span two: one call per tiny group would be slow.
            size = max(self.batch_size, _SKIPPED_ROWS) if row else self.batch_size  # large ones pass `row` faster
            size = min((_fitting(size, one.num_rows, one.total_byte_size) for one in groups[group:]), default=size)
            following = list(range(group, len(rows_of)))
            for batch in file.iter_batches(batch_size=size, row_groups=following, columns=self._columns):
                offset = 0
                while offset < batch.num_rows:
                    while start == rows_of[current]:
                        current, start = current + 1, 0
                    length = min(batch.num_rows - offset, rows_of[current] - start)
                    if current == group and start < row:
                        length = min(length, row - start)
                    else:
                        length = min(length, self.batch_size)
                        yield current, start, batch.slice(offset, length)
                    offset += length
                    start += length

    def _shuffled_groups(self, name: str, started: int, seed: int) -> Iterator[_Group]:
        with self._open(name) as file:
            order = permutation(file.num_row_groups, seed, name).tolist()
            groups = [file.metadata.row_group(number) for number in order]
            self._file_extent.set_groups([group.num_rows for group in groups], first=1)
            for turn in range(started, len(order) + 1):
                group = groups[turn - 1]
                held = max(_CONVERTED_ROWS, group.num_rows * _HELD_BYTES // max(1, group.total_byte_size))
                pick = partial(self._pick, file, order[turn - 1], group.num_rows)
                yield turn, order[turn - 1], group.num_rows, held, pick

    def _pick(self, file: pq.ParquetFile, group: int, length: int, rows: Numbers) -> tuple[Batch, Numbers]:
        """These rows of a group in the order of the file, and where each of them is there."""
        import pyarrow as pa

        wanted = np.zeros(length, dtype=np.bool_)
        wanted[rows] = True
        at, parts = 0, []
        for batch in file.iter_batches(_PICKED_ROWS, row_groups=[group], columns=self._columns):
            chosen = np.flatnonzero(wanted[at : at + batch.num_rows])
            parts.append(batch if len(chosen) == batch.num_rows else take_rows(batch, chosen))
            at += batch.num_rows
        # Rows of several chunks would be taken from a copy of all of them, each time.
        return pa.Table.from_batches(parts).combine_chunks(), (np.cumsum(wanted) - 1)[rows]


class IpcReader(_TableReader, ipc.IpcReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``IpcReader``, with a position on each document. A file's first bytes tell whether it is a stream.

    Args:
        shuffle_seed: read files, record batches, and the rows in a batch in an order that depends on this number. The
            batches of a stream keep their order.
        The others are datatrove's.
    """

    _format: ClassVar[str] = "ipc"
    _order_options: ClassVar[tuple[str, ...]] = (*SeekingReader._order_options, "stream")

    def __init__(
        self,
        data_folder: DataFolderLike,
        paths_file: DataFileLike | None = None,
        limit: int = -1,
        skip: int = 0,
        stream: bool = False,
        file_progress: bool = False,
        doc_progress: bool = False,
        adapter: Adapter | None = None,
        text_key: str = "text",
        id_key: str = "id",
        default_metadata: Row | None = None,
        recursive: bool = True,
        glob_pattern: str | None = None,
        shuffle_files: bool = False,
        shuffle_seed: int | None = None,
    ) -> None:
        super().__init__(**datatrove_arguments(locals()))

    def _groups(self, name: str, first: int, seed: int | None) -> Iterator[tuple[int, int, Batch]]:
        """From the ``first``-th turn on, counted from 0: turn, number of the record batch, record batch."""
        import pyarrow as pa

        with naming_damage(name), self._opened(name, map_or_open) as file:
            extent = self._file_extent
            extent.first = 0 if seed is None else 1
            if is_stream(file, name, self.stream):
                extent.starts = [0.0]
                with pa.ipc.open_stream(file) as stream:
                    for number, batch in enumerate(stream):
                        extent.starts.append(file.tell() / max(1.0, extent.size))
                        extent.lengths[number] = batch.num_rows
                        if number >= first:
                            yield number, number, batch
                    _check_end_of_stream(file)
                return
            with pa.ipc.open_file(file) as reader:
                count = reader.num_record_batches
                order = range(count) if seed is None else permutation(count, seed, name).tolist()
                extent.starts = [number / max(1, count) for number in range(count + 1)]
                for turn in range(first, count):
                    batch = reader.get_batch(order[turn])
                    extent.lengths[turn] = batch.num_rows
                    yield turn, order[turn], batch

    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Batch]]:
        for _, number, batch in self._groups(name, group, None):
            size = _fitting(_CONVERTED_ROWS, batch.num_rows, batch.nbytes)
            for start in range(row if number == group else 0, batch.num_rows, size):
                yield number, start, batch.slice(start, size)

    def _shuffled_groups(self, name: str, started: int, seed: int) -> Iterator[_Group]:
        for turn, number, batch in self._groups(name, started - 1, seed):
            yield turn + 1, number, batch.num_rows, batch.num_rows, partial(_pick_all, batch)


def _pick_all(batch: Batch, rows: Numbers) -> tuple[Batch, Numbers]:
    return batch, rows


def _check_end_of_stream(file: IO[bytes]) -> None:
    """pyarrow takes a stream that was cut between two batches for a whole one, and reads the first of several."""
    if file.read(1):
        raise EOFError("other bytes follow the end of its stream")
    size = file.tell()
    file.seek(max(0, size - len(_END_OF_STREAM)))
    if file.read() != _END_OF_STREAM:
        raise EOFError("the end of its stream is missing")
