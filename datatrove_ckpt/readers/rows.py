"""The types in which formats give what they read to ``SeekingReader``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias

from datatrove.data import Document

from datatrove_ckpt.readers.positions import FilePosition
from datatrove_ckpt.readers.shard import Skipped

Row: TypeAlias = dict[str, Any]
"""A row of the input, as JSON or Arrow gives it: values of any type."""

Adapter: TypeAlias = Callable[..., Row]
"""datatrove's adapter: (reader, row, path, id_in_file) -> the fields of a document."""

ReadResult: TypeAlias = tuple[Document | Skipped, FilePosition]
"""A document, or why a line or row is none, and the place in the file right after it."""

FileRead: TypeAlias = Generator[ReadResult, None, int | None]
"""What a format reads of one file. It returns the size of what it read, if the file may have grown meanwhile."""

RowShard: TypeAlias = tuple[int, int]
"""(index, count): every ``count``-th line or row of a file, from ``index`` on."""

ALL_ROWS: RowShard = (0, 1)

ShardKey: TypeAlias = list[int | str]
"""The part of the input that a run reads, as its state names it: [rank, world_size], or [index, count, "rows"]."""


class FileReading:
    """Keeps what a format returns when it has read a file to its end."""

    def __init__(self, rows: FileRead) -> None:
        self._rows = rows
        self.size: int | None = None
        """None before the end."""

    def __iter__(self) -> Iterator[ReadResult]:
        self.size = yield from self._rows
