"""Parquet by row group and row, Arrow IPC by record batch and row.

A place in a file is (group, rows of it, documents of the file so far): a group is a row group or a record batch. The
third is in it because datatrove's default id counts documents with text, not rows. Groups before the place are not
read (an IPC stream's are, but not converted); of the group itself the rows before it are decoded and dropped.

Shuffled, a place is (groups begun, rows of the last of them): the groups take turns in an order of their own, and each
is read whole, in Arrow's form, to hand out its rows in theirs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from datatrove.data import Document
from datatrove.io import DataFileLike, DataFolderLike
from datatrove.pipeline.readers import ipc, parquet

from datatrove_ckpt.readers.base import At, Read, SeekingReader, Share, permutation

_ROWS = 1000


class _TableReader(SeekingReader):
    @abstractmethod
    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Any]]:
        """From a place on: group, row of the batch's first row in it, batch. No batch spans two groups."""

    @abstractmethod
    def _shuffled_groups(self, name: str, begun: int, seed: int) -> Iterator[tuple[int, int, Any]]:
        """From the ``begun``-th turn on: groups begun, group, all its rows."""

    def _read(self, name: str, size: int, at: At, share: Share) -> Iterator[Read]:
        if self.shuffle_seed is None:
            return self._in_order(name, at, share)
        return self._shuffled(name, at, share, self.shuffle_seed)

    def _in_order(self, name: str, at: At, share: Share) -> Iterator[Read]:
        group, row, number = at or (0, 0, 0)
        for group, row, batch in self._batches(name, group, row):  # noqa: B020 (only the first place is needed)
            rows: Sequence[int] = range(row, row + batch.num_rows)
            if share[1] > 1:
                rows, batch = _share_of(rows, batch, group, share)
            first_number = number if share[1] == 1 else None
            documents = self._convert(batch, rows, name, group, first_number)
            for document, row in documents:
                number += 1
                yield document, (group, row + 1, number)

    def _shuffled(self, name: str, at: At, share: Share, seed: int) -> Iterator[Read]:
        begun, done = at or (1, 0)
        for turn, group, table in self._shuffled_groups(name, begun, seed):
            order = permutation(table.num_rows, seed, name, group)
            for start in range(done, len(order), _ROWS):
                rows: Sequence[int] = order[start : start + _ROWS]
                places = {row: start + place for place, row in enumerate(rows, start=1)}
                if share[1] > 1:
                    rows = [row for row in rows if (group + row) % share[1] == share[0]]
                documents = self._convert(_take(table, rows), rows, name, group, None)
                for document, row in documents:
                    yield document, (turn, places[row])
            done = 0

    def _convert(
        self, batch: Any, rows: Sequence[int], name: str, group: int, number: int | None
    ) -> list[tuple[Document, int]]:
        """Without ``number``, that of the first document, documents are told apart by their rows."""
        documents: list[tuple[Document, int]] = []
        with self.track_time("batch"):
            for row, data in zip(rows, batch.to_pylist(), strict=True):
                id_in_file = f"@{group}.{row}" if number is None else number + len(documents)
                document = self.get_document_from_dict(data, name, id_in_file)
                if document is not None:
                    documents.append((document, row))
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
        adapter: Callable[..., dict[str, Any]] | None = None,
        text_key: str = "text",
        id_key: str = "id",
        default_metadata: dict[str, Any] | None = None,
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
    def _open(self, name: str) -> Iterator[Any]:
        import pyarrow.parquet as pq

        with self.data_folder.open(name, "rb") as file, pq.ParquetFile(file) as parquet_file:
            yield parquet_file

    @property
    def _columns(self) -> list[str] | None:
        return None if self.read_metadata else [self.text_key, self.id_key]

    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Any]]:
        with self._open(name) as file:
            rows_of = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            if group < len(rows_of) and row == rows_of[group]:
                group, row = group + 1, 0
            place, start = group, 0
            # All groups at once, although a batch may then span two: tiny groups would be slow one by one.
            for batch in file.iter_batches(
                batch_size=self.batch_size, row_groups=list(range(group, len(rows_of))), columns=self._columns
            ):
                offset = 0
                while offset < batch.num_rows:
                    while start == rows_of[place]:
                        place, start = place + 1, 0
                    length = min(batch.num_rows - offset, rows_of[place] - start)
                    passed = max(0, min(length, row - start)) if place == group else 0
                    if passed < length:
                        yield place, start + passed, batch.slice(offset + passed, length - passed)
                    offset += length
                    start += length

    def _shuffled_groups(self, name: str, begun: int, seed: int) -> Iterator[tuple[int, int, Any]]:
        with self._open(name) as file:
            order = permutation(file.num_row_groups, seed, name)
            for turn in range(begun, len(order) + 1):
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
        adapter: Callable[..., dict[str, Any]] | None = None,
        text_key: str = "text",
        id_key: str = "id",
        default_metadata: dict[str, Any] | None = None,
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

    def _groups(self, name: str, first: int, seed: int | None) -> Iterator[tuple[int, int, Any]]:
        """Turn (from 0), record batch's number, record batch, from a turn on."""
        import pyarrow as pa

        with self.data_folder.open(name, "rb") as file:
            if self.stream:
                with pa.ipc.open_stream(file) as stream:
                    for number, batch in enumerate(stream):
                        if number >= first:
                            yield number, number, batch
                return
            with pa.ipc.open_file(file) as reader:
                count = reader.num_record_batches
                order = range(count) if seed is None else permutation(count, seed, name)
                for turn in range(first, count):
                    yield turn, order[turn], reader.get_batch(order[turn])

    def _batches(self, name: str, group: int, row: int) -> Iterator[tuple[int, int, Any]]:
        for _, number, batch in self._groups(name, group, None):
            passed = row if number == group else 0
            if passed < batch.num_rows:
                yield number, passed, batch.slice(passed)

    def _shuffled_groups(self, name: str, begun: int, seed: int) -> Iterator[tuple[int, int, Any]]:
        for turn, number, batch in self._groups(name, begun - 1, seed):
            yield turn + 1, number, batch


def _share_of(rows: Sequence[int], batch: Any, group: int, share: Share) -> tuple[Sequence[int], Any]:
    index, of = share
    first = (index - group - rows[0]) % of
    chosen = rows[first::of]
    return chosen, _take(batch, range(first, len(rows), of))


def _take(table: Any, rows: Sequence[int]) -> Any:
    import pyarrow as pa

    return table.take(pa.array(rows, type=pa.int64()))
