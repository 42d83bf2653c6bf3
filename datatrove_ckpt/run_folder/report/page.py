"""One HTML page of figures, charts over time and tables. It holds its style, loads nothing and runs
no script.

Names of documents, ranks and errors are not trusted: text becomes markup in ``element`` alone,
which escapes it, and the page's own policy forbids scripts and requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import groupby, pairwise
from string import Template
from typing import Literal, NamedTuple

from datatrove_ckpt.common.formatting import figure, short

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
