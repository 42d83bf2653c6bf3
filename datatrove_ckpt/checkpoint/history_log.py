"""HistoryLog: appends to ``history.jsonl`` of one rank, and bounds its size. The storage thread alone uses it.

The records are described in ``history_records``. A line is one write, so a kill tears the last one at most, which the
next attempt cuts off before it appends. Nothing else of the file is repaired: a damaged line is left out by readers,
and goes when the log is thinned.

When the log would grow beyond ``MAX_BYTES``, it is replaced by a copy with fewer progress lines: the older they are,
the fewer, and never without the first and the last one of an attempt. So a week of minute lines stays below a megabyte,
and so does a year. If starts and ends alone are too many, the oldest lines go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.history_records import (
    End,
    InputPosition,
    Progress,
    Record,
    ServerEvent,
    Spread,
    Start,
    WorkCounts,
    is_progress_line,
    parse_line,
)
from datatrove_ckpt.checkpoint.lines import BODY_AT, explained, last_lines
from datatrove_ckpt.checkpoint.skipped import SkippedLines

MAX_BYTES = 900_000
_THINNED_BYTES = MAX_BYTES // 2
# A file of ours is smaller. Of one that is not, only the end is read.
_READ_BYTES = 4 * MAX_BYTES

_HOUR = 3600.0
# Of progress lines older than this, one is kept for so many seconds.
_STEPS = ((48 * _HOUR, 900.0), (6 * _HOUR, 300.0), (0.0, 0.0))
# If that is not enough, steps are made longer by these factors.
_FACTORS = [2**power for power in range(11)]


class HistoryLog:
    """``history.jsonl`` of one rank. Opening it cuts off a torn tail.

    Args:
        attempt: number of this process's attempt.

    Attributes:
        earlier: what all attempts did until the last progress line that was there.
        position: the input's position in that line.
        skipped: the lines of the input that were no documents, in that line.
        unsynced: whether power loss may cost a line.
        generation: how often the file was replaced. It counts before that is done, so that whoever has opened the file
            and then finds the same number has the file of that number.
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
            record = parse_line(line) if is_progress_line(line) else None
            if isinstance(record, Progress):
                self.earlier = record.total
                self.position = record.position
                self.skipped = record.skipped
                break
        self._file = files.AppendFile(path)
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
        """Bytes in the file."""
        return self._file.size

    def append(self, records: Iterable[Record]) -> None:
        """Appends the records with one write. Sets their attempt, and the totals of progress."""
        lines = []
        for record in records:
            record.attempt = self._attempt
            if isinstance(record, Progress):
                record.total = self.earlier.plus(record.own)
            lines.append(record.to_line())
        data = b"".join(lines)
        if self.size and self.size + len(data) > MAX_BYTES:
            self._thin()
        self._file.append(data)
        self.unsynced = True

    def sync(self) -> None:
        """Everything appended so far survives power loss from here on."""
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
    """The lines, in their order, without some of them: at most so many bytes. Damaged lines are left out first."""
    found = [(line, record) for line in lines if (record := parse_line(line)) is not None]
    fixed = _fixed([record for _, record in found])
    newest = max((record.at for _, record in found), default=0.0)
    for factor in _FACTORS:
        kept = list(_less_often(found, fixed, newest, factor))
        if sum(map(len, kept)) <= most:
            break
    while sum(map(len, kept)) > most:  # the events alone are too many
        kept = kept[(len(kept) + 1) // 2 :]
    return kept


def _fixed(records: Sequence[Record]) -> set[int]:
    """Indices of the lines that stay: the first and last progress of each attempt, its last histograms, its events."""
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


def _less_often(found: Sequence[tuple[bytes, Record]], fixed: set[int], newest: float, factor: int) -> Iterator[bytes]:
    before: tuple[float, int] | None = None
    for index, (line, record) in enumerate(found):
        if index in fixed:
            yield line
        elif isinstance(record, Progress):
            step = next(step for age, step in _STEPS if newest - record.at >= age / factor) * factor
            here = step, int(record.at // step) if step else index
            if here != before:
                yield line
            before = here


# recent history -------------------------------------------------------------------------------------------------------

# What ``status`` needs of a rank's history: every event, and of the minute lines only the few that matter now.
#
# A minute line takes longer to parse than all else that is read of a rank, so the others are left alone.


RATE_SECONDS = 300.0
"""Rates are those of so many last seconds, at least."""
_MAX_BYTES = 1 << 19
_EVENTS = tuple(b'"k":"%s"' % kind.KIND.encode() for kind in (Start, End, ServerEvent))
_HEAD = re.compile(rb'"k":"progress","at":([0-9]+(?:\.[0-9]+)?),"n":([0-9]+),')


@dataclass(slots=True)
class AttemptSummary:
    """One start of a rank until its end. The rank's history has the whole of it.

    Attributes:
        number: from 1.
        started, last_seen: times of its first and last line.
        ended: time of its end line; None: it still runs, or ended without a word.
        why: "done", "stopped", "error", or "" if there is no end line.
        what: what stopped it, or the error.
        without_a_word: it ended, and no line says so.
        in_flight: requests in flight at its last line.
        documents: done at its last line, over all attempts; None: it has no such line.
        own: of these, those that this attempt finished.
    """

    number: int
    started: float
    last_seen: float
    ended: float | None = None
    why: str = ""
    what: str = ""
    host: str = ""
    pid: int | None = None
    slurm_job: str | None = None
    version: str = ""
    without_a_word: bool = False
    in_flight: int = 0
    documents: int | None = None
    own: int = 0

    def take(self, record: Record) -> None:
        """Adds what a line says."""
        self.last_seen = max(self.last_seen, record.at)
        if isinstance(record, Start):
            self.host, self.pid, self.slurm_job = record.host, record.pid, record.job
            self.version, self.started = record.version, min(self.started, record.at)
        elif isinstance(record, End):
            self.ended, self.why, self.what = record.at, record.why, record.what
        elif isinstance(record, Progress):
            self.in_flight = record.in_flight
            self.documents, self.own = record.documents.read, record.own.documents


@dataclass(slots=True)
class Rates:
    """Per second."""

    documents: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    input: float = 0.0
    """In the input's unit."""

    def add(self, other: Rates, factor: float = 1.0) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name) * factor)


@dataclass(slots=True)
class RecentHistory:
    """The attempts of a rank, and its last minutes.

    Attributes:
        last: the newest progress line; None if there is none.
        window: two lines of the newest attempt, ``RATE_SECONDS`` apart or as far as there are lines: the last one is
            the second. Empty if it has ended.
        servers: what happened to servers in the newest attempt.
        last_at: time of the newest line.
    """

    attempts: list[AttemptSummary] = field(default_factory=list)
    last: Progress | None = None
    window: tuple[Progress, Progress] | None = None
    servers: list[ServerEvent] = field(default_factory=list)
    last_at: float | None = None

    @property
    def seconds(self) -> float:
        """Between the two lines of the window; 0 without them."""
        return self.window[1].at - self.window[0].at if self.window else 0.0

    def rates(self) -> Rates:
        """Of the last minutes of the newest attempt."""
        if self.window is None or self.seconds <= 0:
            return Rates()
        then, last = self.window
        names = ("documents", "requests", "prompt_tokens", "completion_tokens")
        grown = [getattr(last.own, name) - getattr(then.own, name) for name in names]
        grown.append(last.position.done - then.position.done)
        return Rates(*(max(0, number) / self.seconds for number in grown))


def read_recent(path: str) -> RecentHistory:
    """Reads a ``history.jsonl``. A missing file has no attempts.

    Raises:
        StorageFailed: it cannot be read.
    """
    lines = last_lines(path, _MAX_BYTES)
    found, attempts = RecentHistory(), dict[int, AttemptSummary]()
    newest, minute = 0, b""
    for line in lines:
        if is_progress_line(line):
            minute = line
            continue
        if not line.startswith(_EVENTS, BODY_AT) or (record := parse_line(line)) is None:
            continue
        if isinstance(record, Start) and minute:
            _count(found, attempts, parse_line(minute))  # the last one of the attempt before
        _count(found, attempts, record)
        if record.attempt > newest:
            newest, found.servers = record.attempt, []
        if isinstance(record, ServerEvent):
            found.servers.append(record)
    _count(found, attempts, parse_line(minute))
    found.attempts = [attempts[number] for number in sorted(attempts)]
    for attempt in found.attempts[:-1]:
        attempt.without_a_word = attempt.ended is None
    found.last_at = max((attempt.last_seen for attempt in found.attempts), default=None)
    if found.last is not None and found.attempts[-1].ended is None:  # of one that has ended, its last line says it
        found.window = _window(lines, max(attempts), found.last)
    return found


def _count(found: RecentHistory, attempts: dict[int, AttemptSummary], record: Record | None) -> None:
    """Adds what a line says of its attempt."""
    if record is None:
        return
    attempts.setdefault(record.attempt, AttemptSummary(record.attempt, record.at, record.at)).take(record)
    if isinstance(record, Progress):
        found.last = record


def _window(lines: list[bytes], attempt: int, last: Progress) -> tuple[Progress, Progress]:
    """The last line of the newest attempt, and before it the one that is ``RATE_SECONDS`` older, or the first one.

    Of the lines between them, only the time is read.
    """
    oldest = b""
    for line in reversed(lines):
        if (head := _HEAD.match(line, BODY_AT)) is None:
            continue
        if int(head[2]) != attempt:
            break
        oldest = line
        if last.at - float(head[1]) >= RATE_SECONDS - 1:
            break
    first = parse_line(oldest)
    return (first if isinstance(first, Progress) else last), last


def downtime(attempts: list[AttemptSummary]) -> float:
    """Seconds between an attempt that was cut short and the next one."""
    cut_short = ((before, after) for before, after in pairwise(attempts) if before.why != "done")
    return sum(max(0.0, after.started - (before.ended or before.last_seen)) for before, after in cut_short)
