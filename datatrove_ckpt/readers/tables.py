"""Parquet by row group and row, Arrow IPC by record batch and row.

A ``FilePosition`` is (group, rows of it, documents of the file so far). A group is a row group or a record batch. The
number of documents is needed because datatrove's default id counts documents with text, not rows. Groups before the
position are not read (those of an IPC stream are read, but not converted). In the position's own group, earlier rows
are decoded and dropped.

With ``shuffle_seed`` a position is (groups started, rows of the last of them). Groups come in a shuffled order. Each is
read as a whole into Arrow's memory, and its rows are taken from there in shuffled order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, ClassVar, TypeAlias

from datatrove.data import Document
from datatrove.io import DataFileLike, DataFolderLike
from datatrove.pipeline.readers import ipc, parquet

from datatrove_ckpt.readers.base import ALL_ROWS, Adapter, FileRead, Row, RowShard, SeekingReader
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.inputs import permutation
from datatrove_ckpt.readers.positions import FilePosition
from datatrove_ckpt.readers.shard import Skipped

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    Batch: TypeAlias = pa.RecordBatch | pa.Table

_CONVERTED_ROWS = 1000
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class _TableReader(SeekingReader):
    @abstractmethod
    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Batch]]:
        """From (group, row) on: group, number of the batch's first row in it, batch. No batch spans two groups."""

    @abstractmethod
    def _shuffled_groups(self, name: str, started: int, seed: int) -> Iterator[tuple[int, int, Batch]]:
        """From the ``started``-th group in shuffled order on: groups started, group, all its rows."""

    def _read(self, name: str, size: int, file_position: FilePosition, row_shard: RowShard) -> FileRead:
        if self.shuffle_seed is None:
            return self._read_in_order(name, file_position, row_shard)
        return self._read_shuffled(name, file_position, row_shard, self.shuffle_seed)

    def _read_in_order(self, name: str, file_position: FilePosition, row_shard: RowShard) -> FileRead:
        group, row, number = file_position or (0, 0, 0)
        for group, row, batch in self._batches(name, group, row):  # noqa: B020 (only the first position is needed)
            rows: Sequence[int] = range(row, row + batch.num_rows)
            if row_shard != ALL_ROWS:
                rows, batch = _take_shard(rows, batch, group, row_shard)
            first_number = number if row_shard == ALL_ROWS else None
            documents = self._convert(batch, rows, name, group, first_number)
            for document, row in documents:
                number += document is not Skipped.WITHOUT_TEXT
                yield document, (group, row + 1, number)
        return None

    def _read_shuffled(self, name: str, file_position: FilePosition, row_shard: RowShard, seed: int) -> FileRead:
        started, done = file_position or (1, 0)
        index, count = row_shard
        for turn, group, table in self._shuffled_groups(name, started, seed):
            order = permutation(table.num_rows, seed, name, group)
            for start in range(done, len(order), _CONVERTED_ROWS):
                rows: Sequence[int] = order[start : start + _CONVERTED_ROWS]
                done_after = {row: start + number for number, row in enumerate(rows, start=1)}
                if count > 1:
                    rows = [row for row in rows if (group + row) % count == index]
                documents = self._convert(_take(table, rows), rows, name, group, None)
                for document, row in documents:
                    yield document, (turn, done_after[row])
            done = 0
        return None

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
        super().__init__(
            data_folder,
            paths_file,
            limit,
            skip,
            batch_size,
            read_metadata,
            file_progress,
            doc_progress,
            adapter,
            text_key,
            id_key,
            default_metadata,
            recursive,
            glob_pattern,
            shuffle_files,
        )
        self._set_shuffle(shuffle_files, shuffle_seed)

    @contextmanager
    def _open(self, name: str) -> Iterator[pq.ParquetFile]:
        import pyarrow.parquet as pq

        with naming_damage(name), self.data_folder.open(name, "rb") as file, pq.ParquetFile(file) as parquet_file:
            yield parquet_file

    @property
    def _columns(self) -> list[str] | None:
        return None if self.read_metadata else [self.text_key, self.id_key]

    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Batch]]:
        with self._open(name) as file:
            rows_of = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            if group < len(rows_of) and row == rows_of[group]:
                group, row = group + 1, 0
            current, start = group, 0
            # All groups in one call, although a batch may then span two: one call per tiny group would be slow.
            for batch in file.iter_batches(
                batch_size=self.batch_size, row_groups=list(range(group, len(rows_of))), columns=self._columns
            ):
                offset = 0
                while offset < batch.num_rows:
                    while start == rows_of[current]:
                        current, start = current + 1, 0
                    length = min(batch.num_rows - offset, rows_of[current] - start)
                    skipped = max(0, min(length, row - start)) if current == group else 0
                    if skipped < length:
                        yield current, start + skipped, batch.slice(offset + skipped, length - skipped)
                    offset += length
                    start += length

    def _shuffled_groups(self, name: str, started: int, seed: int) -> Iterator[tuple[int, int, Batch]]:
        with self._open(name) as file:
            order = permutation(file.num_row_groups, seed, name)
            for turn in range(started, len(order) + 1):
                yield turn, order[turn - 1], file.read_row_group(order[turn - 1], columns=self._columns)


class IpcReader(_TableReader, ipc.IpcReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``IpcReader``, with a position on each document.

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
        super().__init__(
            data_folder,
            paths_file,
            limit,
            skip,
            stream,
            file_progress,
            doc_progress,
            adapter,
            text_key,
            id_key,
            default_metadata,
            recursive,
            glob_pattern,
            shuffle_files,
        )
        self._set_shuffle(shuffle_files, shuffle_seed)

    def _groups(self, name: str, first: int, seed: int | None) -> Iterator[tuple[int, int, Batch]]:
        """From the ``first``-th turn on, counted from 0: turn, number of the record batch, record batch."""
        import pyarrow as pa

        with naming_damage(name), self.data_folder.open(name, "rb") as file:
            if self.stream:
                with pa.ipc.open_stream(file) as stream:
                    for number, batch in enumerate(stream):
                        if number >= first:
                            yield number, number, batch
                    _check_end_of_stream(file)
                return
            with pa.ipc.open_file(file) as reader:
                count = reader.num_record_batches
                order = range(count) if seed is None else permutation(count, seed, name)
                for turn in range(first, count):
                    yield turn, order[turn], reader.get_batch(order[turn])

    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Batch]]:
        for _, number, batch in self._groups(name, group, None):
            skipped = row if number == group else 0
            if skipped < batch.num_rows:
                yield number, skipped, batch.slice(skipped)

    def _shuffled_groups(self, name: str, started: int, seed: int) -> Iterator[tuple[int, int, Batch]]:
        for turn, number, batch in self._groups(name, started - 1, seed):
            yield turn + 1, number, batch


def _check_end_of_stream(file: IO[bytes]) -> None:
    """pyarrow takes a stream that was cut between two batches for a whole one, and reads the first of several."""
    if file.read(1):
        raise EOFError("other bytes follow the end of its stream")
    size = file.tell()
    file.seek(max(0, size - len(_END_OF_STREAM)))
    if file.read() != _END_OF_STREAM:
        raise EOFError("the end of its stream is missing")


def _take_shard(rows: Sequence[int], batch: Batch, group: int, row_shard: RowShard) -> tuple[Sequence[int], Batch]:
    index, count = row_shard
    first = (index - group - rows[0]) % count
    chosen = rows[first::count]
    return chosen, _take(batch, range(first, len(rows), count))


def _take(table: Batch, rows: Sequence[int]) -> Batch:
    import pyarrow as pa

    return table.take(pa.array(rows, type=pa.int64()))
