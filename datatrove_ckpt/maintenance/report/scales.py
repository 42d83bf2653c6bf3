"""From values to places: round steps for axes, and numbers and times as short labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_DAY = 86400


@dataclass(frozen=True)
class Scale:
    """Maps values from ``low`` to ``high`` to coordinates from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.0)


def ticks(high: float, at_most: int = 5, whole: bool = False) -> list[float]:
    """Round values from 0 to the first one that is not below ``high``. ``whole``: no fractions."""
    if not 0 < high < math.inf:
        return [0.0, 1.0]
    rough = high / at_most
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole and power <= 1 else (1, 2, 2.5, 5, 10)
    step = next(power * factor for factor in factors if power * factor >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    number = max(1, math.ceil(high / step - 1e-9))
    return [step * index for index in range(number + 1)]


def time_ticks(low: float, high: float, at_most: int = 8) -> list[tuple[float, str]]:
    """Round times of UTC between two Unix times, with labels. A new day is named."""
    rough = (high - low) / at_most
    days = [_DAY * number for number in (2, 5, 7, 14, 30, 60, 120, 365)]
    step = next((step for step in (*_TIME_STEPS, *days) if step >= rough), days[-1])
    found: list[tuple[float, str]] = []
    day = ""
    at = math.ceil(low / step) * step
    while at <= high:
        when = datetime.fromtimestamp(at, UTC)
        today = f"{when:%b} {when.day}"
        clock = f"{when:%H:%M:%S}" if step < 60 else f"{when:%H:%M}"
        found.append((at, today if step >= _DAY else clock if today == day else f"{today}, {clock}"))
        day = today
        at += step
    return found


def clock(at: float) -> str:
    """A Unix time for people: "2026-11-21 18:05 UTC"."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def compact(value: float) -> str:
    """A number in three digits: "0.25", "12", "1.2 k", "3.4 M"."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size * 0.9995:
            return f"{_short(value / size)}{unit}"
    return _short(value)


def short(value: float) -> str:
    """A count: in full up to a million, in three digits from there on."""
    return grouped(value) if abs(value) < 1e6 else compact(value)


def grouped(value: float) -> str:
    """A number in full: "1,234,567"; below 100 with up to two decimals."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.3g}"


def _short(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share of 1: "12.3 %"; 100 % only if it is all."""
    if share >= 1:
        return "100 %"
    return f"{math.floor(share * 1000) / 10:.1f} %"
