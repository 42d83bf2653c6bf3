"""Charts with a place for each rank, as SVG: rates, when each rank worked, and the map of chunks.

A thousand ranks must stay a small page: neighbouring cells of one colour are one stroke, and each colour is one path.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby

from datatrove_ckpt.maintenance.report.content import RankRow, Timeline
from datatrove_ckpt.maintenance.report.markup import Markup, element, number, shortened
from datatrove_ckpt.maintenance.report.scales import Scale, compact, grouped, ticks, time_ticks
from datatrove_ckpt.maintenance.report.time_charts import WIDE, label, svg

MAX_BARS = 40
"""Ranks that get a bar with a label each. More of them are dots."""
MAX_ACTIVE = 60
"""Ranks whose activity over time is shown; of more, those that need attention, then the slowest."""
_MAX_NAMED = 12
_LEFT, _RIGHT, _BOTTOM = 96, 96, 30
_MAP_HEIGHT = 640.0
_MIN_CELL = 4.0  # a chunk that is at least as wide gets a gap beside it


def rate_chart(rows: Sequence[RankRow], median: float | None) -> Markup:
    """The rate of each rank; slow ones stand out."""
    known = [row for row in rows if row.rate is not None]
    return _bars(known, median) if len(known) <= MAX_BARS else _dots(known, median)


def _bars(rows: Sequence[RankRow], median: float | None) -> Markup:
    step = 22
    height = step * len(rows) + _BOTTOM
    axis = ticks(max((row.rate or 0.0 for row in rows), default=0.0))
    x = Scale(0, axis[-1], _LEFT, WIDE - _RIGHT)
    parts, notes = [], []
    for value in axis:
        kind = "axis" if value == 0 else "grid"
        parts.append(element("path", d=f"M{number(x(value))} 0V{height - _BOTTOM}", class_=kind))
        parts.append(label(x(value), height - 10, compact(value), "t num", "middle"))
    for index, row in enumerate(rows):
        y = index * step + 4
        rate = row.rate or 0.0
        title = element("title", _tooltip(row))
        end = x(rate)
        parts.append(label(_LEFT - 10, y + 11, shortened(row.key, 14), "t", "end"))
        parts.append(
            element(
                "path", title, d=_rounded_bar(_LEFT, y, end - _LEFT, 14), class_="bar slow" if row.slow else "bar s0"
            )
        )
        note = f"{compact(rate)}{_slowness(row, median)}"
        notes.append(label(end + 8, y + 11, note, "t halo strong" if row.slow else "t halo"))
    parts += [*_median_line(x, median, height - _BOTTOM), *notes]
    return svg(WIDE, height, "documents per second of each rank", *parts)


def _slowness(row: RankRow, median: float | None) -> str:
    return f", {row.rate / median * 100:.0f} % of the median" if row.slow and median and row.rate is not None else ""


def _rounded_bar(x: float, y: float, width: float, height: float) -> str:
    """A bar whose end at the data is round, and whose start at the axis is not."""
    radius = min(4.0, width)
    flat = max(width - radius, 0.0)
    corner = f"q{number(radius)} 0 {number(radius)} {number(radius)}"
    back = f"q0 {number(radius)} -{number(radius)} {number(radius)}"
    return f"M{number(x)} {number(y)}h{number(flat)}{corner}v{number(height - 2 * radius)}{back}h-{number(flat)}z"


def _median_line(x: Scale, median: float | None, height: float) -> list[Markup]:
    if not median:
        return []
    at = number(x(median))
    title = element("title", f"median: {grouped(median)} documents per second")
    return [element("path", title, d=f"M{at} 0V{number(height)}", class_="median")]


def _dots(rows: Sequence[RankRow], median: float | None) -> Markup:
    height, left, right, top = 280, 52, 14, 12
    axis = ticks(max(row.rate or 0.0 for row in rows))
    x = Scale(0, len(rows) - 1, left + 8, WIDE - right - 8)
    y = Scale(0, axis[-1], height - _BOTTOM, top)
    parts = []
    for value in axis:
        kind = "axis" if value == 0 else "grid"
        parts.append(element("path", d=f"M{left} {number(y(value))}H{WIDE - right}", class_=kind))
        parts.append(label(left - 8, y(value) + 4, compact(value), "t num", "end"))
    for index in _every(len(rows), 10):
        parts.append(label(x(index), height - 10, shortened(rows[index].key, 14), "t", "middle"))
    if median:
        title = element("title", f"median: {grouped(median)} documents per second")
        parts.append(element("path", title, d=f"M{left} {number(y(median))}H{WIDE - right}", class_="median"))
    named = {row.key for row in sorted((row for row in rows if row.slow), key=lambda row: row.rate or 0)[:_MAX_NAMED]}
    for index, row in enumerate(rows):
        title = element("title", _tooltip(row))
        at, rate = x(index), y(row.rate or 0.0)
        kind = "dot slow" if row.slow else "dot s0"
        parts.append(element("circle", title, cx=at, cy=rate, r=4.5 if row.slow else 2.5, class_=kind))
        if row.key in named:
            near_end = at > WIDE - 120
            name = shortened(row.key, 14)
            parts.append(
                label(at + (-8 if near_end else 8), rate + 4, name, "t strong", "end" if near_end else "start")
            )
    return svg(WIDE, height, "documents per second of each rank", *parts)


def _tooltip(row: RankRow) -> str:
    rate = "" if row.rate is None else f"\n{grouped(row.rate)} documents per second"
    return f"rank {row.key}: {row.state}{rate}\n{row.documents:,} documents" + (f"\n{row.reason}" if row.reason else "")


def active_rows(rows: Sequence[RankRow]) -> list[RankRow]:
    """The ranks of the activity chart, in their order."""
    if len(rows) <= MAX_ACTIVE:
        return list(rows)
    worst = sorted(rows, key=lambda row: (not row.reason, not row.slow, row.rate if row.rate is not None else math.inf))
    chosen = {row.key for row in worst[:MAX_ACTIVE]}
    return [row for row in rows if row.key in chosen]


def activity_chart(rows: Sequence[RankRow], timeline: Timeline) -> Markup:
    """A row for each rank: how fast it was in each interval, and where it did not run."""
    step = 20 if len(rows) <= 16 else 10
    height = step * len(rows) + _BOTTOM
    x = Scale(timeline.edges[0], timeline.edges[-1], _LEFT, WIDE - 14)
    strokes: defaultdict[int, list[str]] = defaultdict(list)
    parts = []
    for index, row in enumerate(rows):
        y = index * step + step / 2
        if step == 20 or index % 2 == 0:
            parts.append(label(_LEFT - 10, y + 4, shortened(row.key, 14), "t", "end"))
        for first, end, level in _level_runs(row.activity):
            left, right = x(timeline.edges[first]), x(timeline.edges[end])
            strokes[level].append(f"M{number(left)} {number(y)}H{number(right)}")
    for level, found in sorted(strokes.items()):
        if level >= 0:
            parts.append(element("path", d="".join(found), class_=f"cell a{level}", stroke_width=step - 2))
    for at, when in time_ticks(timeline.edges[0], timeline.edges[-1], 7):
        if x(at) < WIDE - 50:
            parts.append(label(x(at), height - 8, when, "t", "middle"))
    return svg(WIDE, height, "when each rank worked, and how fast", *parts)


def _level_runs(levels: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    start = 0
    for level, run in groupby(levels):
        end = start + sum(1 for _ in run)
        yield start, end, level
        start = end


def chunk_map(rows: Sequence[RankRow]) -> Markup:
    """A row for each rank, a cell for each chunk; wide enough ones have gaps between them."""
    ends = (max(row.expected_chunks or 0, row.chunks[-1][1] if row.chunks else 0) for row in rows)
    columns = max(ends, default=0) or 1
    step = max(0.6, min(18.0, _MAP_HEIGHT / max(len(rows), 1)))
    gap = 2 if step >= 6 else 0
    height = step * len(rows) + _BOTTOM
    cell = (WIDE - _LEFT - 14) / columns
    strokes: defaultdict[str, list[str]] = defaultdict(list)
    parts = []
    named = set(_every(len(rows), max(2, min(40, int(height // 18)))))
    for index, row in enumerate(rows):
        y = number(round(index * step + step / 2, 1))
        if index in named:
            parts.append(label(_LEFT - 10, index * step + step / 2 + 4, shortened(row.key, 14), "t", "end"))
        if row.expected_chunks:
            strokes["none"].append(f"M{_LEFT} {y}H{number(_LEFT + row.expected_chunks * cell)}")
        for first, end, state in row.chunks:
            strokes[state].append(f"M{number(_LEFT + first * cell)} {y}H{number(_LEFT + end * cell)}")
    dashes = f"{cell - 1:.2f} 1" if cell >= _MIN_CELL and gap else None
    for kind in ("none", "done", "open", "dead", "damaged"):
        if found := strokes.get(kind):
            outline = "".join(found)
            parts.append(
                element("path", d=outline, class_=f"cell c-{kind}", stroke_width=step - gap, stroke_dasharray=dashes)
            )
    for value in ticks(columns, 8, whole=True):
        if value <= columns:
            parts.append(label(_LEFT + value * cell, height - 8, grouped(value), "t num", "middle"))
    return svg(WIDE, height, "the chunks of each rank", *parts)


def _every(number_of: int, at_most: int) -> range:
    """The indices of at most so many things, evenly spread."""
    return range(0, number_of, max(1, math.ceil(number_of / at_most)))
