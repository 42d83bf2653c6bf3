"""The tables of the page: interruptions, dead letters, ranks, settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from datatrove_ckpt.formatting import duration
from datatrove_ckpt.maintenance.report.content import Cause, Interruption, RankRow
from datatrove_ckpt.maintenance.report.interruptions import NO_WORD
from datatrove_ckpt.maintenance.report.markup import Markup, element, name
from datatrove_ckpt.maintenance.report.scales import clock, grouped, percent
from datatrove_ckpt.maintenance.report.small_charts import inline_bar

TONES = {"finished": "good", "running": "good", "damaged": "critical", "failed": "critical"}
"""How the states of ``status`` are coloured; others are a warning in the title, and plain in tables."""
_MAX_SETTING = 4000
_NUMBER, _WIDE, _BAR, _SOFT, _KEY, _VALUE = "n", "w", "b", "s", "k", "v"
"""Kinds of columns: numbers, long names, bars, what is less important, and settings with their values."""


def interruption_table(found: Sequence[Interruption]) -> Markup:
    """One row each, with a bar for its length beside the others."""
    longest = max((one.seconds for one in found), default=0.0)
    head = ("rank", "last sign of life, UTC", "how it ended", "where", "pause", "start-up", "sent again", "")
    kinds = (_WIDE, _SOFT, _WIDE, _WIDE, _NUMBER, _NUMBER, _NUMBER, _BAR)
    return _table(head, kinds, (_interruption(one, longest) for one in found))


def _interruption(one: Interruption, longest: float) -> list[str]:
    return [
        name(one.rank, 80),
        clock(one.at).removesuffix(" UTC"),
        name(one.why),
        name(one.place, 80),
        "none yet" if one.away is None else duration(one.away),
        "" if one.starting is None else duration(one.starting),
        ("not known" if one.why == NO_WORD else "") if one.repeated is None else grouped(one.repeated),
        inline_bar([(one.away or 0.0, "slow"), (one.starting or 0.0, "s0")], longest),
    ]


def cause_table(causes: Sequence[Cause]) -> Markup:
    """Why documents became dead letters."""
    rows = ([name(one.name, 300), grouped(one.count)] for one in causes)
    return _table(("cause", "documents"), (_WIDE, _NUMBER), rows)


def rank_table(ranks: Sequence[RankRow]) -> Markup:
    """One row for each rank."""
    head = ("rank", "state", "documents", "done", "per second", "attempts", "")
    return _table(head, ("", "", _NUMBER, _NUMBER, _NUMBER, _NUMBER, _WIDE), map(_rank, ranks))


def _rank(row: RankRow) -> list[str]:
    return [
        name(row.key, 40),
        element("span", row.state, class_=TONES.get(row.state)),
        grouped(row.documents),
        "" if row.share is None else percent(row.share),
        "" if row.rate is None else grouped(row.rate),
        grouped(row.attempts),
        name(row.reason, 300),
    ]


def pair_table(pairs: Sequence[tuple[str, str]]) -> Markup:
    """Names and values."""
    rows = ([name(key), element("code", name(value, _MAX_SETTING))] for key, value in pairs)
    return _table((), (_KEY, _VALUE), rows)


def _table(head: Sequence[str], kinds: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    titles = [
        element("th", title, class_=_NUMBER if kind == _NUMBER else None)
        for title, kind in zip(head, kinds, strict=False)
    ]
    lines = [element("tr", *titles)] if head else []
    for row in rows:
        cells = zip(row, kinds, strict=True)
        lines.append(element("tr", *(element("td", cell, class_=kind or None) for cell, kind in cells)))
    return element("div", element("table", *lines), class_="table")
