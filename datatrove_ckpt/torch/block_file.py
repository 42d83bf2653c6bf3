"""What the formats of an input share: a file as parts that can be read alone, and rows of a part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.inputs import remedy
from datatrove_ckpt.readers.positions import Row

if TYPE_CHECKING:
    import pyarrow as pa


Rows: TypeAlias = "pa.Table | list[Row | None]"
"""The rows of a block: a table, or for JSONL a dict for each line, and None for a damaged one."""


class Group(NamedTuple):
    """A row group, record batch, or other part of a file that can be read without the other parts."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The parts of one file.

    Attributes:
        groups: in the order of the file.
        sequential: a part cannot be read without what comes before it in the file.
        schema: Arrow's, serialized; empty for JSONL.
    """

    groups: tuple[Group, ...]
    sequential: bool = False
    schema: bytes = field(default=b"", compare=False)  # its bytes may change with pyarrow's version

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


class BlockFile(ABC):
    """One open file. ``index``: its parts."""

    def set_index(self, index: FileIndex, known: FileIndex | None, name: str) -> None:
        """Closes the file and raises CheckpointMismatch if other parts are known of it."""
        if known not in (None, index):
            self.close()
            raise changed(name)
        self.index = index
        self._starts = [0, *accumulate(group.rows for group in index.groups)]

    def part_of(self, row: int) -> tuple[int, int]:
        """The part that has a row, and the row's number there."""
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]

    @abstractmethod
    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> Rows:
        """So many rows from ``first`` on, all of the same part."""

    def let_go(self) -> None:  # noqa: B027 (LineBlocks keeps the lines of one part)
        """Frees what is kept so that the next part can be read faster."""

    @abstractmethod
    def close(self) -> None:
        """Closes the file."""


def serialized(schema: pa.Schema) -> bytes:
    """A schema without what pandas or Spark have written beside it."""
    return bytes(schema.remove_metadata().serialize())


def check_columns(found: Sequence[str], wanted: Sequence[str] | None, name: str) -> None:
    """Refuses columns that a file does not have, which pyarrow would leave out without a word.

    Raises:
        ConfigError: there is no such column, or there are two.
    """
    if wanted is None:
        return
    twice = [column for column in wanted if found.count(column) > 1]
    if twice:
        raise ConfigError(f"The input file {name!r} has two columns {twice[0]!r}. Rename one, or read other columns.")
    missing = [column for column in wanted if column not in found]
    if missing:
        raise ConfigError(
            f"The input file {name!r} has no column {', '.join(map(repr, missing))}. It has "
            f"{', '.join(map(repr, found[:20]))}. Name columns that all files have."
        )


def changed(name: str) -> CheckpointMismatch:
    """The error for a file that is not the one whose parts are known."""
    return CheckpointMismatch(f"The input file {name!r} has changed since its rows were counted. {remedy()}")
