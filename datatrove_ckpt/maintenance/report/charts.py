"""The drawings of the page, as SVG: lines over time, and strips, which are bars in the rows of tables.

Each interval of a chart has an invisible column above it, whose tooltip names the values: no script is needed for that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from datatrove_ckpt.formatting import plural
from datatrove_ckpt.maintenance.report.content import Series, Timeline
from datatrove_ckpt.maintenance.report.markup import Markup, element, number
from datatrove_ckpt.maintenance.report.scales import Scale, clock, compact, grouped, ticks, time_ticks

WIDE, HALF = 1040, 508
"""Widths of charts, in the units of their view box: those of a laptop's pixels."""
_HEIGHT = 210
_TOP, _LEFT, _RIGHT, _FLOOR = 10, 52, 14, 182
_DATE_WIDTH, _CLOCK_WIDTH = 112, 60
_STRIP = 150  # width of a strip


@dataclass(frozen=True)
class _Frame:
    """Where a chart's axes are."""

    timeline: Timeline
    width: int
    high: float

    @property
    def x(self) -> Scale:
        return Scale(self.timeline.edges[0], self.timeline.edges[-1], _LEFT, self.width - _RIGHT)

    @property
    def y(self) -> Scale:
        return Scale(0, self.high, _FLOOR, _TOP)


def line_chart(timeline: Timeline, series: Sequence[Series], what: str, width: int = WIDE) -> Markup:
    """One line for each series, which all have the same unit.

    Args:
        what: the unit, for tooltips and for who can't see the drawing.
    """
    axis = ticks(max((value for one in series for value in one.values if value is not None), default=0.0))
    frame = _Frame(timeline, width, axis[-1])
    parts = [*_axes(frame, axis), *_interruptions(frame)]
    places = [frame.x((low + end) / 2) for low, end in zip(timeline.edges, timeline.edges[1:], strict=False)]
    for index, one in enumerate(series):
        parts.append(element("path", d=_line(frame, places, one.values), class_=f"line s{index}"))
    parts += _tooltips(frame, series, what)
    return element("svg", *parts, viewBox=f"0 0 {width} {_HEIGHT}", role="img", aria_label=what)


def legend(names: Iterable[str], kinds: Iterable[str]) -> Markup:
    """What the colours mean."""
    items = (element("span", element("i", class_=f"key {kind}"), name) for name, kind in zip(names, kinds, strict=True))
    return element("div", *items, class_="legend")


def strip(pieces: Iterable[tuple[float, float, str]], full: float) -> Markup:
    """A bar for a row of a table.

    Args:
        pieces: where each starts, where it ends, and its colour. Those of one colour are one path, because a page of a
            thousand ranks must stay small.
        full: the end of the longest bar beside it.
    """
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for start, end, kind in pieces:
        if end > start:
            left = _STRIP * start / full
            paths[kind].append(f"M{number(left)} 5H{number(max(_STRIP * end / full, left + 1))}")
    drawn = (element("path", d="".join(found), class_=kind) for kind, found in paths.items())
    return element("svg", *drawn, viewBox=f"0 0 {_STRIP} 10", aria_hidden="true")  # the number stands beside it


def _axes(frame: _Frame, values: Sequence[float]) -> list[Markup]:
    parts = []
    for value in values:
        y = frame.y(value)
        kind = "axis" if value == 0 else "grid"
        parts.append(element("path", d=f"M{_LEFT} {number(y)}H{frame.width - _RIGHT}", class_=kind))
        parts.append(element("text", compact(value), x=_LEFT - 8, y=y + 4, text_anchor="end"))
    edges = frame.timeline.edges
    taken = 0.0
    for at, when in time_ticks(edges[0], edges[-1], max(2, frame.width // 120)):
        x = frame.x(at)
        parts.append(element("path", d=f"M{number(x)} {_FLOOR}v5", class_="axis"))
        wide = _DATE_WIDTH if "," in when else _CLOCK_WIDTH
        if x - wide / 2 >= taken and x + wide / 2 <= frame.width:
            parts.append(element("text", when, x=x, y=_FLOOR + 20, text_anchor="middle"))
            taken = x + wide / 2
    return parts


def _interruptions(frame: _Frame) -> list[Markup]:
    """A triangle below the axis for each interval with interruptions."""
    edges = frame.timeline.edges
    cut = (index for index, count in enumerate(frame.timeline.interruptions) if count)
    places = [number(frame.x((edges[index] + edges[index + 1]) / 2)) for index in cut]
    return [element("path", d="".join(f"M{x} {_FLOOR + 1}l-4 7h8z" for x in places), class_="cut")] if places else []


def _line(frame: _Frame, places: Sequence[float], values: Sequence[float | None]) -> str:
    points = [(x, frame.y(value)) if value is not None else None for x, value in zip(places, values, strict=True)]
    parts = []
    for known, run in groupby(points, key=bool):
        if known:
            shown = [f"{number(point[0])} {number(point[1])}" for point in run if point]
            # A lone value is a line of no length, whose round ends show as a dot.
            parts.append(f"M{shown[0]}L{' '.join(shown[1:] or shown)}")
    return "".join(parts)


def _tooltips(frame: _Frame, series: Sequence[Series], what: str) -> list[Markup]:
    parts = []
    edges = frame.timeline.edges
    for index in range(frame.timeline.intervals):
        known = [(one.name, one.values[index]) for one in series]
        lines = [clock(edges[index])]
        lines += [f"{grouped(value)} {what if len(series) == 1 else name}" for name, value in known if value]
        if count := frame.timeline.interruptions[index]:
            lines.append(plural(count, "interruption"))
        if len(lines) == 1 and all(value is None for _, value in known):
            continue
        left, right = frame.x(edges[index]), frame.x(edges[index + 1])
        title = element("title", "\n".join(lines))
        parts.append(element("rect", title, x=left, y=_TOP, width=right - left, height=_FLOOR - _TOP + 8, class_="hit"))
    return parts
