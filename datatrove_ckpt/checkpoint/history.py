"""Reads a rank's history, see ``history_records``: what its attempts did, and when.

    history = read_history(rank_folder(root, 0) / HISTORY)
    history.last                the newest progress line: where the rank stands
    history.attempts            by number: start, server events, progress, end; without an end, it was killed

For people, ``status`` and ``report``. Recovery does not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.history_records import (
    End,
    Progress,
    Record,
    ServerEvent,
    Spread,
    Start,
    is_progress_line,
    parse_line,
)
from datatrove_ckpt.checkpoint.lines import unseal


@dataclass(slots=True)
class Attempt:
    """What the history has of one attempt. Each part may be missing: killed, damaged, or left out to bound the size."""

    number: int
    start: Start | None = None
    servers: list[ServerEvent] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    spread: Spread | None = None
    end: End | None = None
    first_at: float = 0.0
    """Unix seconds of the first line."""
    last_at: float = 0.0
    """Unix seconds of the last line: without an ``end``, the attempt lived at least until then."""

    @property
    def last(self) -> Progress | None:
        """Its last progress line."""
        return self.progress[-1] if self.progress else None


@dataclass(slots=True)
class History:
    """What ``history.jsonl`` holds.

    Attributes:
        records: in the order in which they were written.
        damaged: lines that cannot be read, a torn last one excepted.
        is_whole: the start of the file was read, too.
    """

    records: list[Record] = field(default_factory=list)
    damaged: int = 0
    is_whole: bool = True

    @property
    def attempts(self) -> list[Attempt]:
        """In ascending order of their numbers."""
        found: dict[int, Attempt] = {}
        for record in self.records:
            attempt = found.setdefault(record.attempt, Attempt(record.attempt, first_at=record.at))
            attempt.last_at = max(attempt.last_at, record.at)
            match record:
                case Start():
                    attempt.start = record
                case ServerEvent():
                    attempt.servers.append(record)
                case Progress():
                    attempt.progress.append(record)
                case Spread():
                    attempt.spread = record
                case End():
                    attempt.end = record
        return [found[number] for number in sorted(found)]

    @property
    def last(self) -> Progress | None:
        """The newest progress line."""
        return next((record for record in reversed(self.records) if isinstance(record, Progress)), None)

    @property
    def last_attempt(self) -> int:
        """The number of the newest attempt; 0 if there is none."""
        return max((record.attempt for record in self.records), default=0)


def read_history(path: Path, tail_bytes: int | None = None, max_progress: int | None = None) -> History:
    """Reads a rank's history. A missing file has no records. Changes nothing.

    Args:
        tail_bytes: read only so many bytes from the end, rounded to whole lines. 32 kB hold half an hour at least.
        max_progress: of more progress lines than this, read some evenly, and the first and last of each attempt. The
            others cost almost nothing.

    Raises:
        StorageFailed: it cannot be read.
    """
    with explained("read", path), suppress(FileNotFoundError), path.open("rb") as file:
        start = max(0, file.seek(0, 2) - tail_bytes) if tail_bytes is not None else 0
        file.seek(max(0, start - 1))
        # From the byte before on: it tells whether the tail starts with a whole line.
        if start:
            file.readline()
        return parse_history(file.read(), max_progress, is_whole=not start)
    return History()


def parse_history(data: bytes, max_progress: int | None = None, is_whole: bool = True) -> History:
    """The same from bytes, as of a mirror's copy."""
    history = History(is_whole=is_whole)
    lines = data.split(b"\n")
    lines.pop()  # what follows the last line break: nothing, or a torn line
    for line in lines if max_progress is None else _fewer(lines, max_progress):
        record = parse_line(line + b"\n")
        if record is not None:
            history.records.append(record)
        elif unseal(line + b"\n") is None:
            history.damaged += 1
    return history


def _fewer(lines: list[bytes], most: int) -> Iterator[bytes]:
    """Leaves out progress lines between two others."""
    is_progress = [is_progress_line(line) for line in lines]
    step = max(1, -(-sum(is_progress) // max(1, most)))
    inner = 0
    for index, line in enumerate(lines):
        if all(is_progress[max(0, index - 1) : index + 2]) and 0 < index < len(lines) - 1:
            inner += 1
            if inner % step:
                continue
        yield line
