"""A rank's history as tests look at it: by attempts."""

from collections import Counter
from dataclasses import dataclass, field

from datatrove_ckpt.checkpoint.checksummed_lines import verified_body, whole_lines
from datatrove_ckpt.checkpoint.history import (
    AttemptEnd,
    AttemptStart,
    OutageStatus,
    ProgressRecord,
    Record,
    ServerEvent,
    parse_line,
)
from datatrove_ckpt.common.counts import DocumentCounts, InputPosition, Seconds, WorkCounts


def progress():
    """One in which each number is another, of a rank in the middle of its work."""
    own = WorkCounts(
        7, 12, 2, 100, 50, 3, 15, 4, 1, 1, errors=Counter({"timeout": 2, "HTTP 503": 3})
    )
    return ProgressRecord(
        at=0.0,
        attempt=1,
        seconds=Seconds(8.5, 9.5),
        documents=DocumentCounts(40, 35, 3, 2, 60, 500, 250),
        chunks=4,
        total=own,
        own=own,
        in_flight=5,
        waiting=6,
        in_work=8,
        silence=OutageStatus(40.5, 600.0, True),
        position=InputPosition(25, 100, "bytes"),
    )


@dataclass(slots=True)
class Attempt:
    """What the history has of one attempt.

    Each part may be missing: killed, damaged, or left out to bound the size.
    """

    number: int
    start: AttemptStart | None = None
    servers: list[ServerEvent] = field(default_factory=list)
    progress: list[ProgressRecord] = field(default_factory=list)
    end: AttemptEnd | None = None
    last_at: float = 0.0

    @property
    def last(self):
        return self.progress[-1] if self.progress else None


@dataclass(slots=True)
class History:
    records: list[Record] = field(default_factory=list)
    damaged: int = 0

    @property
    def attempts(self):
        """In ascending order of their numbers."""
        found = {}
        for record in self.records:
            attempt = found.setdefault(record.attempt, Attempt(record.attempt))
            attempt.last_at = max(attempt.last_at, record.at)
            match record:
                case AttemptStart():
                    attempt.start = record
                case ServerEvent():
                    attempt.servers.append(record)
                case ProgressRecord():
                    attempt.progress.append(record)
                case AttemptEnd():
                    attempt.end = record
        return [found[number] for number in sorted(found)]

    @property
    def last(self):
        """The newest progress line."""
        return next(
            (record for record in reversed(self.records) if isinstance(record, ProgressRecord)),
            None,
        )

    @property
    def last_attempt(self):
        return max((record.attempt for record in self.records), default=0)


def read_history(path):
    """A missing file has no records.

    A torn last line is left out, and so are whole ones that are not known here.
    """
    lines = whole_lines(path.read_bytes()) if path.exists() else []
    found = [parse_line(line) for line in lines]
    damaged = sum(
        record is None and verified_body(line) is None
        for line, record in zip(lines, found, strict=True)
    )
    return History([record for record in found if record is not None], damaged)
