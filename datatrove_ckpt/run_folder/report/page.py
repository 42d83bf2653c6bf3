"""One HTML page of figures, charts over time and tables. It holds its style, loads nothing and runs
no script.

Names of documents, ranks and errors are not trusted: text becomes markup in ``element`` alone,
which escapes it, and the page's own policy forbids scripts and requests.

``gather`` makes it of the state of a run and the histories of its ranks.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import groupby, pairwise
from pathlib import Path
from string import Template
from typing import Literal, NamedTuple

import numpy as np

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.history import AttemptSummary, Buckets, History, read_history
from datatrove_ckpt.checkpoint.identity import of_model
from datatrove_ckpt.checkpoint.layout import HISTORY
from datatrove_ckpt.common.formatting import figure, short
from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.run_folder.run_state import RankState, RunState
from datatrove_ckpt.run_folder.topics import age, progress_of, ranks_of, topics

_PROGRESS_LINES = 30_000
"""Lines about progress to read in sum.

More of them would cost seconds, and no screen could show them.
"""
_LEAST_LINES = 30  # of one rank
_MOST_LINES = 400
_MAX_ATTEMPTS = 30
_TONES: dict[str, Tone] = {
    "finished": "good",
    "running": "good",
    "damaged": "critical",
    "failed": "critical",
}


@dataclass
class _Rank:
    state: RankState
    history: History

    @property
    def runs(self) -> bool:
        return self.state.state == "running"

    @property
    def ended_early(self) -> list[AttemptSummary]:
        last = self.history.attempts[-1:] if self.runs else []
        return [
            attempt
            for attempt in self.history.attempts
            if attempt.why != "done" and attempt not in last
        ]


def gather(run: RunState) -> Page:
    states = [*run.ranks, *run.retries]
    lines = min(_MOST_LINES, max(_LEAST_LINES, _PROGRESS_LINES // max(1, len(states))))
    ranks = [_Rank(state, _history(state.folder / HISTORY, lines)) for state in states]
    ended = [
        (f"{one.state.root}/{one.state.rank}".lstrip("/"), attempt)
        for one in ranks
        for attempt in one.ended_early
    ]
    state = _overall(run)
    requests = sum(sums.done.requests for sums in (run.totals, run.retried))
    tables = (_attempts(ended), _spreads([one.history for one in ranks], requests))
    return Page(
        where=run.what,
        model=", ".join(
            dict.fromkeys(
                str(run.identity[name]) for name in run.identity if of_model(name) == "model"
            )
        ),
        state=state,
        tone=_TONES.get(state, "warning"),
        made_at=run.read_at,
        version=__version__,
        age=f"{age(run).capitalize()}.",
        sums=[("tasks", ranks_of(run)), ("input", progress_of(run)), *topics(run)],
        charts=list(_charts(ranks, run.read_at)),
        tables=[table for table in tables if table.rows],
    )


def _history(path: Path, most: int) -> History:
    """Returns the history, without attempts if it is damaged: ``status`` names the damage."""
    with suppress(StorageFailed):
        if path.is_file():
            return read_history(str(path), most)
    return History()


def _overall(run: RunState) -> str:
    if run.is_finished:
        return "finished"
    order = ("damaged", "running", "failed", "lost", "interrupted", "unfinished")
    return next((state for state in order if run.totals.states[state]), "unfinished")


# charts ------------------------------------------------------------------------------------------
#
# Between two lines of a history a sum grows evenly. Where no attempt ran, the rate is not known:
# what a killed attempt did after its last line is in no chart.


_MAX_INTERVALS = 160  # so many a screen can show


class OverTime:
    """All ranks on one time axis: how much their sums grew in each of its intervals.

    Args:
        first, last: Unix seconds.

    Attributes:
        edges: Unix seconds, ascending: where each interval starts, and where the last one ends.
    """

    def __init__(self, first: float, last: float) -> None:
        self.edges = np.linspace(first, last, int(min(_MAX_INTERVALS, last - first)) + 1)
        self._ran = np.zeros(len(self.edges) - 1)
        names = ("read", "prompt_tokens", "completion_tokens")
        self._grown = {name: np.zeros(len(self.edges) - 1) for name in names}

    def add(self, history: History, until: float | None = None) -> None:
        """Adds a rank. ``until``: the end time for an attempt that is still running."""
        spans = [[attempt.started, attempt.last_seen] for attempt in history.attempts]
        if until is not None and spans:
            spans[-1][1] = max(spans[-1][1], until)
        for start, end in spans:
            self._ran += np.clip(
                np.minimum(self.edges[1:], end) - np.maximum(self.edges[:-1], start), 0.0, None
            )
        if not history.minutes:
            return
        # A clock that was set back does no harm.
        times = np.maximum.accumulate([line.at for line in history.minutes])
        for name, grown in self._grown.items():
            values = [getattr(line.documents, name) for line in history.minutes]
            grown += np.diff(np.interp(self.edges, times, np.maximum.accumulate(values)))

    def rate(self, name: str) -> list[float | None]:
        """Returns the growth of a number of ``DocumentCounts`` per second, in each interval."""
        rates: list[float | None] = []
        for value, ran in zip(self._grown[name] / np.diff(self.edges), self._ran, strict=True):
            if ran:
                rates.append(float(value))
            else:
                rates.append(None)
        return rates


def time_axis(histories: Iterable[History], now: float | None = None) -> OverTime | None:
    attempts = [attempt for history in histories for attempt in history.attempts]
    if not attempts:
        return None
    first = min(attempt.started for attempt in attempts)
    last = max(attempt.last_seen for attempt in attempts)
    return OverTime(first, max(last, now or 0.0, first + 1.0))


def _charts(ranks: Sequence[_Rank], now: float) -> Iterator[Chart]:
    until = [now for one in ranks if one.runs]
    time = time_axis([one.history for one in ranks], *until[:1])
    if time is None:
        return
    for one in ranks:
        if not one.state.root:  # retries read documents that were read before: they are not summed
            time.add(one.history, now if one.runs else None)
    edges = time.edges.tolist()
    yield Chart("Documents per second", edges, {"documents per second": time.rate("read")})
    tokens = {
        "prompt": time.rate("prompt_tokens"),
        "completion": time.rate("completion_tokens"),
    }
    yield Chart("Tokens per second", edges, tokens)


def _attempts(ended: Sequence[tuple[str, AttemptSummary]]) -> Table:
    newest = sorted(ended, key=lambda pair: pair[1].last_seen)[-_MAX_ATTEMPTS:]
    note = (
        "Killed: kill -9, out of memory, or a node that is gone. In flight: requests that were "
        "sent again."
    )
    if len(newest) < len(ended):
        note += f" These are the last {len(newest)} of {len(ended)}."
    columns = (
        "task",
        "started",
        "last sign of life",
        "how it ended",
        "where",
        "in flight#",
    )
    rows = []
    for rank, one in newest:
        times = (clock(one.started), clock(one.last_seen))
        in_flight = "not known"
        if one.in_flight is not None:
            in_flight = figure(one.in_flight)
        rows.append([rank, *times, one.how_it_ended, one.place, in_flight])
    return Table("Attempts that ended early", columns, rows, note)


def _spreads(histories: Sequence[History], requests: int) -> Table:
    """Latency and tokens of all requests that servers answered, from the histograms of each
    attempt.

    ``requests``: of all documents. Those of the last minutes before a kill are in no histogram.
    """
    found = [spread for history in histories for spread in history.spreads]
    kinds = {
        "latency, ms": "milliseconds",
        "prompt tokens": "prompt_tokens",
        "completion tokens": "completion_tokens",
    }
    rows = []
    counted = 0
    for kind, name in kinds.items():
        buckets = Buckets(sum((Counter(getattr(one, name)) for one in found), Counter()))
        number = sum(buckets.values())
        if number:
            counted = max(counted, number)
            limits = [_limit(buckets, share * number) for share in (0.5, 0.9, 0.99, 1.0)]
            rows.append([kind, *map(figure, limits)])
    note = (
        f"{figure(counted)} of {figure(requests)} requests; numbers are rounded up, by a fifth "
        "at most."
    )
    return Table(
        "Requests",
        ("", "50 % at most#", "90 % at most#", "99 % at most#", "all at most#"),
        rows,
        note,
    )


def _limit(buckets: Buckets, number: float) -> float:
    seen = 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= number:
            break
    return Buckets.lower(bucket + 1)


_MAX_NAME = 160
_MAX_CELL = 4000

Tone = Literal["good", "warning", "critical"]
Value = str | float | None
"""An attribute's value; None leaves the attribute out."""


class Chart(NamedTuple):
    """Lines over time, all in one unit.

    Attributes:
        edges: Unix seconds, ascending: where each interval starts, and where the last one ends.
        lines: for each name a value for each interval; None: not known.
    """

    title: str
    edges: Sequence[float]
    lines: Mapping[str, Sequence[float | None]]


class Table(NamedTuple):
    """A column whose title ends with "#" is of numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Page(NamedTuple):
    """The whole page.

    Attributes:
        where: the checkpoint folder or mirror, as it was given.
        made_at: Unix seconds at which the state was read.
        age: how old it is.
        sums: what ``status`` says of each topic.
    """

    where: str
    model: str
    state: str
    tone: Tone
    made_at: float
    version: str
    age: str = ""
    sums: Sequence[tuple[str, str]] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()

    def html(self) -> str:
        as_of = f", as of {clock(self.made_at)}"
        topics = (
            element("div", element("dt", topic), element("dd", text)) for topic, text in self.sums
        )
        parts = {
            "title": escaped(f"{self.model or 'run'}: {self.state}, {shortened(self.where, 80)}"),
            "name": name(self.model or self.where),
            "state": element("span", self.state, class_=f"pill {self.tone}"),
            "about": element("p", name(self.where, 400), f"{as_of}. {self.age}"),
            "sums": element("dl", *topics, class_="sums"),
            "sections": joined([*map(_chart, self.charts), *map(_table, self.tables)]),
            "footer": escaped(f"Written by datatrove-ckpt {self.version}{as_of}."),
        }
        template = files(__package__ or "").joinpath("page.html").read_text(encoding="utf-8")
        return Template(template).substitute(parts)


def _table(table: Table) -> Markup:
    kinds = ["n" if column.endswith("#") else None for column in table.columns]
    heads = zip(table.columns, kinds, strict=True)
    lines = [
        element("tr", *(element("th", head.removesuffix("#"), class_=kind) for head, kind in heads))
    ]
    for row in table.rows:
        pairs = zip(row, kinds, strict=True)
        cells = (
            element("td", cell if kind else name(cell, _MAX_CELL), class_=kind)
            for cell, kind in pairs
        )
        lines.append(element("tr", *cells))
    body = element("div", element("table", *lines), class_="table")
    note = element("p", table.note) if table.note else ""
    return element("section", element("h2", table.title), note, body, class_="wide")


# charts: an invisible column above each interval has a tooltip with the values, without a script
# --------

_WIDTH = 508
_HEIGHT = 210
_TOP = 10
_LEFT = 52
_RIGHT = 14
_FLOOR = 182


def _chart(chart: Chart) -> Markup:
    edges = chart.edges
    known = (value for values in chart.lines.values() for value in values if value is not None)
    marks = ticks(max(known, default=0.0))

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _RIGHT - _LEFT) * (at - edges[0]) / (edges[-1] - edges[0])

    def y(value: float) -> float:
        return _FLOOR - (_FLOOR - _TOP) * value / marks[-1]

    parts: list[Markup] = []
    for value in marks:
        kind = "grid" if value else "axis"
        parts.append(
            element("path", d=f"M{_LEFT} {number(y(value))}H{_WIDTH - _RIGHT}", class_=kind)
        )
        parts.append(element("text", short(value), x=_LEFT - 8, y=y(value) + 4, text_anchor="end"))
    for at, anchor in ((edges[0], "start"), (edges[-1], "end")):
        parts.append(element("path", d=f"M{number(x(at))} {_FLOOR}v5", class_="axis"))
        parts.append(element("text", clock(at), x=x(at), y=_FLOOR + 20, text_anchor=anchor))
    middles = [x((low + end) / 2) for low, end in pairwise(edges)]
    for index, values in enumerate(chart.lines.values()):
        places = [
            None if value is None else (at, y(value))
            for at, value in zip(middles, values, strict=True)
        ]
        parts.append(element("path", d=_line(places), class_=f"line s{index}"))
    for index, (low, end) in enumerate(pairwise(edges)):
        lines = [clock(low)]
        lines += [
            f"{figure(values[index] or 0)} {line}"
            for line, values in chart.lines.items()
            if values[index]
        ]
        title = element("title", "\n".join(lines))
        parts.append(
            element(
                "rect", title, x=x(low), y=_TOP, width=x(end) - x(low), height=_FLOOR, class_="hit"
            )
        )
    keys = [
        element("span", element("i", class_=f"key s{index}"), line)
        for index, line in enumerate(chart.lines)
    ]
    drawing = element(
        "svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=chart.title
    )
    return element(
        "section", element("h2", chart.title), element("div", *keys, class_="legend"), drawing
    )


def _line(places: Iterable[tuple[float, float] | None]) -> str:
    parts = []
    for known, run in groupby(places, key=bool):
        if known:
            shown = [f"{number(place[0])} {number(place[1])}" for place in run if place]
            # A lone value is a line of length 0, whose round ends show as a dot.
            parts.append(f"M{shown[0]}L{' '.join(shown[1:] or shown)}")
    return "".join(parts)


def ticks(high: float) -> list[float]:
    if not 0 < high < math.inf:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(high / 5))
    step = next(
        power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 5 >= high * (1 - 1e-9)
    )
    return [step * index for index in range(math.ceil(high / step - 1e-9) + 1)]


def clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


# Control characters, and those that turn the direction of the text around them.
_UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


class Markup(str):
    """Text that is markup already. Only this module makes it."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: Value) -> Markup:
    """One element. An underscore in an attribute's name stands for a hyphen, and one at its end is
    left out.

    ``Markup`` among the children is taken as it is; any other text is escaped.
    """
    given = [
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return Markup(f"<{tag}{''.join(given)}>{joined(children)}</{tag}>")


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return escaped(value)
    return number(value)


def joined(children: Iterable[str]) -> Markup:
    return Markup(
        "".join(child if isinstance(child, Markup) else escaped(child) for child in children)
    )


def escaped(text: str) -> Markup:
    """Escapes a text; characters that no page may hold become U+FFFD."""
    return Markup(escape(_UNSHOWN.sub("\ufffd", text)))


def name(text: str, limit: int = _MAX_NAME) -> Markup:
    """Returns a foreign name, isolated from the direction of the text around it."""
    return element("bdi", shortened(text, limit))


def shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def number(value: float) -> str:
    """Formats with at most one decimal, which keeps large pages small."""
    return f"{value:.1f}".removesuffix(".0")
