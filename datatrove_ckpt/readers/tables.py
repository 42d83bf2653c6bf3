"""Readers of tables: Parquet by row group and row, Arrow IPC by record batch and row.

A ``FilePosition`` is (group, rows of it, documents of the file so far). A group is a row group or a
record batch. datatrove's default id counts documents with text, not rows. Groups before the
position are not read (in an IPC stream: not converted). In the position's own group, earlier rows
are decoded and dropped.

Rows become Python objects a thousand at a time, because a record batch may be a whole file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import cast

from datatrove.pipeline.readers import ipc, parquet

from datatrove_ckpt.checkpoint.skipped import SkippedLines
from datatrove_ckpt.common.lazy import pa
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.arrow_blocks import ArrowBlocks
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.block_file import TableFile
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.input_errors import naming_hub_input, refuse_equal_names
from datatrove_ckpt.readers.inputs import list_input
from datatrove_ckpt.readers.parquet_blocks import ParquetBlocks
from datatrove_ckpt.readers.positions import FilePosition, FileRead, ReadResult, Row


class _TableReader(SeekingReader):
    batch_size = 1000
    has_types = True

    @property
    def _columns(self) -> list[str] | None:
        return None

    @abstractmethod
    def open_file(self, name: str) -> TableFile: ...

    def schemas(self) -> Iterator[tuple[str, pa.Schema]]:
        names = list_input(self).names
        with ThreadPoolExecutor(16) as threads:
            yield from zip(names, threads.map(self._schema, names), strict=True)

    def _schema(self, name: str) -> pa.Schema:
        with closing(self.open_file(name)) as file:
            return file.schema

    def _read(self, name: str, file_position: FilePosition) -> FileRead:
        first, row, number = file_position or (0, 0, 0)
        with (
            naming_hub_input(self.data_folder, name),
            naming_damage(name),
            closing(self.open_file(name)) as file,
        ):
            refuse_equal_names(file.schema.names, name)
            parts = file.forward((first, row), self.batch_size, self._columns, self._file_extent)
            for group, row, batch in parts:
                documents: list[ReadResult] = []
                with self.track_time("batch"):
                    for data in _python_rows(batch, name):
                        row += 1
                        where = f"row {row} of group {group + 1}"
                        document = self.document_of(data, name, number, where)
                        number += not isinstance(document, SkippedLines)
                        documents.append((document, (group, row, number)))
                yield from documents


def _python_rows(batch: pa.RecordBatch | pa.Table, name: str) -> list[Row]:
    """Returns the rows with Python's values.

    Raises:
        InputError: a value has no form in Python, or would lose digits.
    """
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


class ParquetReader(_TableReader, parquet.ParquetReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``ParquetReader``, with its arguments and a position on each document.

    Args:
        shuffle_seed: shuffles the files by this number; ``shuffle_files`` is refused.
        path_columns: folders such as ``lang=en`` are columns.
        max_skipped: how many rows of a task may be left out because they cannot be read.
    """

    format = "parquet"
    suffixes = ".parquet"

    @property
    def _columns(self) -> list[str] | None:
        if self.read_metadata:
            return None
        return [self.text_key or "text", self.id_key]

    def open_file(self, name: str) -> ParquetBlocks:
        return ParquetBlocks(self.data_folder, name)


class IpcReader(_TableReader, ipc.IpcReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``IpcReader``, with its arguments and a position on each document.

    The first bytes of a file decide whether it is a stream.

    Args:
        shuffle_seed: shuffles the files by this number; ``shuffle_files`` is refused.
        path_columns: folders such as ``lang=en`` are columns.
        max_skipped: how many rows of a task may be left out because they cannot be read.
    """

    format = "ipc"
    suffixes = ".arrow .ipc .feather"
    _order_options = (*SeekingReader._order_options, "stream")

    def open_file(self, name: str) -> ArrowBlocks:
        return ArrowBlocks(self.data_folder, name, self.stream)
