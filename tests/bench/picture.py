"""A picture of bars, as SVG, without a library: one panel above the other, one bar per system in each group."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _RIGHT = 760, 190, 90
_BAR, _GAP, _HEAD = 18, 10, 44
_COLOURS = {"ours": "#2563eb", "bare loop": "#94a3b8", "datatrove": "#f59e0b"}


@dataclass
class Panel:
    """``groups``: a name, and the value of each system, None where it was not measured. ``full``: the longest bar."""

    title: str
    unit: str
    groups: list[tuple[str, dict[str, float | None]]]
    full: float | None = None

    @property
    def height(self) -> int:
        return _HEAD + sum(len(values) * _BAR + _GAP for _, values in self.groups)

    @property
    def longest(self) -> float:
        return self.full or max(value for _, values in self.groups for value in values.values() if value is not None)


def draw(title: str, panels: list[Panel]) -> str:
    parts: list[str] = []
    y = 64
    for panel in panels:
        _draw_panel(parts, panel, y)
        y += panel.height
    style = "text{font-family:system-ui,sans-serif;font-size:13px;fill:#334155}.b{font-weight:600}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" width="{_WIDTH}" height="{y + 8}">\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="16" y="26" class="b" style="font-size:15px">{escape(title)}</text>\n{_legend()}'
        + "".join(parts)
        + "</svg>\n"
    )


def _legend() -> str:
    parts = []
    for index, (name, colour) in enumerate(_COLOURS.items()):
        x = 16 + index * 130
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="49">{escape(name)}</text>\n')
    return "".join(parts)


def _draw_panel(parts: list[str], panel: Panel, y: int) -> None:
    parts.append(f'<text x="16" y="{y + 26}" class="b">{escape(panel.title)}</text>\n')
    y += _HEAD - 6
    scale = (_WIDTH - _LEFT - _RIGHT) / panel.longest
    for name, values in panel.groups:
        middle = y + len(values) * _BAR / 2 + 4
        parts.append(f'<text x="{_LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(name)}</text>\n')
        for system, value in values.items():
            width = max(1.0, scale * value) if value is not None else 0.0
            text = _shown(value) + (f" {panel.unit}" if value is not None else "")
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 3}" fill="{_COLOURS[system]}"/>'
                f'<text x="{_LEFT + width + 6:.1f}" y="{y + 12}">{escape(text)}</text>\n'
            )
            y += _BAR
        y += _GAP


def _shown(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"
