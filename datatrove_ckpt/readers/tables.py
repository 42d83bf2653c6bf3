"""Reads tables: Parquet by row group and row, Arrow IPC by record batch and row.

A ``FilePosition`` is (group, rows of it, documents of the file so far). A group is a row group or a
record batch. datatrove's default id counts documents with text, not rows.

Rows become Python objects a thousand at a time, because a record batch may be a whole file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import closing
from typing import Self

from datatrove.pipeline.readers import ipc, parquet

from datatrove_ckpt.common.formatting import missing_package
from datatrove_ckpt.common.lazy_pyarrow import pa
from datatrove_ckpt.common.threads import in_threads
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.block_file import ArrowBlocks, ParquetBlocks, TableFile
from datatrove_ckpt.readers.inputs import (
    FilePosition,
    RowBlock,
    list_input,
    naming_hub_input,
    refuse_equal_names,
)


class _TableReader(SeekingReader):
    batch_size = 1000
    has_types = True

    def __new__(cls, *arguments: object, **options: object) -> Self:
        # See ``JsonlReader.__new__``.
        if missing := missing_package("pyarrow"):
            raise ImportError(missing)
        return object.__new__(cls)

    @property
    def _columns(self) -> list[str] | None:
        return None

    @abstractmethod
    def open_file(self, name: str) -> TableFile: ...

    def schemas(self) -> Iterator[tuple[str, pa.Schema]]:
        names = list_input(self).names
        yield from zip(names, in_threads(self._schema, names), strict=True)

    def _schema(self, name: str) -> pa.Schema:
        with closing(self.open_file(name)) as file:
            return file.schema

    def blocks(self, name: str, file_position: FilePosition) -> Iterator[RowBlock]:
        with naming_hub_input(self.data_folder, name), closing(self.open_file(name)) as file:
            refuse_equal_names(file.schema.names, name)
            yield from file.blocks(file_position, self._file_extent, self.batch_size, self._columns)


class ParquetReader(_TableReader, parquet.ParquetReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``ParquetReader``, with its arguments and a position on each document.

    Args:
        shuffle_seed, path_columns, max_skipped: see ``JsonlReader``.
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
        shuffle_seed, path_columns, max_skipped: see ``JsonlReader``.
    """

    format = "ipc"
    suffixes = ".arrow .ipc .feather"
    _order_options = (*SeekingReader._order_options, "stream")

    def open_file(self, name: str) -> ArrowBlocks:
        return ArrowBlocks(self.data_folder, name)
