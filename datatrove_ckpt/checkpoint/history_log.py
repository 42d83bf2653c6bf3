"""HistoryLog appends to ``history.jsonl`` of one rank, and bounds its size.

A line is one write, so a kill tears at most the last line, which the next attempt cuts off. Readers
skip other damaged lines. Beyond ``MAX_BYTES`` a copy replaces the log. It has one progress line
for each two minutes, or four, eight, and so on, and the first and the last line of each attempt. If
starts and ends alone exceed the limit, the oldest lines go.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.history_records import (
    InputPosition,
    Progress,
    Record,
    Spread,
    WorkCounts,
    is_progress_line,
    parse_line,
)
from datatrove_ckpt.checkpoint.lines import explained
from datatrove_ckpt.checkpoint.skipped import SkippedLines

MAX_BYTES = 900_000
_THINNED_BYTES = MAX_BYTES // 2
# Our files are smaller. Of a foreign file, only the end is read.
_READ_BYTES = 4 * MAX_BYTES
# Seconds of which one progress line is kept.
_STEPS = [120 << power for power in range(20)]


class HistoryLog:
    """``history.jsonl`` of one rank, for the storage thread alone. Opening it cuts off a torn tail.

    Args:
        attempt: number of this process's attempt.

    Attributes:
        earlier, position, skipped: of the last progress line in the file.
        unsynced: whether power loss may cost a line.
        generation: number of replacements. It grows before a replacement, so a reader that opens
            the file and then finds an equal number has the matching file.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self.path = path
        self._attempt = attempt
        self.earlier = WorkCounts()
        self.position = InputPosition()
        self.skipped = SkippedLines()
        content = self._read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            files.disk.truncate(path, path.stat().st_size - len(content) + whole)
        for line in reversed(content[:whole].splitlines(keepends=True)):
            if not is_progress_line(line):
                continue
            record = parse_line(line)
            if isinstance(record, Progress):
                self.earlier = record.total
                self.position = record.position
                self.skipped = record.skipped
                break
        self._file = files.AppendFile(path)
        self._is_torn = False
        self.unsynced = False
        self.generation = 0

    def _read(self) -> bytes:
        if not self.path.exists():
            return b""
        with explained("read", self.path), self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            return file.read()

    @property
    def size(self) -> int:
        return self._file.size

    def append(self, records: Iterable[Record]) -> None:
        """Appends the records with one write. Sets their attempt, and the totals of progress."""
        lines = [b"\n"] if self._is_torn else []
        for record in records:
            record.attempt = self._attempt
            if isinstance(record, Progress):
                record.total = self.earlier + record.own
            lines.append(record.to_line())
        data = b"".join(lines)
        if self.size and self.size + len(data) > MAX_BYTES:
            self._thin()
        self._is_torn = True  # unless all of it is written
        self._file.append(data)
        self._is_torn = False
        self.unsynced = True

    def sync(self) -> None:
        if self.unsynced:
            self._file.sync()
            self.unsynced = False

    def _thin(self) -> None:
        content = thinned(self._read().splitlines(keepends=True), _THINNED_BYTES)
        self.generation += 1
        files.disk.replace(self.path, b"".join(content))
        files.disk.forget(self.path)  # the descriptor is that of the old file
        self._file = files.AppendFile(self.path)


def thinned(lines: Sequence[bytes], most: int) -> list[bytes]:
    """Returns lines in order, at most ``most`` bytes. Damaged lines go first."""
    parsed = [(line, parse_line(line)) for line in lines]
    found = [(line, record) for line, record in parsed if record is not None]
    fixed = _fixed([record for _, record in found])
    kept = [line for line, _ in found]
    for step in _STEPS:
        if sum(map(len, kept)) <= most:
            break
        last: dict[float, int] = {}
        for index, (_, record) in enumerate(found):
            if isinstance(record, Progress):
                last[record.at // step] = index
        chosen = fixed.union(last.values())
        kept = [line for index, (line, _) in enumerate(found) if index in chosen]
    while sum(map(len, kept)) > most:  # the events alone are too many
        kept = kept[(len(kept) + 1) // 2 :]
    return kept


def _fixed(records: Sequence[Record]) -> set[int]:
    """Returns indices of the lines to keep: events, and each attempt's first and last progress and
    last histograms.
    """
    fixed: set[int] = set()
    first: dict[int, int] = {}
    last: dict[tuple[int, str], int] = {}
    for index, record in enumerate(records):
        if isinstance(record, Progress | Spread):
            last[record.attempt, record.KIND] = index
            if isinstance(record, Progress):
                first.setdefault(record.attempt, index)
        else:
            fixed.add(index)
    return fixed | set(first.values()) | set(last.values())
