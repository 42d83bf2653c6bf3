"""Lays the content out as one HTML page, with its style inside. The page loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files

from datatrove_ckpt.formatting import duration, plural
from datatrove_ckpt.maintenance.report.charts import HALF, WIDE, legend, line_chart, strip
from datatrove_ckpt.maintenance.report.content import Content, Figure, Histogram, Interruption, Part, RankRow, Series
from datatrove_ckpt.maintenance.report.interruptions import NO_WORD
from datatrove_ckpt.maintenance.report.markup import Markup, element, joined, name, raw, shortened, void
from datatrove_ckpt.maintenance.report.scales import clock, compact, grouped, percent

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_MAX_INTERRUPTIONS = 100
_OPEN_ROWS = 24  # a table with more rows is closed at first
_MAX_KIND = 60
_MAX_SETTING = 4000
_NO_WORD = "Without a word: kill -9, out of memory, or a node that is gone."
_TONES = {"finished": "good", "running": "good", "damaged": "critical", "failed": "critical"}
"""How the states of ``status`` are coloured; others are a warning in the title, and plain in tables."""
_NUMBER, _WIDE, _BAR, _SOFT, _KEY, _VALUE = "n", "w", "b", "s", "k", "v"
"""Kinds of columns: numbers, long names, bars, what is less important, and settings with their values."""
_CHUNKS = {
    "done": ("chunks committed", "s0"),
    "dead": ("with dead letters", "s1"),
    "open": ("in work", "s2"),
    "damaged": ("damaged", "damaged"),
    "none": ("to come", "todo"),
}


def page(content: Content) -> str:
    """The page as text, to be written as UTF-8."""
    head = element(
        "head",
        void("meta", charset="utf-8"),
        void("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        void("link", rel="icon", href="data:,"),
        element("title", f"{content.model or 'run'}: {content.state}, {shortened(content.where, 80)}"),
        element("style", raw(files(__package__ or "").joinpath("page.css").read_text())),
    )
    main = element(
        "main",
        _header(content),
        *(element("p", line, class_="note") for line in content.missing),
        _figures(content.figures),
        _figures(content.costs),
        element("div", *_sections(content), class_="grid"),
        element("footer", f"Written by datatrove-ckpt {content.version}, as of {clock(content.made_at)}."),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', main), lang='en')}\n"


def _header(content: Content) -> Markup:
    return element(
        "header",
        element("h1", name(content.model or content.where)),
        element("span", content.state, class_=f"pill {_TONES.get(content.state, 'warning')}"),
        element("p", name(content.where, 400), f", as of {clock(content.made_at)}. {content.age}"),
    )


def _figures(figures: Sequence[Figure]) -> Markup:
    return element("dl", *map(_figure, figures), class_="figures") if figures else joined([])


def _figure(figure: Figure) -> Markup:
    exact = None if figure.value is None else repr(figure.value)
    kind = f"value {figure.tone}".strip()
    return element(
        "div",
        element("dt", figure.label),
        element("dd", figure.text, class_=kind, data_figure=figure.key or None, data_value=exact),
        element("dd", figure.note, class_="remark") if figure.note else "",
        class_="figure",
    )


def _sections(content: Content) -> Iterable[Markup]:
    if content.timeline is not None:
        cuts = "Red triangles: attempts that ended unfinished." if any(content.timeline.interruptions) else ""
        documents, rate = ([one] if one else [] for one in (content.documents, content.document_rate))
        yield from _over_time(content, "Documents finished", documents, WIDE, cuts)
        yield from _over_time(content, "Documents per second", rate, HALF)
        yield from _over_time(content, "Tokens per second", content.tokens, HALF)
    if content.interruptions:
        yield _interruptions(content.interruptions)
    if any(part.value for part in content.answers):
        yield _parts("Where answers came from", ("", "answers"), content.answers)
    if content.timeline is not None:
        counted = [Series(f"{shortened(one.name, _MAX_KIND)}: {_sum(one)}", one.values) for one in content.errors]
        yield from _over_time(content, "Errors over time", counted, WIDE)
    if content.causes:
        yield _parts("Dead letters", ("cause", "documents"), content.causes)
    if cards := [_histogram(found) for found in content.histograms if found.count]:
        yield element("div", *cards, class_="wide three")
    if content.ranks:
        yield _ranks(content)
    for title, pairs in (("Settings", content.settings), ("Identity", content.identity)):
        if pairs:
            rows = [[name(key), element("code", name(value, _MAX_SETTING))] for key, value in pairs]
            yield _section(title, "", _table((), (_KEY, _VALUE), rows))


def _section(title: str, what: str, *children: str, kind: str | None = "wide") -> Markup:
    """A card, as wide as the page unless ``kind`` is None."""
    about = element("p", what) if what else ""
    return element("section", element("h2", title), about, *children, class_=kind)


def _table(head: Sequence[str], kinds: Sequence[str], rows: Sequence[Sequence[str]], what: str = "") -> Markup:
    """A table. ``what``: the plural of what its rows are, if it is closed at first when it is long."""
    titles = [
        element("th", title, class_=_NUMBER if kind == _NUMBER else None)
        for title, kind in zip(head, kinds, strict=False)
    ]
    lines = [element("tr", *titles)] if head else []
    for row in rows:
        cells = zip(row, kinds, strict=True)
        lines.append(element("tr", *(element("td", cell, class_=kind or None) for cell, kind in cells)))
    table = element("div", element("table", *lines), class_="table")
    closed = bool(what) and len(rows) > _OPEN_ROWS
    return element("details", element("summary", f"all {len(rows)} {what}"), table) if closed else table


def _over_time(content: Content, title: str, series: Sequence[Series], width: int, what: str = "") -> Iterable[Markup]:
    if series and content.timeline is not None:
        names = [one.name for one in series] if len(series) > 1 or title.startswith("Errors") else []
        keys = legend(names, [f"s{index}" for index in range(len(names))])
        chart = line_chart(content.timeline, series, title.lower(), width)
        yield _section(title, what, keys, chart, kind="wide" if width == WIDE else None)


def _sum(series: Series) -> str:
    return grouped(round(sum(value or 0 for value in series.values)))


def _parts(title: str, head: tuple[str, str], parts: Sequence[Part]) -> Markup:
    """A row for each part of a whole, with its share, and a bar."""
    total = sum(part.value for part in parts) or 1
    rows = [
        [name(one.name, 300), grouped(one.value), percent(one.value / total), strip([(0, one.value, "s0")], total)]
        for one in parts
    ]
    return _section(title, "", _table((*head, "", ""), (_WIDE, _NUMBER, _NUMBER, _BAR), rows))


def _histogram(found: Histogram) -> Markup:
    most = max(count for _, _, count in found.bins)
    rows = [
        [f"{_value(low, found.unit)} to {_value(high, found.unit)}", grouped(count), strip([(0, count, "s0")], most)]
        for low, high, count in found.bins
    ]
    about = f"{grouped(found.count)}{found.note} requests"
    return _section(found.title, about, _table((), (_SOFT, _NUMBER, _BAR), rows), kind=None)


def _value(value: float, unit: str) -> str:
    return duration(value) if unit == "s" else compact(round(value))


def _interruptions(found: Sequence[Interruption]) -> Markup:
    worst = sorted(found, key=lambda one: one.seconds, reverse=True)[:_MAX_INTERRUPTIONS]
    known = [one.repeated for one in found if one.repeated is not None]
    again = f", and {plural(sum(known), 'request')} sent again" if sum(known) else ""
    if any(one.repeated is None and one.why == NO_WORD for one in found):
        again = ", and it is not known how many requests were sent again"
    lost = duration(sum(one.seconds for one in found))
    what = f"{plural(sum(one.ranks for one in found), 'interruption')} cost {lost} of ranks' time{again}."
    what += " Times of several ranks are their sums. " + _NO_WORD
    if len(worst) < len(found):
        what += f" These are the {len(worst)} longest of {len(found)}."
    keys = legend(["pause: nothing ran", "start-up: until servers were ready"], ["slow", "s0"])
    head = ("rank", "last sign of life, UTC", "how it ended", "where", "pause", "start-up", "sent again", "")
    kinds = (_WIDE, _SOFT, _WIDE, _WIDE, _NUMBER, _NUMBER, _NUMBER, _BAR)
    rows = [_interruption(one, worst[0].seconds) for one in sorted(worst, key=lambda one: one.at)]
    return _section("What interruptions cost", what, keys, _table(head, kinds, rows, "interruptions"))


def _interruption(one: Interruption, longest: float) -> list[str]:
    pause = one.away or 0.0
    return [
        name(one.rank, 80),
        clock(one.at).removesuffix(" UTC"),
        name(one.why),
        name(one.place, 80),
        "none yet" if one.away is None else duration(one.away),
        "" if one.starting is None else duration(one.starting),
        ("not known" if one.why == NO_WORD else "") if one.repeated is None else grouped(one.repeated),
        strip([(0, pause, "slow"), (pause, one.seconds, "s0")], longest),
    ]


def _ranks(content: Content) -> Markup:
    ranks = content.ranks
    states = {state for row in ranks for _, _, state in row.chunks} | {"none" for row in ranks if row.expected_chunks}
    names, kinds = zip(*(_CHUNKS[state] for state in _CHUNKS if state in states), strict=True) if states else ((), ())
    what = "Documents per second while the rank worked"
    what += f"; the median is {grouped(content.median_rate)}." if content.median_rate else "."
    if slow := sum(row.slow for row in ranks):
        what += f" Orange: {plural(slow, 'rank')} far below it."
    head = ("rank", "state", "documents", "done", "per second", "", "attempts", "chunks", "")
    columns = ("", "", _NUMBER, _NUMBER, _NUMBER, _BAR, _NUMBER, _BAR, _WIDE)
    fastest = max(row.rate or 0.0 for row in ranks)
    chunks = max(max(row.expected_chunks or 0, row.chunks[-1][1] if row.chunks else 0) for row in ranks)
    rows = [_rank(row, fastest, chunks) for row in ranks]
    return _section("Ranks", what, legend(names, kinds), _table(head, columns, rows, "ranks"))


def _rank(row: RankRow, fastest: float, chunks: int) -> list[str]:
    pieces = [(0, row.expected_chunks or 0, "todo"), *((low, end, _CHUNKS[state][1]) for low, end, state in row.chunks)]
    return [
        name(row.key, 40),
        element("span", row.state, class_=_TONES.get(row.state)),
        grouped(row.documents),
        "" if row.share is None else percent(row.share),
        "" if row.rate is None else grouped(row.rate),
        strip([(0, row.rate or 0.0, "slow" if row.slow else "s0")], fastest),
        grouped(row.attempts),
        strip(pieces, chunks),
        name(row.reason, 300),
    ]
