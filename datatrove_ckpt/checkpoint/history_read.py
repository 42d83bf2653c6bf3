"""Reads ``history.jsonl``: attempts, server events, and as many progress lines as needed.

``status`` needs the last minutes, and ``report`` an even sample. The other lines are not parsed,
which would take longer than reading the rest of the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
from datatrove_ckpt.checkpoint.lines import BODY_AT, last_lines
from datatrove_ckpt.checkpoint.numbers import Rates

RATE_SECONDS = 300.0
"""Rates are those of so many last seconds, at least."""
_MAX_BYTES = 1 << 19  # of the end of the file, if no minutes are asked for
_TOGETHER = 0.1  # seconds between lines that were written together, at most
_EVENTS = tuple(b'"k":"%s"' % kind.KIND.encode() for kind in (Start, End, ServerEvent))
_SPREAD = b'"k":"%s"' % Spread.KIND.encode()


@dataclass(slots=True)
class AttemptSummary:
    """An attempt, from the start of a rank to its end.

    Attributes:
        number: from 1.
        started, last_seen: times of its first and last line.
        ended: time of its end line; None: it still runs, or was killed.
        why: "done", "stopped", "error", or "" without an end line.
        what: what stopped it, or the error.
        without_a_word: it ended without an end line.
        counted_at: time of its last progress line.
        cut_off: requests whose answers were not waited for, and that may be paid.
        in_flight: requests in flight at its last progress line; None: there is no progress line.
        own: the documents that it finished until its last line.
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
    counted_at: float = 0.0
    cut_off: int = 0
    in_flight: int | None = None
    own: int = 0

    def take(self, record: Record) -> None:
        self.last_seen = max(self.last_seen, record.at)
        if isinstance(record, Start):
            self.host = record.host
            self.pid = record.pid
            self.slurm_job = record.job
            self.version = record.v
            self.started = min(self.started, record.at)
        elif isinstance(record, End):
            self.ended = record.at
            self.why = record.why
            self.what = record.what
            self.in_flight = self.in_flight or 0  # an attempt that could write its end had none
        elif isinstance(record, Progress):
            if record.own.sent:
                self.in_flight = record.in_flight
            self.own = record.own.documents
            self.counted_at = record.at
            own = record.own
            ended = own.requests + own.failed + own.retries + own.resent
            self.cut_off = max(0, own.sent - ended)

    @property
    def has_sums(self) -> bool:
        """Whether its last progress line counts all that it did. A full disk may have no room for
        that line, and room for the end line.
        """
        return self.ended is not None and self.ended - self.counted_at < _TOGETHER

    @property
    def how_it_ended(self) -> str:
        if self.ended is None:
            return "killed"
        what = self.what.partition("\n")[0]
        if self.why == "stopped" and what:
            return f"stopped by {what}"
        return what or self.why

    @property
    def place(self) -> str:
        if self.slurm_job:
            return f"{self.host}, Slurm job {self.slurm_job}"
        return self.host


@dataclass(slots=True)
class History:
    """The parsed part of a rank's history.

    Attributes:
        attempts: by ascending numbers.
        minutes: progress lines, including the last line of each attempt.
        spreads: the last line of each attempt, over all its requests. Read only with minutes.
        servers: events of servers in the newest attempt.
        window: two progress lines of the newest attempt, ``RATE_SECONDS`` apart or as far as lines
            reach; None if the attempt has ended.
    """

    attempts: list[AttemptSummary] = field(default_factory=list)
    minutes: list[Progress] = field(default_factory=list)
    spreads: list[Spread] = field(default_factory=list)
    servers: list[ServerEvent] = field(default_factory=list)
    window: tuple[Progress, Progress] | None = None

    @property
    def last(self) -> Progress | None:
        return next(reversed(self.minutes), None)

    @property
    def last_at(self) -> float | None:
        return max((attempt.last_seen for attempt in self.attempts), default=None)

    @property
    def seconds(self) -> float:
        if self.window is None:
            return 0.0
        return self.window[1].at - self.window[0].at

    def rates(self) -> Rates:
        seconds = self.seconds
        if self.window is None or seconds <= 0:
            return Rates()
        then, last = self.window
        names = ("documents", "requests", "prompt_tokens", "completion_tokens")
        grown = [getattr(last.own, name) - getattr(then.own, name) for name in names]
        grown.append(last.position.done - then.position.done)
        return Rates(*(max(0, number) for number in grown)) * (1 / seconds)


def read_history(path: str, most: int = 0) -> History:
    """Reads a ``history.jsonl``. A missing file has no attempts.

    Args:
        most: progress lines to parse besides the first and the last one of each attempt; 0: only
            the last ones.

    Raises:
        StorageFailed: it cannot be read.
    """
    return parse_history(last_lines(path, None if most else _MAX_BYTES), most)


def _take(record: Record | None, found: History, attempts: dict[int, AttemptSummary]) -> None:
    if record is not None:
        attempt = attempts.setdefault(
            record.attempt, AttemptSummary(record.attempt, record.at, record.at)
        )
        attempt.take(record)
    if isinstance(record, Progress):
        found.minutes.append(record)
    elif isinstance(record, Spread):
        found.spreads.append(record)
    elif isinstance(record, ServerEvent):
        found.servers.append(record)


def parse_history(lines: Sequence[bytes], most: int) -> History:
    found = History()
    attempts: dict[int, AttemptSummary] = {}
    step = 0
    if most:
        step = len(lines) // most + 1
    minutes: list[bytes] = []
    spreads: list[bytes] = []

    def end_attempt() -> None:
        chosen = [*minutes[-1:], *spreads[-1:]]
        if step:
            chosen = [*minutes[:-1:step], *chosen]
        for line in chosen:
            _take(parse_line(line), found, attempts)

    for line in lines:
        if is_progress_line(line):
            minutes.append(line)
        elif step and line.startswith(_SPREAD, BODY_AT):
            spreads.append(line)
        elif line.startswith(_EVENTS, BODY_AT):
            record = parse_line(line)
            if isinstance(record, Start):
                end_attempt()
                minutes = []
                spreads = []
                found.servers = []
            _take(record, found, attempts)
    end_attempt()
    found.attempts = [attempts[number] for number in sorted(attempts)]
    for attempt in found.attempts[:-1]:
        attempt.without_a_word = attempt.ended is None
    if found.last is not None and found.attempts[-1].ended is None:
        found.window = _window(minutes, found.attempts[-1].number, found.last)
    return found


def _window(minutes: Sequence[bytes], attempt: int, last: Progress) -> tuple[Progress, Progress]:
    first = last
    for line in reversed(minutes):
        record = parse_line(line)
        if not isinstance(record, Progress):
            continue
        # An outage is no time at work.
        if record.attempt != attempt or (record.silence.lasts and not last.silence.lasts):
            break
        first = record
        if last.at - first.at >= RATE_SECONDS - 1:
            break
    return first, last
