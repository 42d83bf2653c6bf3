"""A JSONL file as parts of about 1 MiB of whole lines.

The lines are counted once, and read again from the noted places. A row is a line that is not blank,
even if it is damaged, which only parsing shows. A compressed file stays open, so parts in order are
decompressed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import IO, TYPE_CHECKING

import numpy as np
import orjson

from datatrove_ckpt.common.exact_json import loads
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.block_file import BlockFile, FileIndex, Group, changed
from datatrove_ckpt.readers.compressed import naming_damage
from datatrove_ckpt.readers.no_document import MAX_LINE_BYTES, read_line
from datatrove_ckpt.readers.positions import Row

if TYPE_CHECKING:
    from datatrove_ckpt.readers.jsonl import JsonlReader

PART_BYTES = 2**20
"""The size of a part, up to the rest of its last line. Counts depend on it."""
_SKIP_BYTES = 2**20


def read_parts(file: IO[bytes], name: str) -> Iterator[bytes]:
    """Yields the content from the file's place on, in parts that end with a line, or with the file.

    Raises:
        InputError: a line is too long.
    """
    while part := file.read(PART_BYTES):
        if not part.endswith(b"\n"):
            rest = read_line(file)
            if len(rest) >= MAX_LINE_BYTES:
                raise InputError(
                    f"A line of the input file {name!r} is longer than {MAX_LINE_BYTES} bytes, so "
                    "the file is damaged, or no JSONL. Replace it by a complete copy, or move it "
                    "out of the folder."
                )
            part += rest
        yield part


class LineBlocks(BlockFile):
    def __init__(self, reader: JsonlReader, name: str) -> None:
        self.name = name
        self._reader = reader
        self._is_plain = reader.codec(name) is None
        self._stack = ExitStack()
        self._file: IO[bytes] | None = None
        self._at = 0  # offset in the content
        self._last: tuple[int, list[bytes]] = (-1, [])  # number and lines of a part
        self._part = b""

    def count(self) -> FileIndex:
        groups = []
        start = 0
        with self._reader.open_content(self.name) as file:
            for part in read_parts(file, self.name):
                groups.append(Group(_count_lines(part), len(part), start))
                start += len(part)
        return FileIndex(tuple(groups), sequential=not self._is_plain)

    def read(self, first: int, rows: int, columns: Sequence[str] | None = None) -> list[Row | None]:
        """Reads rows of a part with all of their keys."""
        number, start = self.part_of(first)
        if self._last[0] != number:
            with nullcontext() if self._is_plain else naming_damage(self.name):
                self._last = (number, self._lines(number))
        return [self._row(line, number) for line in self._last[1][start : start + rows]]

    def let_go(self) -> None:
        pass  # it keeps the lines of one part

    def close(self) -> None:
        self._stack.close()
        self._file = None
        self._last = (-1, [])
        self._part = b""

    def _lines(self, number: int) -> list[bytes]:
        group = self.index.groups[number]
        if self._file is None or (group.start < self._at and not self._is_plain):
            self.close()
            self._file = self._stack.enter_context(self._reader.open_content(self.name))
            self._at = 0
        if self._is_plain:
            self._file.seek(group.start)
        else:
            while self._at < group.start:
                skipped = len(self._file.read(min(_SKIP_BYTES, group.start - self._at)))
                if not skipped:
                    raise changed(self.name)
                self._at += skipped
        part = self._file.read(group.bytes)
        self._at = group.start + len(part)
        self._part = part
        lines = _split(part)
        # A line that was moved across the ends of a part shows, too.
        is_whole = part.endswith(b"\n") or number == len(self.index.groups) - 1
        if len(part) != group.bytes or len(lines) != group.rows or not is_whole:
            raise changed(self.name)
        return lines

    def _row(self, line: bytes, number: int) -> Row | None:
        try:
            row = loads(line)
            if type(row) is dict and "media" not in row:
                return row
        except orjson.JSONDecodeError:
            pass
        place = self.index.groups[number].start + self._part.find(line)
        return self._reader.parse_row(line, self.name, f"@{place}")


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
