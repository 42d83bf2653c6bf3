"""Charts over time, as SVG: lines, and bars in a stack. All share one time axis and the marks of interruptions.

Each interval has an invisible column above it, whose tooltip names the values: the page needs no script for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from datatrove_ckpt.formatting import plural
from datatrove_ckpt.maintenance.report.content import Series, Timeline
from datatrove_ckpt.maintenance.report.markup import Markup, element, number
from datatrove_ckpt.maintenance.report.scales import Scale, clock, compact, grouped, ticks, time_ticks

WIDE, HALF, THIRD = 1040, 508, 322
"""Widths of charts, in the units of their view box: those of a laptop's pixels."""
_TOP, _BOTTOM, _LEFT, _RIGHT = 10, 28, 52, 14
_MAX_RULES = 12  # interruptions that get a line through the whole chart
_DATE_WIDTH, _CLOCK_WIDTH = 112, 60


@dataclass(frozen=True)
class Frame:
    """Where a chart's axes are."""

    timeline: Timeline
    width: int
    height: int
    high: float

    @property
    def x(self) -> Scale:
        return Scale(self.timeline.edges[0], self.timeline.edges[-1], _LEFT, self.width - _RIGHT)

    @property
    def y(self) -> Scale:
        return Scale(0, self.high, self.height - _BOTTOM, _TOP)

    @property
    def floor(self) -> int:
        return self.height - _BOTTOM


def svg(width: float, height: float, label: str, *children: str) -> Markup:
    """A drawing that is as wide as its place. ``label`` says what it is to who can't see it."""
    box = f"0 0 {number(width)} {number(height)}"
    return element("svg", *children, viewBox=box, role="img", aria_label=label)


def label(x: float, y: float, content: str, kind: str = "t", anchor: str = "start") -> Markup:
    """A text at a place."""
    return element("text", content, x=x, y=y, class_=kind, text_anchor=None if anchor == "start" else anchor)


def line_chart(
    timeline: Timeline, series: Sequence[Series], what: str, width: int = WIDE, height: int = 230, filled: bool = False
) -> Markup:
    """One line for each series, which all have the same unit.

    Args:
        what: the unit, for tooltips and for who can't see the drawing.
        filled: with the area below the line; for one series.
    """
    high = max((value for one in series for value in one.values if value is not None), default=0.0)
    frame = Frame(timeline, width, height, ticks(high)[-1])
    parts = [*_axes(frame, ticks(high)), *_interruptions(frame)]
    middles = [(low + end) / 2 for low, end in zip(timeline.edges, timeline.edges[1:], strict=False)]
    places = [frame.x(at) for at in middles]
    for index, one in enumerate(series):
        if filled:
            parts.append(element("path", d=_area(frame, places, one.values), class_=f"area s{index}"))
        parts.append(element("path", d=_line(frame, places, one.values), class_=f"line l{index}"))
    return svg(width, height, what, *parts, *_tooltips(frame, series, what))


def stacked_bars(
    timeline: Timeline, series: Sequence[Series], what: str, width: int = WIDE, height: int = 200
) -> Markup:
    """The series of each interval above each other, the first one lowest."""
    sums = [sum(one.values[index] or 0 for one in series) for index in range(timeline.intervals)]
    axis = ticks(max(sums, default=0), whole=True)
    frame = Frame(timeline, width, height, axis[-1])
    parts = [*_axes(frame, axis), *_interruptions(frame)]
    below = [0.0] * timeline.intervals
    for index, one in enumerate(series):
        steps = []
        for place, value in enumerate(one.values):
            if value:
                left, right = frame.x(timeline.edges[place]), frame.x(timeline.edges[place + 1])
                bottom, top = frame.y(below[place]), frame.y(below[place] + value)
                width_ = max(right - left - 1, 0.8)
                steps.append(f"M{number(left)} {number(bottom)}V{number(top)}h{number(width_)}V{number(bottom)}z")
                below[place] += value
        parts.append(element("path", d="".join(steps), class_=f"bar s{index}"))
    return svg(width, height, what, *parts, *_tooltips(frame, series, what))


def legend(names: Sequence[str], kinds: Sequence[str]) -> Markup:
    """What the colours mean."""
    items = (element("span", element("i", class_=f"key {kind}"), name) for name, kind in zip(names, kinds, strict=True))
    return element("div", *items, class_="legend")


def _axes(frame: Frame, values: Sequence[float]) -> list[Markup]:
    parts = []
    for value in values:
        y = frame.y(value)
        kind = "axis" if value == 0 else "grid"
        parts.append(element("path", d=f"M{_LEFT} {number(y)}H{frame.width - _RIGHT}", class_=kind))
        parts.append(label(_LEFT - 8, y + 4, compact(value), "t num", "end"))
    edges = frame.timeline.edges
    taken = 0.0
    for at, when in time_ticks(edges[0], edges[-1], max(2, frame.width // 120)):
        x = frame.x(at)
        parts.append(element("path", d=f"M{number(x)} {frame.floor}v5", class_="axis"))
        wide = _DATE_WIDTH if "," in when else _CLOCK_WIDTH
        if x - wide / 2 >= taken and x + wide / 2 <= frame.width:
            parts.append(label(x, frame.floor + 20, when, "t", "middle"))
            taken = x + wide / 2
    return parts


def _interruptions(frame: Frame) -> list[Markup]:
    """A triangle below the axis for each interval with interruptions; a few of them get a line, too."""
    found = [(index, count) for index, count in enumerate(frame.timeline.interruptions) if count]
    if not found:
        return []
    edges = frame.timeline.edges
    places = [number(frame.x((edges[index] + edges[index + 1]) / 2)) for index, _ in found]
    parts = [element("path", d="".join(f"M{x} {frame.floor + 1}l-4 7h8z" for x in places), class_="cut")]
    if len(found) <= _MAX_RULES:
        parts.append(element("path", d="".join(f"M{x} {_TOP}V{frame.floor}" for x in places), class_="rule"))
    return parts


def _runs(values: Sequence[float | None]) -> list[list[int]]:
    """The indices of neighbouring values that are known."""
    groups = groupby(range(len(values)), key=lambda index: values[index] is not None)
    return [list(run) for known, run in groups if known]


def _line(frame: Frame, places: Sequence[float], values: Sequence[float | None]) -> str:
    parts = []
    for run in _runs(values):
        points = [f"{number(places[index])} {number(frame.y(values[index] or 0.0))}" for index in run]
        # A lone value is a line of no length, whose round ends show as a dot.
        parts.append(f"M{points[0]}L{' '.join(points[1:] or points)}")
    return "".join(parts)


def _area(frame: Frame, places: Sequence[float], values: Sequence[float | None]) -> str:
    parts = []
    for run in _runs(values):
        points = " ".join(f"{number(places[index])} {number(frame.y(values[index] or 0.0))}" for index in run)
        parts.append(f"M{number(places[run[0]])} {frame.floor}L{points}V{frame.floor}z")
    return "".join(parts)


def _tooltips(frame: Frame, series: Sequence[Series], what: str) -> list[Markup]:
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
        parts.append(
            element("rect", title, x=left, y=_TOP, width=right - left, height=frame.floor - _TOP + 8, class_="hit")
        )
    return parts
