"""A rank's history as the report needs it: every event, and an even share of the minute lines.

A thousand ranks have a gigabyte of histories. So most minute lines are never parsed, and of the others only the numbers
that are drawn. What ``checkpoint.history`` reads whole, this reads in two milliseconds per rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import orjson

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.history_records import (
    End,
    Progress,
    Record,
    ServerEvent,
    Spread,
    Start,
    parse_line,
)
from datatrove_ckpt.checkpoint.lines import BODY_AT, is_count, is_seconds, unseal

_PROGRESS, _START, _SPREAD = (b'"k":"%s"' % kind.KIND.encode() for kind in (Progress, Start, Spread))
_LETTER_AT = len(b'"k":"')
_NEWLINE = ord("\n")
_NUMBER = re.compile(rb'[^{}]{0,80}?"n":([0-9]{1,18})[,}]')
_COUNTS = len(fields(DocumentCounts))
_MAX_NAME = 200


@dataclass(slots=True)
class Minute:
    """A progress line: sums over all attempts; tokens are those of documents that are done.

    ``seconds``: with servers that were ready; before, since the starts.
    """

    at: float
    seconds: float
    documents: int
    prompt_tokens: int
    completion_tokens: int
    in_flight: int
    errors: dict[str, int]


@dataclass(slots=True)
class AttemptLog:
    """One attempt. ``first_at``, ``last_at``: times of its first and last line, in Unix seconds."""

    number: int
    first_at: float
    last_at: float
    start: Start | None = None
    servers: list[ServerEvent] = field(default_factory=list)
    minutes: list[Minute] = field(default_factory=list)
    spread: Spread | None = None
    end: End | None = None

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.end.why == "done"


@dataclass(slots=True)
class RankLog:
    """All attempts of a rank, by ascending numbers, and how many of the lines that were looked at are damaged."""

    attempts: list[AttemptLog] = field(default_factory=list)
    damaged: int = 0

    @property
    def last(self) -> Minute | None:
        """The newest progress line."""
        return next((attempt.minutes[-1] for attempt in reversed(self.attempts) if attempt.minutes), None)


def read_log(path: Path, most: int) -> RankLog:
    """Reads a history; what is no file, such as a pipe, has no attempts: ``status`` says what is damaged.

    Args:
        most: progress lines to read, besides the first and the last one of each attempt.

    Raises:
        StorageFailed: it cannot be read.
    """
    with explained("read", path):
        return parse_log(path.read_bytes(), most) if path.is_file() else RankLog()


def parse_log(data: bytes, most: int = 1000) -> RankLog:
    """The same from the file's content."""
    log, found = RankLog(), dict[int, AttemptLog]()
    for line in _chosen(data, most):
        body = unseal(line)
        if body is None:
            log.damaged += 1
        elif line.startswith(_PROGRESS, BODY_AT):
            _add_minute(found, body)
        elif (record := parse_line(line)) is not None:
            _add_event(found, record)
    log.attempts = [found[number] for number in sorted(found)]
    return log


def _chosen(data: bytes, most: int) -> Iterator[bytes]:
    """The lines to parse, in their order. A torn one at the end is left out."""
    content = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(content == _NEWLINE) + 1
    starts = np.concatenate(([0], ends[:-1]))
    # The letter after "k":" tells progress lines from all others, without a look at each line.
    letters = content[np.minimum(starts + BODY_AT + _LETTER_AT, len(content) - 1)] if len(ends) else ends
    is_minute = letters == _PROGRESS[_LETTER_AT]
    minutes = np.flatnonzero(is_minute)
    chosen = {*minutes[:: max(1, -(-len(minutes) // max(1, most)))].tolist(), *minutes[-1:].tolist()}
    spreads: dict[bytes, int] = {}
    for index in np.flatnonzero(~is_minute).tolist():
        body = int(starts[index]) + BODY_AT
        if data.startswith(_SPREAD, body) and (attempt := _NUMBER.match(data, body)) is not None:
            spreads[attempt[1]] = index  # the last one of an attempt has all of it
            continue
        chosen.add(index)
        if data.startswith(_START, body):  # the last minute before it, and the first one after it
            place = int(np.searchsorted(minutes, index))
            chosen.update(minutes[max(0, place - 1) : place + 1].tolist())
    return (data[starts[index] : ends[index]] for index in sorted(chosen.union(spreads.values())))


def _attempt(found: dict[int, AttemptLog], number: int, at: float) -> AttemptLog:
    attempt = found.get(number)
    if attempt is None:
        attempt = found[number] = AttemptLog(number, at, at)
    attempt.last_at = max(attempt.last_at, at)
    return attempt


def _add_event(found: dict[int, AttemptLog], record: Record) -> None:
    attempt = _attempt(found, record.attempt, record.at)
    match record:
        case Start():
            attempt.start = record
        case ServerEvent():
            attempt.servers.append(record)
        case Spread():
            attempt.spread = record
        case End():
            attempt.end = record


def _add_minute(found: dict[int, AttemptLog], body: bytes) -> None:
    """Adds a progress line, unless it is none of ours."""
    try:
        data = orjson.loads(body)
        at, number, (inference, total), errors = data["at"], data["n"], data["s"], data["err"]
        done = DocumentCounts(*data["d"][:_COUNTS])
        documents, prompt, completion, in_flight = done.read, done.prompt_tokens, done.completion_tokens, data["q"][0]
        counts = (number, documents, prompt, completion, in_flight, *errors.values())
        if not all(map(is_count, counts)) or not all(map(is_seconds, (at, inference, total))):
            return
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return
    kinds = {name[:_MAX_NAME]: count for name, count in errors.items()}
    minute = Minute(at, inference or total, documents, prompt, completion, in_flight, kinds)
    _attempt(found, number, at).minutes.append(minute)
