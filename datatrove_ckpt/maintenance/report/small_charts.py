"""Charts without time and ranks, as SVG: histograms, parts of a whole, and the bars in tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from datatrove_ckpt.formatting import duration
from datatrove_ckpt.maintenance.report.content import Histogram, Part
from datatrove_ckpt.maintenance.report.markup import Markup, element, number
from datatrove_ckpt.maintenance.report.scales import Scale, compact, grouped, ticks
from datatrove_ckpt.maintenance.report.time_charts import THIRD, WIDE, label, svg

_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 10, 28
_MAX_BAR, _LABEL = 48.0, 62.0


def histogram(found: Histogram, width: int = THIRD, height: int = 190) -> Markup:
    """Bars of equal width, because the bins grow like powers."""
    show = shower(found.unit)
    axis = ticks(max((count for _, _, count in found.bins), default=0), 4, whole=True)
    y = Scale(0, axis[-1], height - _BOTTOM, _TOP)
    wide = min(_MAX_BAR, (width - _LEFT - _RIGHT) / max(len(found.bins), 1))
    parts = []
    for value in axis:
        kind = "axis" if value == 0 else "grid"
        parts.append(element("path", d=f"M{_LEFT} {number(y(value))}H{width - _RIGHT}", class_=kind))
        parts.append(label(_LEFT - 8, y(value) + 4, compact(value), "t num", "end"))
    every = max(1, math.ceil(_LABEL / wide))
    for index, (low, high, count) in enumerate(found.bins):
        x = _LEFT + index * wide
        if index % every == 0:
            parts.append(label(x, height - 8, show(low), "t num", "middle"))
        title = element("title", f"{show(low)} to {show(high)}: {grouped(count)}")
        top = min(y(count), height - _BOTTOM - 1) if count else height - _BOTTOM
        parts.append(
            element(
                "path",
                title,
                d=f"M{number(x + 1)} {height - _BOTTOM}V{number(top)}h{number(max(wide - 2, 0.6))}V{height - _BOTTOM}z",
                class_="bar s0",
            )
        )
    return svg(width, height, found.title, *parts)


def shower(unit: str) -> Callable[[float], str]:
    """How values of a unit are written."""
    return duration if unit == "s" else lambda value: compact(round(value))


def share_bar(parts: Sequence[Part], kinds: Sequence[str]) -> Markup:
    """One bar, as long as the sum, with a part for each value."""
    total = sum(part.value for part in parts) or 1.0
    x = 0.0
    drawn = []
    for part, kind in zip(parts, kinds, strict=True):
        wide = WIDE * part.value / total
        if wide > 0:
            title = element("title", f"{part.name}: {grouped(part.value)}")
            drawn.append(
                element("rect", title, x=x, y=0, width=max(wide - 2, 1.0), height=26, rx=3, class_=f"bar {kind}")
            )
        x += wide
    return svg(WIDE, 26, "parts of the whole", *drawn)


def inline_bar(parts: Sequence[tuple[float, str]], full: float) -> Markup:
    """A small bar for a row of a table: lengths and their colours, beside the longest one."""
    width, x = 150, 0.0
    drawn = []
    for value, kind in parts:
        wide = width * value / full if full else 0.0
        if wide > 0:
            drawn.append(element("rect", x=x, y=0, width=max(wide, 1.0), height=10, rx=2, class_=f"bar {kind}"))
        x += wide
    return svg(width, 10, "its length beside the others", *drawn)
