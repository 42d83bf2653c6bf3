"""A file as parts that can be read alone, and rows of a part: what the formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.inputs import misfit
from datatrove_ckpt.readers.positions import Row
from datatrove_ckpt.readers.tables import refuse_equal_fields

if TYPE_CHECKING:
    import pyarrow as pa


Rows: TypeAlias = "pa.Table | list[Row | None]"
"""The rows of a block: a table, or for JSONL dicts, and None for a damaged line."""


class Group(NamedTuple):
    """A row group, record batch, or other part of a file that can be read alone."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The parts of one file.

    Attributes:
        groups: in the order of the file.
        sequential: reading a part takes reading the earlier ones.
        schema: Arrow's, serialized; empty for JSONL.
    """

    groups: tuple[Group, ...]
    sequential: bool = False
    schema: bytes = field(default=b"", compare=False)  # its bytes may change with pyarrow's version

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


class BlockFile(ABC):
    _name: str
    expected: Sequence[int] = ()
    """The parts that are read next, in their order."""

    def set_index(self, index: FileIndex, known: FileIndex | None) -> None:
        """Closes the file and raises CheckpointMismatch if its known parts are others."""
        if known not in (None, index):
            self.close()
            raise changed(self._name)
        self.index = index
        self._starts = [0, *accumulate(group.rows for group in index.groups)]

    def part_of(self, row: int) -> tuple[int, int]:
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]

    @abstractmethod
    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> Rows: ...

    def let_go(self) -> None:  # noqa: B027 (LineBlocks keeps the lines of one part)
        """Frees what makes the next part faster to read."""

    @abstractmethod
    def close(self) -> None: ...


class TableFile(BlockFile):
    _schema: pa.Schema

    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        with naming_damage(self._name):
            check_columns(self._schema.names, columns, self._name)
            table = self._read(*self.part_of(first), rows, columns)
        if columns is None:
            return table
        return table.select(list(columns))

    @abstractmethod
    def _read(self, part: int, row: int, rows: int, columns: Sequence[str] | None) -> pa.Table:
        """Reads so many rows of a part from ``row`` on, with at least these columns."""

    def index_of(self, groups: Iterable[Group]) -> FileIndex:
        refuse_equal_fields(self._schema, self._name)
        # Without what pandas or Spark have written beside the schema.
        return FileIndex(tuple(groups), schema=bytes(self._schema.remove_metadata().serialize()))


def check_columns(found: Sequence[str], wanted: Sequence[str] | None, name: str) -> None:
    """Raises ConfigError if a file lacks a column, which pyarrow would leave out."""
    if wanted is None:
        return
    missing = [column for column in wanted if column not in found]
    if missing:
        raise ConfigError(
            f"The input file {name!r} has no column {', '.join(map(repr, missing))}. It has "
            f"{', '.join(map(repr, found[:20]))}. Name columns that all files have."
        )


def changed(name: str) -> CheckpointMismatch:
    return misfit(f"The input file {name!r} has changed since its rows were counted.")
