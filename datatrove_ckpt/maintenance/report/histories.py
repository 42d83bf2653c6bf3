"""What the histories of all ranks say together: how far they were at each time, and what interrupted them.

A thousand ranks have a gigabyte of histories, so of the lines about progress only an even share is parsed.

Between two lines a sum is taken to grow evenly. While no attempt runs it stands still. What an attempt did between its
last line and a kill is known from the first line of the next attempt; it counts for the minute after the last line (or
for as long as between its last two lines), because the next line would have been written then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from datatrove_ckpt.checkpoint.history_log import AttemptSummary
from datatrove_ckpt.checkpoint.history_records import Progress, ServerEvent, Spread, Start, is_progress_line, parse_line
from datatrove_ckpt.checkpoint.lines import BODY_AT, unseal, whole_lines

Floats: TypeAlias = NDArray[np.float64]
NO_WORD = "killed"
"""How attempts end that are killed with -9, run out of memory, or lose their node."""
_START, _SPREAD = (b'"k":"%s"' % kind.KIND.encode() for kind in (Start, Spread))
_MAX_INTERVALS = 160  # so many a screen can show
_MINUTE = 60.0  # from a line of the history to the next one, if none was left out


@dataclass(slots=True)
class AttemptLog(AttemptSummary):
    """One attempt, with the lines that were read of it."""

    servers: list[ServerEvent] = field(default_factory=list)
    minutes: list[Progress] = field(default_factory=list)
    spread: Spread | None = None

    @property
    def how_it_ended(self) -> str:
        """A few words."""
        if self.ended is None:
            return NO_WORD
        what = self.what.partition("\n")[0]
        return f"stopped by {what}" if self.why == "stopped" and what else what or self.why

    @property
    def place(self) -> str:
        """Host and Slurm job."""
        return self.host + (f", Slurm job {self.slurm_job}" if self.slurm_job else "")

    @property
    def repeated(self) -> int | None:
        """Requests that were in flight at its last line: those are sent again.

        None: its last line knows of none, but came before it was killed.
        """
        return self.in_flight if self.minutes and (self.in_flight or self.ended is not None) else None

    @property
    def seconds_until_ready(self) -> float | None:
        """From the attempt's start until its first server answered."""
        ready = next((event.at for event in self.servers if event.what in ("ready", "reused")), None)
        return None if ready is None else max(0.0, ready - self.started)


@dataclass(slots=True)
class RankLog:
    """All attempts of a rank, by ascending numbers, and how many of the lines that were looked at are damaged."""

    attempts: list[AttemptLog] = field(default_factory=list)
    damaged: int = 0


def read_log(path: Path, most: int) -> RankLog:
    """Reads a history. What cannot be read, or is no file, has no attempts: ``status`` says what is damaged.

    Args:
        most: progress lines to read, besides the first and the last one of each attempt.
    """
    with suppress(OSError):
        if path.is_file():
            return parse_log(path.read_bytes(), most)
    return RankLog()


def parse_log(data: bytes, most: int = 1000) -> RankLog:
    """The same from the file's content. A torn line at its end is left out."""
    log, found = RankLog(), dict[int, AttemptLog]()
    for line in _chosen(whole_lines(data), most):
        record = parse_line(line)
        if record is None:
            log.damaged += unseal(line) is None
            continue
        attempt = found.setdefault(record.attempt, AttemptLog(record.attempt, record.at, record.at))
        attempt.take(record)
        match record:
            case Progress():
                attempt.minutes.append(record)
            case ServerEvent():
                attempt.servers.append(record)
            case Spread():
                attempt.spread = record
    log.attempts = [found[number] for number in sorted(found)]
    return log


def _chosen(lines: Sequence[bytes], most: int) -> Iterator[bytes]:
    """The lines to parse, in their order. The last histograms of an attempt have all of its requests."""
    step = -(-len(lines) // max(1, most)) or 1
    starts = [index for index, line in enumerate(lines) if line.startswith(_START, BODY_AT)]
    for first, end in pairwise([0, *starts, len(lines)]):
        minutes = [index for index in range(first, end) if is_progress_line(lines[index])]
        spreads = [index for index in range(first, end) if lines[index].startswith(_SPREAD, BODY_AT)]
        left_out = {*minutes, *spreads} - {*minutes[::step], *minutes[-1:], *spreads[-1:]}
        yield from (lines[index] for index in range(first, end) if index not in left_out)


# time ----------------------------------------------------------------------------------------------------------------


class OverTime:
    """All ranks on one time axis: how much their sums grew in each of its intervals.

    Args:
        edges: Unix seconds, ascending: where each interval starts, and where the last one ends.

    Attributes:
        before: documents that were finished before the first line of a rank, by an earlier release.
    """

    def __init__(self, edges: Floats) -> None:
        self.edges = edges
        self.before = 0
        self.documents, self.prompt_tokens, self.completion_tokens, self._ran = np.zeros((4, len(edges) - 1))
        self.errors: dict[str, Floats] = {}

    def add(self, log: RankLog, until: float | None = None) -> None:
        """Adds a rank.

        Args:
            until: its last attempt still runs, and ran until then.
        """
        spans = [[attempt.started, attempt.last_seen] for attempt in log.attempts]
        if until is not None and spans:
            spans[-1][1] = max(spans[-1][1], until)
        for start, end in spans:
            self._ran += np.clip(np.minimum(self.edges[1:], end) - np.maximum(self.edges[:-1], start), 0.0, None)
        times, lines = _lines(log.attempts)
        if not lines:
            return
        self.before += lines[0].documents.read

        def grown(value: Callable[[Progress], int]) -> Floats:
            """What was there before the first line is left out; a clock that was set back does no harm."""
            rising = np.maximum.accumulate([float(value(line)) for line in lines])
            return np.diff(np.interp(self.edges, np.maximum.accumulate(times), rising))

        self.documents += grown(lambda line: line.documents.read)
        self.prompt_tokens += grown(lambda line: line.documents.prompt_tokens)
        self.completion_tokens += grown(lambda line: line.documents.completion_tokens)
        for kind in dict.fromkeys(kind for line in lines for kind in line.total.errors):
            values = grown(lambda line, kind=kind: line.total.errors.get(kind, 0))  # type: ignore[misc]
            self.errors[kind] = self.errors.get(kind, 0.0) + values

    def rate(self, grown: Floats) -> list[float | None]:
        """Per second; None where no rank ran."""
        values = grown / np.diff(self.edges)
        return [float(value) if ran else None for value, ran in zip(values, self._ran > 0, strict=True)]

    def count(self, times: Iterable[float]) -> list[int]:
        """How many of the times lie in each interval."""
        inside = np.clip(list(times), self.edges[0], self.edges[-1])
        return [int(number) for number in np.histogram(inside, self.edges)[0]]


def time_axis(logs: Iterable[RankLog], now: float | None = None) -> OverTime | None:
    """From the first line to the last one, or to ``now``; None without lines."""
    spans = [(attempt.started, attempt.last_seen) for log in logs for attempt in log.attempts]
    if not spans:
        return None
    first = min(first for first, _ in spans)
    last = max(*(last for _, last in spans), now or 0.0, first + 1.0)
    return OverTime(np.linspace(first, last, int(min(_MAX_INTERVALS, last - first)) + 1))


def _lines(attempts: Sequence[AttemptLog]) -> tuple[list[float], list[Progress]]:
    """The progress lines, and when each of them was true."""
    times: list[float] = []
    lines: list[Progress] = []
    ended = 0.0
    for attempt in (attempt for attempt in attempts if attempt.minutes):
        minutes = attempt.minutes
        if lines:
            # What the attempt before did after its last line was done soon after that, and not in the pause.
            times.append(min(ended, minutes[0].at))
            lines.append(minutes[0])
        times += [minute.at for minute in minutes]
        lines += minutes
        step = minutes[-1].at - minutes[-2].at if len(minutes) > 1 else _MINUTE
        ended = max(attempt.last_seen, minutes[-1].at + min(step, _MINUTE))
    return times, lines


# interruptions -------------------------------------------------------------------------------------------------------


class Interruption(NamedTuple):
    """An attempt that ended before its rank was done, or the death of a server.

    Attributes:
        rank: its name.
        at: Unix seconds of the last sign of life.
        why: a few words.
        place: host and Slurm job.
        away: seconds until the next attempt; None: there is none yet.
        starting: seconds from then until servers were ready; None: not known.
        repeated: requests that had to be sent again; None: not known.
    """

    rank: str
    at: float
    why: str
    place: str
    away: float | None
    starting: float | None
    repeated: int | None


def interruptions(rank: str, log: RankLog, is_running: bool) -> Iterator[Interruption]:
    """Attempts of a rank that ended before it was done, and servers that died meanwhile. In the order of time.

    Args:
        is_running: the last attempt has not ended.
    """
    for attempt, following in pairwise([*log.attempts, None]):
        assert attempt is not None
        yield from _deaths(rank, attempt)
        if attempt.why == "done" or (following is None and is_running):
            continue
        away = starting = None
        if following is not None:
            away = max(0.0, following.started - attempt.last_seen)
            starting = following.seconds_until_ready
        why = attempt.how_it_ended
        yield Interruption(rank, attempt.last_seen, why, attempt.place, away, starting, attempt.repeated)


def _deaths(rank: str, attempt: AttemptLog) -> Iterator[Interruption]:
    """Servers that died in the attempt, until each answered again."""
    for index, event in enumerate(attempt.servers):
        if event.what != "death":
            continue
        why = f"server {event.name} died"
        if event.why:
            why = f"{why}: {event.why}"
        starting = None
        for later in attempt.servers[index + 1 :]:
            if later.name == event.name and later.what == "ready":
                starting = max(0.0, later.at - event.at)
                break
        yield Interruption(rank, event.at, why, attempt.place, 0.0, starting, None)
