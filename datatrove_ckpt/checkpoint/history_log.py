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
from bisect import bisect_left
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
        unsynced: whether power loss may cost a line.
        generation: how often the file was replaced. It counts before that is done, so that whoever has opened the file
            and then finds the same number has the file of that number.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self.path = path
        self._attempt = attempt
        self.earlier, self.position = WorkCounts(), InputPosition()
        content = self._read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            files.disk.truncate(path, path.stat().st_size - len(content) + whole)
        for line in reversed(content[:whole].splitlines(keepends=True)):
            record = parse_line(line) if is_progress_line(line) else None
            if isinstance(record, Progress):
                self.earlier, self.position = record.total, record.position
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
STUCK_SECONDS = 600.0
"""A rank in which nothing is finished for so long is stuck."""
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
        window: minutes of the newest attempt, the last one among them, in their order; none if it has ended.
        since: the line since which nothing was finished in the newest attempt; None if something was lately.
        servers: what happened to servers in the newest attempt.
        last_at: time of the newest line.
    """

    attempts: list[AttemptSummary] = field(default_factory=list)
    last: Progress | None = None
    window: list[Progress] = field(default_factory=list)
    since: Progress | None = None
    servers: list[ServerEvent] = field(default_factory=list)
    last_at: float | None = None

    def before(self, seconds: float) -> Progress | None:
        """The newest line that is so much older than the last one; the first of the attempt, if it is younger."""
        if len(self.window) < 2:
            return None
        last = self.window[-1]
        return next((line for line in reversed(self.window) if last.at - line.at >= seconds - 1), self.window[0])

    @property
    def is_stuck(self) -> bool:
        """Whether nothing was finished in the newest attempt for ``STUCK_SECONDS``."""
        then = self.before(STUCK_SECONDS)
        return (
            then is not None and self.window[-1].at - then.at >= STUCK_SECONDS - 1 and _is_level(then, self.window[-1])
        )

    def rates(self) -> Rates:
        """Of the last minutes of the newest attempt."""
        then, last = self.before(RATE_SECONDS), self.window[-1] if self.window else None
        if then is None or last is None or last.at <= then.at:
            return Rates()
        names = ("documents", "requests", "prompt_tokens", "completion_tokens")
        grown = [getattr(last.own, name) - getattr(then.own, name) for name in names]
        grown.append(last.position.done - then.position.done)
        return Rates(*(max(0, number) / (last.at - then.at) for number in grown))


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
    found.last_at = max((attempt.last_seen for attempt in found.attempts), default=None)
    if found.last is not None and found.attempts[-1].ended is None:  # of one that has ended, its last line says it
        found.window = _window(lines, max(attempts), found.last)
    if found.is_stuck:
        found.since = _standstill(lines, found.window[-1], max(attempts))
    return found


def _standstill(lines: list[bytes], last: Progress, attempt: int) -> Progress | None:
    """The first line of the newest attempt with the numbers of its last one. They never fall: few lines are parsed."""
    heads = ((line, _HEAD.match(line, BODY_AT)) for line in lines)
    own = [line for line, head in heads if head is not None and int(head[2]) == attempt]

    def is_level(line: bytes) -> bool:
        minute = parse_line(line)
        return isinstance(minute, Progress) and _is_level(minute, last)

    first = own[bisect_left(own, True, key=is_level) :][:1]
    record = parse_line(first[0]) if first else None
    return record if isinstance(record, Progress) else None


def _count(found: RecentHistory, attempts: dict[int, AttemptSummary], record: Record | None) -> None:
    """Adds what a line says of its attempt."""
    if record is None:
        return
    attempts.setdefault(record.attempt, AttemptSummary(record.attempt, record.at, record.at)).take(record)
    if isinstance(record, Progress):
        found.last = record


def _is_level(one: Progress, other: Progress) -> bool:
    """Whether no document was finished and no request answered between the two."""
    return (one.own.documents, one.own.requests) == (other.own.documents, other.own.requests)


def _window(lines: list[bytes], attempt: int, last: Progress) -> list[Progress]:
    """Of the newest attempt: the last minute line, those as old as the two periods, and the first one if it is younger.

    Only these are parsed. Of the others, the time is read.
    """
    near: list[tuple[float, bytes]] = []  # age and line, from the last one back
    for line in reversed(lines):
        if (head := _HEAD.match(line, BODY_AT)) is None:
            continue
        if int(head[2]) != attempt:
            break
        near.append((last.at - float(head[1]), line))
        if near[-1][0] >= STUCK_SECONDS - 1:
            break
    if not near:
        return []
    rate = next((index for index, (age, _) in enumerate(near) if age >= RATE_SECONDS - 1), 0)
    older = [near[index][1] for index in sorted({rate, len(near) - 1} - {0}, reverse=True)]
    return [*(record for line in older if isinstance(record := parse_line(line), Progress)), last]


def downtime(attempts: list[AttemptSummary]) -> float:
    """Seconds between an attempt that was cut short and the next one."""
    cut_short = ((before, after) for before, after in pairwise(attempts) if before.why != "done")
    return sum(max(0.0, after.started - (before.ended or before.last_seen)) for before, after in cut_short)
