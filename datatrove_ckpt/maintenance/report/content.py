"""What the page shows, as plain values. ``page`` draws them and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

ChunkState = Literal["done", "dead", "open", "damaged"]


@dataclass(frozen=True)
class Figure:
    """One number of the summary.

    Attributes:
        key: its name in ``status --json``; "" if it is not there.
        value: the exact number; None: not known.
        text: as people read it.
        note: a few words below it.
        tone: "" or "good", "warning", "critical".
    """

    key: str
    label: str
    value: float | None
    text: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Timeline:
    """The time axis that all charts over time share.

    Attributes:
        edges: Unix seconds, ascending: where each interval starts, and where the last one ends.
        interruptions: number of attempts that ended unfinished, for each interval.
    """

    edges: Sequence[float]
    interruptions: Sequence[int]

    @property
    def intervals(self) -> int:
        return len(self.edges) - 1


@dataclass(frozen=True)
class Series:
    """One line or one colour. ``values``: one for each interval; None: nothing is known of it."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class RankRow:
    """One rank.

    Attributes:
        key: "12", or "retry-00001, 12".
        state: as ``status`` names it.
        reason: why it needs attention; "" if it does not.
        rate: documents per second while it worked; None: not known.
        share: of its input, 0 to 1; None: not known.
        slow: far slower than the others.
        chunks: (first, end, state) of neighbouring chunks in one state, ascending. "dead": done, with dead letters;
            "open": its journal has documents.
        expected_chunks: how many there will be; None: not known.
    """

    key: str
    state: str
    reason: str = ""
    documents: int = 0
    rate: float | None = None
    share: float | None = None
    attempts: int = 0
    slow: bool = False
    chunks: Sequence[tuple[int, int, ChunkState]] = ()
    expected_chunks: int | None = None


@dataclass(frozen=True)
class Interruption:
    """An attempt that ended before its rank was done, or those of several ranks that ended together.

    Attributes:
        rank: its name; of several, their number and names.
        at: Unix seconds of the (first) last sign of life.
        why: a few words.
        place: host and Slurm job.
        away: seconds until the next attempt; None: there is none yet.
        starting: seconds from then until servers were ready; None: not known.
        repeated: requests that had to be sent again; None: not known.
        ranks: how many ranks it interrupted. The other numbers are sums over them.
    """

    rank: str
    at: float
    why: str
    place: str = ""
    away: float | None = None
    starting: float | None = None
    repeated: int | None = None
    ranks: int = 1

    @property
    def seconds(self) -> float:
        """What it cost in time."""
        return (self.away or 0.0) + (self.starting or 0.0)


@dataclass(frozen=True)
class Part:
    """A part of a whole, such as the answers from the cache, or the dead letters with one cause."""

    name: str
    value: float


@dataclass(frozen=True)
class Histogram:
    """``bins``: (low, high, count), ascending; ``unit``: "s", "tokens"; ``note``: of how many."""

    title: str
    unit: str
    bins: Sequence[tuple[float, float, int]]
    note: str = ""

    @property
    def count(self) -> int:
        return sum(count for _, _, count in self.bins)


@dataclass(frozen=True)
class Content:
    """The whole page.

    Attributes:
        where: the checkpoint folder or mirror, as it was given.
        model: its name; "" if unknown.
        state: "finished", "running", ... for the pill beside the title.
        made_at: Unix seconds at which the state was read.
        age: what the reader must know about how old it is; "" if it is of now.
        missing: what could not be shown, and why.
    """

    where: str
    model: str
    state: str
    made_at: float
    version: str
    age: str = ""
    figures: Sequence[Figure] = ()
    costs: Sequence[Figure] = ()
    timeline: Timeline | None = None
    documents: Series | None = None
    document_rate: Series | None = None
    tokens: Sequence[Series] = ()
    errors: Sequence[Series] = ()
    ranks: Sequence[RankRow] = ()
    median_rate: float | None = None
    interruptions: Sequence[Interruption] = ()
    answers: Sequence[Part] = ()
    causes: Sequence[Part] = ()
    histograms: Sequence[Histogram] = ()
    settings: Sequence[tuple[str, str]] = ()
    identity: Sequence[tuple[str, str]] = ()
    missing: Sequence[str] = field(default_factory=list)
