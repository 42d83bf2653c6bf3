"""Base classes for files that consist of parts, each of which can be read alone.

A reader of a pipeline reads a file forward, from any position, without an index (``blocks``). A
training counts the rows of each part once (``index``), and reads rows by their numbers (``read``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import IO, Any, NamedTuple, TypeAlias, cast

from datatrove.io import DataFolder

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.lazy_pyarrow import pa
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.input_errors import naming_hub_input, refuse_equal_names
from datatrove_ckpt.readers.input_progress import FileProgress
from datatrove_ckpt.readers.inputs import position_mismatch
from datatrove_ckpt.readers.positions import FilePosition, Row, RowBlock

_PART_BYTES = 2**25  # a thousand rows with pictures may be 10 GB

BlockRows: TypeAlias = "pa.Table | list[Row | None]"
"""Rows of a file: a table, or for JSONL dicts, and None for a damaged line."""


class Group(NamedTuple):
    """A row group, record batch, or other part of a file that can be read alone.

    Attributes:
        start: offset in the content, for formats that seek.
    """

    rows: int
    bytes: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The parts of one file.

    Attributes:
        groups: the parts, in the order of the file.
        sequential: whether a part can be read only after the earlier parts.
        schema: serialized Arrow schema; empty for JSONL.
    """

    groups: tuple[Group, ...]
    sequential: bool = False
    schema: bytes = field(default=b"", compare=False)  # its bytes may change with pyarrow's version

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


class BlockFile(ABC):
    """An open file of the input, whose parts can be read alone."""

    name: str
    groups: tuple[Group, ...]
    expected: Sequence[int] = ()
    """Numbers of the parts that will be read next, in order."""

    @abstractmethod
    def blocks(self, file_position: FilePosition, extent: FileProgress) -> Iterator[RowBlock]:
        """Yields the rows after a position, and records the share of the file that was read."""

    @abstractmethod
    def index(self) -> FileIndex:
        """Counts the rows of each part.

        Raises:
            InputError: the file is damaged.
        """

    def use(self, index: FileIndex) -> None:
        """Sets the index that ``read`` needs."""
        self.groups = index.groups
        self._firsts = [0, *accumulate(group.rows for group in index.groups)]

    def part_of(self, row: int) -> tuple[int, int]:
        number = bisect_right(self._firsts, row) - 1
        return number, row - self._firsts[number]

    @abstractmethod
    def read(self, first: int, rows: int, columns: Sequence[str] | None = None) -> BlockRows:
        """Reads rows of one part, from the ``first`` row of the file on.

        Raises:
            ConfigError: the file has no such column.
            InputError: the file is damaged.
            CheckpointMismatch: the file has changed since its rows were counted.
        """

    def drop_buffers(self) -> None:  # noqa: B027 (most files keep no buffers)
        """Frees memory that would make the next part faster to read."""

    @abstractmethod
    def close(self) -> None: ...


class TableFile(BlockFile):
    """A file whose parts are Arrow tables."""

    schema: pa.Schema

    def read(self, first: int, rows: int, columns: Sequence[str] | None = None) -> pa.Table:
        with naming_damage(self.name):
            check_columns(self.schema.names, columns, self.name)
            table = self._read(*self.part_of(first), rows, columns)
        if columns is None:
            return table
        return table.select(list(columns))

    def blocks(
        self,
        file_position: FilePosition,
        extent: FileProgress,
        max_rows: int = 1000,
        columns: Sequence[str] | None = None,
    ) -> Iterator[RowBlock]:
        first, row = file_position[:2] or (0, 0)
        with naming_damage(self.name):
            for part, rows, size in self._parts(first, extent):
                label = f"row {{}} of group {part + 1}"
                step = max(1, min(max_rows, rows * _PART_BYTES // max(1, size)))
                for start in range(row, rows, step):
                    table = self._read(part, start, min(step, rows - start), columns)
                    numbers = range(start + 1, rows + 1)
                    positions = zip(repeat(part), numbers)
                    read = _python_rows(table, self.name)
                    yield RowBlock(label, zip(read, repeat(None), positions, numbers))
                row = 0

    @abstractmethod
    def _parts(self, first: int, extent: FileProgress) -> Iterator[tuple[int, int, int]]:
        """Yields number, rows and size of each part from ``first`` on, before the part is read."""

    @abstractmethod
    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        """Reads ``rows`` rows of a part from ``row`` on, with at least these columns."""

    def _index_of(self, groups: Iterable[Group]) -> FileIndex:
        refuse_equal_names(self.schema.names, self.name)
        # The metadata of pandas or Spark is no part of the schema.
        return FileIndex(tuple(groups), schema=bytes(self.schema.remove_metadata().serialize()))


@dataclass(eq=False)
class RetryingFile:
    """A remote file whose reads are retried."""

    _file: IO[bytes]
    _name: str

    def read(self, size: int = -1) -> bytes:
        return bytes(retrying.READING.run(lambda: self._file.read(size), self._name))

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def open_input(folder: DataFolder, name: str) -> IO[bytes]:
    with naming_hub_input(folder, name):
        if folder.is_local():
            return cast("IO[bytes]", folder.open(name, "rb"))
        file: Any = retrying.READING.run(lambda: folder.open(name, "rb"), name)
        return cast("IO[bytes]", RetryingFile(file, name))


def check_columns(existing: Sequence[str], needed: Sequence[str] | None, name: str) -> None:
    """Raises ConfigError if a file lacks a column: pyarrow would silently omit it."""
    if needed is None:
        return
    missing = [column for column in needed if column not in existing]
    if missing:
        raise ConfigError(
            f"The input file {name!r} has no column {', '.join(map(repr, missing))}. It has "
            f"{', '.join(map(repr, existing[:20]))}. Name columns that all files have."
        )


def changed_error(name: str) -> CheckpointMismatch:
    return position_mismatch(f"The input file {name!r} has changed since its rows were counted.")


def _python_rows(batch: pa.Table, name: str) -> list[Row]:
    """Returns the rows with Python's values.

    Raises:
        InputError: a value has no form in Python, or would lose digits.
    """
    shorter = {"time64[ns]": pa.time64("us"), "duration[ns]": pa.duration("us")}
    for column in batch.schema:
        if not any(kind in str(column.type) for kind in shorter):
            continue
        try:
            for values in _leaves(batch.column(column.name)):
                if str(values.type) in shorter:
                    values.cast(shorter[str(values.type)])
        except pa.ArrowInvalid as error:
            raise _no_python_value(column, name, error) from error
    try:
        return cast("list[Row]", batch.to_pylist())
    except (OverflowError, ValueError):
        for column in batch.schema:
            try:
                batch.column(column.name).to_pylist()
            except (OverflowError, ValueError) as error:
                raise _no_python_value(column, name, error) from error
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


def _no_python_value(field: pa.Field, name: str, error: Exception) -> InputError:
    return InputError(
        f"The input file {name!r} has a value in the column {field.name!r}, of type {field.type}, "
        f"that Python cannot hold: {error}. Convert the column, for example to microseconds or "
        "to text, and run the same command again."
    )
