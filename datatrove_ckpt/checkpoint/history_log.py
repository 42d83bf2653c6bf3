"""HistoryLog appends to ``history.jsonl`` of one rank, and bounds its size.

A line is one write, so a kill tears at most the last line, which the next attempt cuts off. Readers
skip other damaged lines. Beyond ``MAX_BYTES`` a copy replaces the log. It has one progress line
for each two minutes, or four, eight, and so on, and the first and the last line of each attempt. If
starts and ends alone exceed the limit, the oldest lines go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.history_records import (
    InputPosition,
    Progress,
    Record,
    Spread,
    is_progress_line,
    parse_line,
)
from datatrove_ckpt.checkpoint.lines import explained
from datatrove_ckpt.checkpoint.numbers import WorkCounts
from datatrove_ckpt.checkpoint.skipped import SkippedLines

MAX_BYTES = 900_000
_THINNED_BYTES = MAX_BYTES // 2
# Seconds of which one progress line is kept.
_STEPS = [120 << power for power in range(20)]


class HistoryLog:
    """``history.jsonl`` of one rank, for the storage thread alone. Opening it cuts off a torn tail.

    Args:
        attempt: number of this process's attempt.

    Attributes:
        earlier, position, skipped: of the last progress line in the file.
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
        for line in reversed(content[:whole].splitlines(keepends=True)):
            if not is_progress_line(line):
                continue
            record = parse_line(line)
            if isinstance(record, Progress):
                self.earlier = record.total
                self.position = record.position
                self.skipped = record.skipped
                break
        self.file = files.AppendFile(path, whole)
        self._is_torn = False
        self.generation = 0

    def _read(self) -> bytes:
        if not self.path.exists():
            return b""
        with explained("read", self.path):
            return self.path.read_bytes()

    def append(self, records: Iterable[Record]) -> None:
        """Appends the records with one write. Sets their attempt, and the totals of progress."""
        lines = [b"\n"] if self._is_torn else []
        for record in records:
            record.attempt = self._attempt
            if isinstance(record, Progress):
                record.total = self.earlier + record.own
            lines.append(record.to_line())
        data = b"".join(lines)
        if self.file.size and self.file.size + len(data) > MAX_BYTES:
            self._thin()
        self._is_torn = True  # unless all of it is written
        self.file.append(data)
        self._is_torn = False

    def _thin(self) -> None:
        content = thinned(self._read().splitlines(keepends=True), _THINNED_BYTES)
        self.generation += 1
        files.disk.replace(self.path, b"".join(content))
        files.disk.forget(self.path)  # the descriptor is that of the old file
        self.file = files.AppendFile(self.path)


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
