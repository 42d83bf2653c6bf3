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
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from datatrove_ckpt.checkpoint.history_log import AttemptSummary
from datatrove_ckpt.checkpoint.history_records import Progress, Spread, Start, is_progress_line, parse_line
from datatrove_ckpt.checkpoint.lines import BODY_AT, unseal, whole_lines

Floats: TypeAlias = NDArray[np.float64]
_START, _SPREAD = (b'"k":"%s"' % kind.KIND.encode() for kind in (Start, Spread))
_MAX_INTERVALS = 160  # so many a screen can show
_MINUTE = 60.0  # from a line of the history to the next one, if none was left out


@dataclass(slots=True)
class AttemptLog(AttemptSummary):
    """One attempt, with the lines that were read of it."""

    minutes: list[Progress] = field(default_factory=list)
    spread: Spread | None = None

    @property
    def how_it_ended(self) -> str:
        """A few words."""
        what = self.what.partition("\n")[0]
        if self.ended is None:
            return "killed"
        if self.why == "stopped" and what:
            return f"stopped by {what}"
        return what or self.why

    @property
    def place(self) -> str:
        """Host and Slurm job."""
        if self.slurm_job:
            return f"{self.host}, Slurm job {self.slurm_job}"
        return self.host


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
        sums = np.zeros((5, len(edges) - 1))
        self.documents, self.prompt_tokens, self.completion_tokens, self.errors, self._ran = sums

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
        self.errors += grown(lambda line: sum(line.total.errors.values()))

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
