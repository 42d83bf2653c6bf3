"""``history.jsonl`` of a rank: what its attempts did, one line per event.

Recovery does not read it, so damage costs a line and never the run. Each line has a checksum
(``checksummed_lines``) and is a JSON object with the keys "k" (kind), "at" (Unix seconds) and "n"
(number of the attempt, from 1: the owner's fence in ``run.json``).

    k           keys
    start       host, pid, job (Slurm job id, or null), v (our version)
    server      what, name, url (without secrets, or null), why
    progress    s, d, r, len, c, all, own, err, q, cap, w, out, pos, skip, tier, call, failed, ms,
                and own_ of err and of the last four: see ``ProgressRecord``
    spread      ms, pt, ct, bad: see ``RequestHistograms``
    end         why, what
    replay      what

Readers ignore keys and kinds of later releases.

A line is one write, so a kill tears at most the last line, which the next attempt cuts off. Readers
skip other damaged lines. If an attempt finds more than ``MAX_BYTES``, a shorter copy replaces the
log. While an attempt runs, the file only grows, so the mirror can copy it.

``read_history`` parses attempts, server events, and as many progress lines as needed: ``status``
needs the last minutes, and ``report`` an even sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import (
    BODY_AT,
    Json,
    add_checksum,
    last_lines,
    verified_body,
)
from datatrove_ckpt.common.counts import (
    NO_SECONDS,
    DocumentCounts,
    InputPosition,
    LogHistogram,
    Processed,
    Seconds,
    SkippedLines,
    WorkCounts,
)
from datatrove_ckpt.common.formatting import as_line

ServerWhat = Literal["start", "ready", "reused", "death", "restart"]
"""A server: is started; answers; was started for an earlier rank of this process, and answers; died
or was given up; is started again.
"""
EndWhy = Literal["done", "stopped", "error"]
"""An attempt: every document is in the output; was asked to stop, and saved its work; failed."""

WAITS_FOR_BATCHES = "a pass over the input, for batches of requests"
"""What stops an attempt that has a batch at a provider: it needs no attention."""
MAX_TEXT = 4000
_MAX_KINDS = 64


class OutageStatus(NamedTuple):
    """Seconds without an answer, and seconds after which the rank stops. Both are 0 if none is."""

    seconds: float = 0.0
    patience: float = 0.0
    unreachable: bool = False
    model: str = ""

    @property
    def lasts(self) -> bool:
        return self.seconds >= 30.0

    def __str__(self) -> str:
        server = "the server"
        if self.model:
            server = f"{server} of {self.model}"
        if self.unreachable:
            return f"{server} is unreachable"
        return f"{server} gives no answers"


class WaitStatus(NamedTuple):
    """What a rank waits for. ``quiet``: seconds since the last answer, or since the first server
    was ready. ``oldest``: seconds since the oldest request in flight was sent, and ``document`` the
    id of its document. ``all_started``: no document is left to be started.
    """

    quiet: float = 0.0
    oldest: float = 0.0
    document: str = ""
    all_started: bool = False

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        status = cls(*values)
        return status._replace(document=as_line(status.document))


def _named_counts(counts: Json) -> Counter[str]:
    return Counter({as_line(name): count for name, count in list(counts.items())[:_MAX_KINDS]})


@dataclass(slots=True, kw_only=True)
class _HistoryRecord:
    """A line of the history.

    Attributes:
        attempt: number of the attempt, from 1; 0 until the log writes the line.

    A kind of other keys than its fields has its own ``to_json`` and ``read``.
    """

    KIND: ClassVar[str]
    at: float = 0.0
    attempt: int = 0

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in self.__slots__}

    def to_line(self) -> bytes:
        head = {"k": self.KIND, "at": round(self.at, 3), "n": self.attempt}
        return add_checksum(orjson.dumps(head | self.to_json(), list))  # of tuples

    @classmethod
    def read(cls, data: Json) -> Self:
        """Raises KeyError, TypeError or ValueError for another record."""
        return cls(**{name: data[name] for name in cls.__slots__ if name in data})


@dataclass(slots=True, kw_only=True)
class AttemptStart(_HistoryRecord):
    """An attempt has locked the rank and opened its checkpoint."""

    KIND = "start"
    host: str
    pid: int
    job: str | None = None
    v: str = ""


@dataclass(slots=True, kw_only=True)
class ServerEvent(_HistoryRecord):
    KIND = "server"
    what: ServerWhat
    name: str = ""
    url: str | None = None
    why: str = ""


@dataclass(slots=True, kw_only=True)
class ProgressRecord(_HistoryRecord):
    """The progress of a rank. It is written at an attempt's start, after ten seconds, each minute,
    and at its end.

    Attributes:
        seconds: seconds of all attempts ("s").
        documents: finished documents in commits and journals of all attempts, with their requests
            and tokens, cached answers included ("d", and, if any, "r" and "len" for reasons and
            lengths). Exact after any kills.
        chunks: committed chunks of all attempts ("c").
        total: what all attempts did ("all", "err", "tier", ...), without the last minute of killed
            attempts.
        own: what this attempt did ("own", "own_err", "own_tier", ...).
        places: requests that the servers have room for ("cap", if any).
        in_flight: requests at a server ("q", with the next two).
        waiting: requests that wait for a server, a free slot or their next attempt.
        in_work: documents that have begun and are not finished.
        wait: wait for answers ("w").
        silence: outage of the servers ("out").
        position: how much of the input is done ("pos").
        skipped: lines of the input, over all attempts, that were no documents ("skip", if any).
    """

    KIND = "progress"
    seconds: Seconds = NO_SECONDS
    documents: DocumentCounts = DocumentCounts()
    chunks: int = 0
    total: WorkCounts = field(default_factory=WorkCounts)
    own: WorkCounts = field(default_factory=WorkCounts)
    places: int = 0
    in_flight: int = 0
    waiting: int = 0
    in_work: int = 0
    wait: WaitStatus = WaitStatus()
    silence: OutageStatus = OutageStatus()
    position: InputPosition = InputPosition()
    skipped: SkippedLines = SkippedLines()

    def to_json(self) -> Json:
        optional = {
            "r": dict(self.documents.reasons.most_common(_MAX_KINDS)),
            "len": sorted(self.documents.lengths.items()),
            "cap": self.places,
            "skip": self.skipped and self.skipped.numbers(),
        }
        return {
            "s": self.seconds,
            "d": self.documents.numbers(),
            "c": self.chunks,
            "all": self.total.numbers(),
            "own": self.own.numbers(),
            **_labelled(self.total, ""),
            **_labelled(self.own, "own_"),
            "q": (self.in_flight, self.waiting, self.in_work),
            "w": self.wait,
            "out": self.silence if self.silence.model else self.silence[:3],
            "pos": self.position,
            **{key: value for key, value in optional.items() if value},
        }

    @classmethod
    def read(cls, data: Json) -> ProgressRecord:
        in_flight, waiting, in_work = data["q"]
        return cls(
            seconds=Seconds(*data["s"]),
            documents=DocumentCounts.of_numbers(
                data["d"],
                reasons=_named_counts(data.get("r", {})),
                lengths=LogHistogram(dict(data.get("len", ()))),
            ),
            chunks=data["c"],
            total=_work(data, "all", ""),
            own=_work(data, "own", "own_"),
            places=data.get("cap", 0),
            in_flight=in_flight,
            waiting=waiting,
            in_work=in_work,
            wait=WaitStatus.from_json(data.get("w", ())),
            silence=OutageStatus(*data["out"]),
            position=InputPosition(*data["pos"]),
            skipped=SkippedLines.of_numbers(data.get("skip", ())),
        )


_KEYS = {display.key: name for name, display in WorkCounts.displays().items() if display.key}
_NONE = Counter[str]()  # shared by ten thousand ranks


def _labelled(work: WorkCounts, prefix: str) -> Json:
    counters = {key: getattr(work, name) for key, name in _KEYS.items()}
    # 0.2.0 does not read a line without errors.
    return {prefix + key: value for key, value in counters.items() if value or key == "err"}


def _work(data: Json, numbers: str, prefix: str) -> WorkCounts:
    counters = {}
    for key, name in _KEYS.items():
        counts = data.get(prefix + key)
        counters[name] = _named_counts(counts) if counts else _NONE
    return WorkCounts.of_numbers(data[numbers], **counters)


@dataclass(slots=True, kw_only=True)
class RequestHistograms(_HistoryRecord):
    """The requests of this attempt that servers answered, as histograms, every ten minutes and at
    the end; and some answers.

    Attributes:
        milliseconds: time from sending to the answer ("ms").
        prompt_tokens, completion_tokens: tokens of each answer ("pt", "ct").
        examples: some bad answers by what is wrong with them, each as the id of its document and
            its text ("bad", if any). With a new one, the line comes within a minute.
    """

    KIND = "spread"
    milliseconds: LogHistogram = field(default_factory=LogHistogram)
    prompt_tokens: LogHistogram = field(default_factory=LogHistogram)
    completion_tokens: LogHistogram = field(default_factory=LogHistogram)
    examples: dict[str, list[list[str]]] = field(default_factory=dict)

    def to_json(self) -> Json:
        histograms: Json = {
            key: sorted(getattr(self, name).items()) for key, name in HISTOGRAMS.items()
        }
        if self.examples:
            histograms["bad"] = self.examples
        return histograms

    @classmethod
    def read(cls, data: Json) -> RequestHistograms:
        spread = cls(examples=data.get("bad", {}))
        for key, name in HISTOGRAMS.items():
            setattr(spread, name, LogHistogram(dict(data[key])))
        return spread


HISTOGRAMS = {"ms": "milliseconds", "pt": "prompt_tokens", "ct": "completion_tokens"}
"""The histograms of ``RequestHistograms`` by their keys."""


@dataclass(slots=True, kw_only=True)
class AttemptEnd(_HistoryRecord):
    """Killed attempts have no such line.

    Attributes:
        what: "" if done; the cause of a stop, such as "SIGTERM"; or the error, without secrets.
    """

    KIND = "end"
    why: EndWhy
    what: str = ""


@dataclass(slots=True, kw_only=True)
class ReplayResult(_HistoryRecord):
    KIND = "replay"
    what: str


Record = AttemptStart | ServerEvent | ProgressRecord | RequestHistograms | AttemptEnd | ReplayResult
_KINDS: dict[str, type[Record]] = {
    kind.KIND: kind
    for kind in (
        AttemptStart,
        ServerEvent,
        ProgressRecord,
        RequestHistograms,
        AttemptEnd,
        ReplayResult,
    )
}


def parse_line(line: bytes) -> Record | None:
    body = verified_body(line)
    if body is None:
        return None
    try:
        data = orjson.loads(body)
        record = _KINDS[data["k"]].read(data)
        record.at = data["at"]
        record.attempt = data["n"]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return record


def is_progress_line(line: bytes) -> bool:
    return line.startswith(b'"k":"progress"', BODY_AT)


def _is_event(line: bytes) -> bool:
    events = (b'"k":"start"', b'"k":"server"', b'"k":"end"', b'"k":"replay"')
    return line.startswith(events, BODY_AT)


def _latest_progress(lines: Sequence[bytes]) -> Iterator[ProgressRecord]:
    for line in reversed(lines):
        if is_progress_line(line):
            record = parse_line(line)
            if isinstance(record, ProgressRecord):
                yield record


# the log -----------------------------------------------------------------------------------------

MAX_BYTES = 900_000


class HistoryLog:
    """``history.jsonl`` of one rank, for the storage thread alone. Opening it cuts off a torn tail.

    Attributes:
        earlier: the last progress line in the file.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        lines = last_lines(path, None)
        self.earlier = next(_latest_progress(lines), ProgressRecord())
        if sum(map(len, lines)) > MAX_BYTES:
            lines = downsampled(lines, MAX_BYTES // 2)
            files.disk.replace(path, b"".join(lines))
        self.file = files.AppendFile(path, sum(map(len, lines)))
        self._is_torn = False

    def append(self, records: Iterable[Record]) -> None:
        """One write. Sets the records' attempt."""
        lines = [b"\n"] if self._is_torn else []
        for record in records:
            record.attempt = self._attempt
            lines.append(record.to_line())
        self._is_torn = True  # unless all of it is written
        self.file.append(b"".join(lines))
        self._is_torn = False


def downsampled(lines: Sequence[bytes], max_bytes: int) -> list[bytes]:
    selected = list(lines)
    while sum(map(len, selected)) > max_bytes:
        fewer = _sampled(selected, 2)
        if len(fewer) == len(selected):  # too many events
            fewer = selected[(len(selected) + 1) // 2 :]
        selected = fewer
    return selected


def _sampled(lines: Iterable[bytes], step: int) -> list[bytes]:
    selected = []
    for is_event, group in groupby(lines, _is_event):
        selection = list(group)
        if not is_event:
            minutes = [line for line in selection if is_progress_line(line)]
            histograms = [line for line in selection if not is_progress_line(line)]
            sampled = {*minutes[::step], *minutes[-1:], *histograms[-1:]}
            selection = [line for line in selection if line in sampled]
        selected += selection
    return selected


# reading -----------------------------------------------------------------------------------------

RATE_SECONDS = 300.0
"""Rates are those of so many last seconds, at least."""


@dataclass(slots=True)
class AttemptSummary:
    """An attempt.

    Attributes:
        ended: time of its end line; None: it still runs, or was killed.
        why: "done", "stopped", "error", or "" without an end line.
        cut_off: requests whose answers were not waited for, and that may be paid.
        in_flight: requests in flight at its last progress line; None: there is no progress line.
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
        if isinstance(record, AttemptStart):
            self.host = record.host
            self.pid = record.pid
            self.slurm_job = record.job
            self.version = record.v
            self.started = min(self.started, record.at)
        elif isinstance(record, AttemptEnd):
            self.ended = record.at
            self.why = record.why
            self.what = record.what
            self.in_flight = self.in_flight or 0  # an attempt that could write its end had none
        elif isinstance(record, ProgressRecord):
            if record.own.sent:
                self.in_flight = record.in_flight
            self.own = record.own.documents
            self.counted_at = record.at
            work = record.own
            self.cut_off = max(0, work.sent - work.requests - work.failed - work.lost)

    @property
    def has_sums(self) -> bool:
        """Whether its last progress line counts all that it did: it was written with the end line.
        A full disk may have no room for it, and room for the end line.
        """
        return self.ended == self.counted_at

    @property
    def outcome(self) -> str:
        if self.ended is None:
            return "killed"
        cause = self.what.partition("\n")[0]
        if self.why == "stopped" and cause:
            return f"stopped by {cause}"
        return cause or self.why

    @property
    def place(self) -> str:
        if self.slurm_job:
            return f"{self.host}, Slurm job {self.slurm_job}"
        return self.host


@dataclass(slots=True)
class History:
    """The parsed part of a rank's history.

    Attributes:
        spreads: the last line of each attempt, over all its requests.
        then: the progress line of the newest attempt that is ``RATE_SECONDS`` older than its last
            one, or as old as lines reach; None if the attempt has ended.
    """

    attempts: list[AttemptSummary] = field(default_factory=list)
    minutes: list[ProgressRecord] = field(default_factory=list)
    spreads: list[RequestHistograms] = field(default_factory=list)
    servers: list[ServerEvent] = field(default_factory=list)
    then: ProgressRecord | None = None

    @property
    def last(self) -> ProgressRecord | None:
        return next(reversed(self.minutes), None)

    @property
    def last_at(self) -> float | None:
        return max((attempt.last_seen for attempt in self.attempts), default=None)

    @property
    def seconds(self) -> float:
        if self.then is None or self.last is None:
            return 0.0
        return self.last.at - self.then.at

    def rates(self) -> Processed:
        if self.then is None or self.last is None or self.seconds <= 0:
            return Processed()
        done = max(0, self.last.position.done - self.then.position.done)
        return (self.last.own - self.then.own).processed(done) * (1 / self.seconds)


def read_latest(path: Path) -> ProgressRecord:
    return next(_latest_progress(last_lines(path, 1 << 15)), ProgressRecord())


def read_history(path: str, max_lines: int = 0) -> History:
    """Reads a ``history.jsonl``. A missing file has no attempts.

    Args:
        max_lines: progress lines to parse besides the first and the last line of each attempt; 0:
            only the last lines.
    """
    # A long attempt's start, with the attempts before it, is at the beginning.
    lines = last_lines(path, None if max_lines else 1 << 19, MAX_BYTES)
    history = History()
    attempts: dict[int, AttemptSummary] = {}
    spreads = {}
    step = len(lines) // max_lines + 1 if max_lines else len(lines) + 1
    for line in _sampled(lines, step):
        record = parse_line(line)
        if record is None:
            continue
        first = AttemptSummary(record.attempt, record.at, record.at)
        attempts.setdefault(record.attempt, first).take(record)
        if isinstance(record, AttemptStart):
            history.servers = []
        elif isinstance(record, ProgressRecord):
            history.minutes.append(record)
        elif isinstance(record, RequestHistograms):
            spreads[record.attempt] = record
        elif isinstance(record, ServerEvent):
            history.servers.append(record)
    history.spreads = [*spreads.values()]
    history.attempts = [attempts[number] for number in sorted(attempts)]
    for attempt in history.attempts[:-1]:
        attempt.without_a_word = attempt.ended is None
    if history.last is not None and history.attempts[-1].ended is None:
        history.then = _earlier_progress(lines, history.attempts[-1].number, history.last)
    return history


def _earlier_progress(lines: Sequence[bytes], attempt: int, last: ProgressRecord) -> ProgressRecord:
    earlier = last
    for record in _latest_progress(lines):
        # An outage is no time at work.
        if record.attempt != attempt or (record.silence.lasts and not last.silence.lasts):
            break
        earlier = record
        if last.at - earlier.at >= RATE_SECONDS - 1:
            break
    return earlier
