"""Lays the content out as one HTML page, with its style inside. The page loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files

from datatrove_ckpt.formatting import duration, plural
from datatrove_ckpt.maintenance.report import rank_charts, tables, time_charts
from datatrove_ckpt.maintenance.report.content import Content, Figure, RankRow, Series
from datatrove_ckpt.maintenance.report.interruptions import NO_WORD
from datatrove_ckpt.maintenance.report.markup import Markup, element, joined, name, raw, shortened, void
from datatrove_ckpt.maintenance.report.scales import clock, grouped, percent
from datatrove_ckpt.maintenance.report.small_charts import histogram, share_bar
from datatrove_ckpt.maintenance.report.time_charts import HALF, legend

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_MAX_INTERRUPTIONS = 100
_OPEN_ROWS = 24  # a table with more rows is closed at first
_MAX_KIND = 60
_NO_WORD = "Without a word: kill -9, out of memory, or a node that is gone."


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
        element("span", content.state, class_=f"pill {tables.TONES.get(content.state, 'warning')}"),
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
        yield from _over_time(content)
    if any(row.rate is not None for row in content.ranks):
        yield _rates(content)
    if content.timeline is not None and any(row.activity for row in content.ranks):
        yield _activity(content)
    if any(row.chunks or row.expected_chunks for row in content.ranks):
        yield _chunks(content.ranks)
    if content.interruptions:
        yield _interruptions(content)
    yield from _answers(content)
    yield from _errors(content)
    counted = [found for found in content.histograms if found.count]
    if counted:
        cards = (_section(one.title, f"{grouped(one.count)}{one.note} requests", histogram(one)) for one in counted)
        yield element("div", *cards, class_="wide three")
    if content.ranks:
        table = tables.rank_table(content.ranks)
        yield _section("Ranks", "", _closed(table, len(content.ranks), "ranks"), wide=True, long=True)
    for title, pairs in (("Settings", content.settings), ("Identity", content.identity)):
        if pairs:
            yield _section(title, "", tables.pair_table(pairs), wide=True, long=True)


def _section(title: str, what: str, *children: str, wide: bool = False, long: bool = False) -> Markup:
    """A card. ``wide``: both columns; ``long``: may be divided in print."""
    kind = " ".join(word for word, given in (("wide", wide), ("long", long)) if given)
    about = element("p", what) if what else ""
    return element("section", element("h2", title), about, *children, class_=kind or None)


def _closed(table: Markup, rows: int, what: str) -> Markup:
    return table if rows <= _OPEN_ROWS else element("details", element("summary", f"all {rows} {what}"), table)


def _over_time(content: Content) -> Iterable[Markup]:
    timeline = content.timeline
    assert timeline is not None
    cuts = "Red triangles: attempts that ended unfinished." if any(timeline.interruptions) else ""
    if content.documents is not None:
        chart = time_charts.line_chart(timeline, [content.documents], "documents", filled=True)
        yield _section("Documents finished", cuts, chart, wide=True)
    if content.document_rate is not None:
        chart = time_charts.line_chart(timeline, [content.document_rate], "documents per second", HALF, 200)
        yield _section("Documents per second", "", legend(["all ranks"], ["s0"]), chart)
    if content.tokens:
        names, kinds = [one.name for one in content.tokens], [f"s{index}" for index in range(len(content.tokens))]
        chart = time_charts.line_chart(timeline, content.tokens, "tokens per second", HALF, 200)
        yield _section("Tokens per second", "", legend(names, kinds), chart)


def _rates(content: Content) -> Markup:
    slow = sum(row.slow for row in content.ranks)
    what = "Documents per second while the rank worked. Dotted: the median."
    if slow:
        what += f" Orange: {plural(slow, 'rank')} far below it."
    return _section("Rate by rank", what, rank_charts.rate_chart(content.ranks, content.median_rate), wide=True)


def _activity(content: Content) -> Markup:
    assert content.timeline is not None
    shown = rank_charts.active_rows([row for row in content.ranks if row.activity])
    what = "The stronger the colour, the faster. Empty: no process worked on the rank."
    if len(shown) < len(content.ranks):
        what += f" {len(shown)} of {plural(len(content.ranks), 'rank')}: those that need attention, and the slowest."
    keys = legend(["running, no document finished", "slow", "as fast as usual"], ["k0", "k1", "k4"])
    return _section("When ranks worked", what, keys, rank_charts.activity_chart(shown, content.timeline), wide=True)


_CHUNKS = {
    "done": ("committed", "s0"),
    "dead": ("committed, with dead letters", "k-dead"),
    "open": ("in work", "k-open"),
    "damaged": ("damaged", "k-damaged"),
    "none": ("to come", "k-none"),
}


def _chunks(ranks: Sequence[RankRow]) -> Markup:
    rows = [row for row in ranks if row.chunks or row.expected_chunks]
    states = {str(state) for row in rows for _, _, state in row.chunks}
    states |= {"none"} if any(row.expected_chunks for row in rows) else set()
    names, kinds = zip(*(_CHUNKS[state] for state in _CHUNKS if state in states), strict=True)
    what = "A row for each rank, from its first chunk to its last."
    return _section("Chunks", what, legend(names, kinds), rank_charts.chunk_map(rows), wide=True)


def _interruptions(content: Content) -> Markup:
    found = content.interruptions
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
    table = tables.interruption_table(sorted(worst, key=lambda one: one.at))
    table = _closed(table, len(worst), "interruptions")
    return _section("What interruptions cost", what, keys, table, wide=True, long=True)


def _answers(content: Content) -> Iterable[Markup]:
    total = sum(part.value for part in content.answers)
    if total:
        kinds = [f"s{index}" for index in range(len(content.answers))]
        names = [f"{part.name}: {grouped(part.value)} ({percent(part.value / total)})" for part in content.answers]
        bar = share_bar(content.answers, kinds)
        yield _section("Where answers came from", "", legend(names, kinds), bar, wide=True)


def _errors(content: Content) -> Iterable[Markup]:
    if content.timeline is not None and content.errors:
        kinds = [f"s{index}" for index in range(len(content.errors))]
        names = [f"{shortened(one.name, _MAX_KIND)}: {grouped(_sum(one))}" for one in content.errors]
        chart = time_charts.stacked_bars(content.timeline, content.errors, "errors")
        yield _section("Errors over time", "", legend(names, kinds), chart, wide=True)
    if content.causes:
        yield _section("Dead letters", "", tables.cause_table(content.causes), wide=True, long=True)


def _sum(series: Series) -> int:
    return round(sum(value or 0 for value in series.values))
