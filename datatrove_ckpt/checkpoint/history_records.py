"""The records of ``history.jsonl``: what the attempts of a rank did, one line per event.

Recovery does not read them, so damage costs a line and never the run. Each line has a checksum
(``lines``) and is a JSON object with the keys "k" (kind), "at" (Unix seconds) and "n" (number of
the attempt, from 1: the owner's fence in ``run.json``).

    k           keys
    start       host, pid, job (of Slurm, or null), v (our version)
    server      what, name, url (without secrets, or null), why
    progress    s, d, c, all, own, err, own_err, tier, own_tier, q, w, out, pos, skip: see
                ``Progress``
    spread      ms, pt, ct: see ``Spread``
    end         why, what

Readers ignore keys and kinds of later releases.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self

import orjson

from datatrove_ckpt.checkpoint.clock import NO_SECONDS, Seconds
from datatrove_ckpt.checkpoint.lines import BODY_AT, Json, seal, unseal
from datatrove_ckpt.checkpoint.numbers import NUMBERS, DocumentCounts, WorkCounts
from datatrove_ckpt.checkpoint.skipped import SkippedLines

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
_LASTS = 30.0  # seconds
_PROGRESS = b'"k":"progress"'


class InputPosition(NamedTuple):
    """How much of its input a rank has read.

    ``done``, ``total``: in ``unit``. ``total`` is None if the input's size is not known; ``unit``
    is None if not even the position is, and then ``done`` is 0. ``tasks``: ranks from this one on
    have no input; None if it is not known.
    """

    done: int = 0
    total: int | None = None
    unit: Literal["bytes", "rows"] | None = None
    tasks: int | None = None

    @property
    def share(self) -> float | None:
        """From 0 to 1; None if it is not known. An empty input is done."""
        if self.unit is None or self.total is None:
            return None
        if not self.total:
            return 1.0
        return min(1.0, self.done / self.total)


class Silence(NamedTuple):
    """How long no request has been answered, and after how long the rank stops because of that; 0:
    no request has failed.

    ``unreachable``: no server can be reached. ``model``: whose servers, if there are several
    models.
    """

    seconds: float = 0.0
    patience: float = 0.0
    unreachable: bool = False
    model: str = ""

    @property
    def lasts(self) -> bool:
        """Whether people are told of it."""
        return self.seconds >= _LASTS

    def __str__(self) -> str:
        server = "the server"
        if self.model:
            server = f"{server} of {self.model}"
        if self.unreachable:
            return f"{server} is unreachable"
        return f"{server} gives no answers"


class Wait(NamedTuple):
    """What a rank waits for.

    ``quiet``: seconds since the last answer, or since the first server was ready. ``oldest``:
    seconds since the oldest request in flight was sent, and ``document`` the id of its document.
    ``all_started``: no document is left to be started.
    """

    quiet: float = 0.0
    oldest: float = 0.0
    document: str = ""
    all_started: bool = False

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        found = cls(*values)
        return found._replace(document=_text(found.document))


def _named_counts(counts: Json) -> Counter[str]:
    return Counter({_text(name): count for name, count in list(counts.items())[:_MAX_KINDS]})


@dataclass(slots=True, kw_only=True)
class _Record:
    """``at``: Unix seconds. ``attempt``: its number, from 1; 0 until the log writes the line.

    A kind of other keys than its fields has its own ``to_json`` and ``read``.
    """

    KIND: ClassVar[str]
    at: float = 0.0
    attempt: int = 0

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in self.__slots__}

    def to_line(self) -> bytes:
        head = {"k": self.KIND, "at": round(self.at, 3), "n": self.attempt}
        return seal(orjson.dumps(head | self.to_json()))

    @classmethod
    def read(cls, data: Json) -> Self:
        """Raises KeyError, TypeError or ValueError if the JSON object is another one."""
        return cls(**{name: data[name] for name in cls.__slots__ if name in data})


@dataclass(slots=True, kw_only=True)
class Start(_Record):
    """The start of an attempt, which has locked the rank and opened its checkpoint.

    Attributes:
        job: of Slurm, as its commands name it.
        v: version of this package.
    """

    KIND = "start"
    host: str
    pid: int
    job: str | None = None
    v: str = ""


@dataclass(slots=True, kw_only=True)
class ServerEvent(_Record):
    """Something happened to a server.

    Attributes:
        name: of the server within the rank, such as "0".
        url: without secrets.
        why: of a death, one line.
    """

    KIND = "server"
    what: ServerWhat
    name: str = ""
    url: str | None = None
    why: str = ""


@dataclass(slots=True, kw_only=True)
class Progress(_Record):
    """Where the rank stands: written at an attempt's start, after ten seconds, each minute, and at
    its end.

    Attributes:
        seconds: of all attempts ("s").
        documents: finished documents in commits and journals of all attempts, with their requests
            and tokens, cached answers included ("d"). Exact after any kills.
        chunks: committed chunks of all attempts ("c").
        total: what all attempts did ("all", "err" and "tier"), without the last minute of killed
            attempts.
        own: what this attempt did ("own", "own_err" and "own_tier").
        in_flight: requests at a server ("q", with the next two).
        waiting: requests that wait for a server, a free slot or their next attempt.
        in_work: documents.
        wait: for answers ("w").
        silence: of the servers ("out").
        position: how much of the input is done ("pos").
        skipped: lines of the input, over all attempts, that were no documents ("skip", if any).
    """

    KIND = "progress"
    seconds: Seconds = NO_SECONDS
    documents: DocumentCounts = field(default_factory=DocumentCounts)
    chunks: int = 0
    total: WorkCounts = field(default_factory=WorkCounts)
    own: WorkCounts = field(default_factory=WorkCounts)
    in_flight: int = 0
    waiting: int = 0
    in_work: int = 0
    wait: Wait = field(default_factory=Wait)
    silence: Silence = field(default_factory=Silence)
    position: InputPosition = field(default_factory=InputPosition)
    skipped: SkippedLines = field(default_factory=SkippedLines)

    def to_json(self) -> Json:
        found = {
            "s": list(self.seconds),
            "d": self.documents.numbers(),
            "c": self.chunks,
            "all": self.total.numbers(),
            "own": self.own.numbers(),
            "err": self.total.errors,
            "own_err": self.own.errors,
            "q": (self.in_flight, self.waiting, self.in_work),
            "w": list(self.wait),
            "out": list(self.silence if self.silence.model else self.silence[:3]),
            "pos": list(self.position),
        }
        if self.total.tiers:
            found |= {"tier": self.total.tiers, "own_tier": self.own.tiers}
        if self.skipped:
            found["skip"] = list(self.skipped)
        return found

    @classmethod
    def read(cls, data: Json) -> Progress:
        in_flight, waiting, in_work = data["q"]
        return cls(
            seconds=Seconds(*data["s"]),
            documents=DocumentCounts(*data["d"][: len(NUMBERS)]),
            chunks=data["c"],
            total=_work(data, "all", ""),
            own=_work(data, "own", "own_"),
            in_flight=in_flight,
            waiting=waiting,
            in_work=in_work,
            wait=Wait.from_json(data.get("w", ())),
            silence=Silence(*data["out"]),
            position=InputPosition(*data["pos"]),
            skipped=SkippedLines.from_json(data.get("skip", ())),
        )


def _work(data: Json, numbers: str, prefix: str) -> WorkCounts:
    errors = _named_counts(data[f"{prefix}err"])
    tiers = _named_counts(data.get(f"{prefix}tier", {}))
    return WorkCounts.from_json(data[numbers], errors, tiers)


class Buckets(dict[int, int]):
    """A histogram. Bucket 0 counts values below 1.

    Bucket b > 0 holds the values from ``lower(b)`` up to ``lower(b + 1)``, four buckets for each
    power of two.
    """

    def count(self, value: float, times: int = 1) -> None:
        bucket = 0
        if value >= 1:
            bucket = int(math.log2(value) * 4) + 1
        self[bucket] = self.get(bucket, 0) + times

    def count_all(self, values: Sequence[int]) -> int:
        """Adds values, equal ones at once. Returns their sum."""
        for value, times in Counter(values).items():
            self.count(value, times)
        return sum(values)

    @staticmethod
    def lower(bucket: int) -> float:
        if bucket <= 0:
            return 0.0
        return float(2.0 ** ((bucket - 1) / 4))


@dataclass(slots=True, kw_only=True)
class Spread(_Record):
    """The requests of this attempt that servers answered, as histograms, every ten minutes and at
    the end.

    Attributes:
        milliseconds: from sending to the answer ("ms").
        prompt_tokens, completion_tokens: of each answer ("pt", "ct").
    """

    KIND = "spread"
    milliseconds: Buckets = field(default_factory=Buckets)
    prompt_tokens: Buckets = field(default_factory=Buckets)
    completion_tokens: Buckets = field(default_factory=Buckets)

    def to_json(self) -> Json:
        found = {"ms": self.milliseconds, "pt": self.prompt_tokens, "ct": self.completion_tokens}
        return {name: sorted(buckets.items()) for name, buckets in found.items()}

    @classmethod
    def read(cls, data: Json) -> Spread:
        return cls(
            milliseconds=Buckets(data["ms"]),
            prompt_tokens=Buckets(data["pt"]),
            completion_tokens=Buckets(data["ct"]),
        )


@dataclass(slots=True, kw_only=True)
class End(_Record):
    """The end of an attempt. Killed attempts have no such line.

    Attributes:
        what: "" if done; the cause of a stop, such as "SIGTERM"; or the error, without secrets.
    """

    KIND = "end"
    why: EndWhy
    what: str = ""


Record = Start | ServerEvent | Progress | Spread | End
_KINDS: dict[str, type[Record]] = {
    kind.KIND: kind for kind in (Start, ServerEvent, Progress, Spread, End)
}


def parse_line(line: bytes) -> Record | None:
    """Returns the record in a line; None if it is damaged, or of an unknown kind."""
    body = unseal(line)
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
    return line.startswith(_PROGRESS, BODY_AT)


def _text(text: str) -> str:
    """Returns a text of a document or server without line breaks and control characters."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else " " for character in text)
