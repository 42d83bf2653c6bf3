"""JSONL as blocks: the lines are counted once, and read again from the noted places.

A row is a line that is not blank, even if it is damaged, which only parsing shows. A part is about
1 MiB of whole lines. A compressed file stays open, so parts in order are decompressed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import IO

import numpy as np
import orjson

from datatrove_ckpt.common.exact_json import loads
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.jsonl import JsonlReader
from datatrove_ckpt.readers.positions import Row
from datatrove_ckpt.torch.block_file import BlockFile, FileIndex, Group, changed, check_columns

GROUP_BYTES = 2**20
"""The size of a part, up to the rest of its last line. Counts depend on it."""
_SKIP_BYTES = 2**20


class LineBlocks(BlockFile):
    """One JSONL file. ``keys``: columns that some line of the input had, to which this file adds
    its own.
    """

    def __init__(
        self, reader: JsonlReader, name: str, known: FileIndex | None, keys: set[str]
    ) -> None:
        self._keys = keys
        self._reader = reader
        self._name = name
        self._is_plain = reader.codec(name) is None
        self._stack = ExitStack()
        self._file: IO[bytes] | None = None
        self._at = 0  # offset in the content
        self._last: tuple[int, list[bytes]] = (-1, [])  # number and lines of a part
        self._part = b""
        self.set_index(
            known or FileIndex(tuple(self._count()), sequential=not self._is_plain), known
        )
        self._offsets = [0, *accumulate(group.bytes for group in self.index.groups)]

    def read(self, first: int, rows: int, columns: Sequence[str] | None) -> list[Row | None]:
        """Reads rows of a part. A row that lacks one of the ``columns`` has None there."""
        number, start = self.part_of(first)
        if self._last[0] != number:
            with ExitStack() as stack:
                if not self._is_plain:
                    stack.enter_context(naming_damage(self._name))
                self._last = (number, self._lines(number))
        parsed = [self._row(line, number) for line in self._last[1][start : start + rows]]
        if columns is None:
            return parsed
        if not self._keys.issuperset(columns):
            # Keys that no line of the first block has are refused. Later blocks may lack a key that
            # few lines have.
            found = {key: None for row in parsed if row for key in row}
            check_columns([*found, *self._keys.difference(found)], columns, self._name)
            self._keys.update(columns)
        return [row and {column: row.get(column) for column in columns} for row in parsed]

    def close(self) -> None:
        self._stack.close()
        self._file = None
        self._last = (-1, [])
        self._part = b""

    def _count(self) -> Iterator[Group]:
        with self._reader.open_content(self._name) as file:
            while part := file.read(GROUP_BYTES):
                if not part.endswith(b"\n"):
                    part += file.readline()
                yield Group(_count_lines(part), len(part))

    def _lines(self, number: int) -> list[bytes]:
        offset = self._offsets[number]
        group = self.index.groups[number]
        if self._file is None or (offset < self._at and not self._is_plain):
            self.close()
            self._file = self._stack.enter_context(self._reader.open_content(self._name))
            self._at = 0
        if self._is_plain:
            self._file.seek(offset)
        else:
            while self._at < offset:
                skipped = len(self._file.read(min(_SKIP_BYTES, offset - self._at)))
                if not skipped:
                    raise changed(self._name)
                self._at += skipped
        part = self._file.read(group.bytes)
        self._at = offset + len(part)
        self._part = part
        lines = _split(part)
        # A line that was moved across the ends of a part shows, too.
        is_whole = part.endswith(b"\n") or number == len(self.index.groups) - 1
        if len(part) != group.bytes or len(lines) != group.rows or not is_whole:
            raise changed(self._name)
        return lines

    def _row(self, line: bytes, number: int) -> Row | None:
        try:
            row = loads(line)
            if type(row) is dict and "media" not in row:
                return row
        except orjson.JSONDecodeError:
            pass
        place = self._offsets[number] + self._part.find(line)
        return self._reader.parse_row(line, self._name, f"@{place}")


def _count_lines(part: bytes) -> int:
    """Counts lines that are not blank: fast for most files, without blank lines and carriage
    returns.
    """
    content = np.frombuffer(part, dtype=np.uint8)
    firsts = content[np.flatnonzero(content[:-1] == ord("\n")) + 1]
    if b"\r" in part or content[0] <= ord(" ") or (firsts <= ord(" ")).any():
        return len(_split(part))
    return len(firsts) + 1


def _split(part: bytes) -> list[bytes]:
    return [line for line in part.splitlines() if line and not line.isspace()]
