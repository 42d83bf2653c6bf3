"""The report's page: well formed, self-contained, safe for any name, small for many ranks."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from datatrove_ckpt.maintenance.report.content import (
    Content,
    Figure,
    Histogram,
    Interruption,
    Part,
    RankRow,
    Series,
    Timeline,
)
from datatrove_ckpt.maintenance.report.markup import element, name, shortened, text
from datatrove_ckpt.maintenance.report.page import page

START = 1_790_000_000.0
INTERVALS = 160
HOSTILE = "</style></title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00\u202egnp"
_VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Reads a page, and fails where elements are not nested."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str]]] = []
        self.shown: list[str] = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.shown.append(data)

    @property
    def text(self) -> str:
        return "".join(self.shown)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.found if found == tag]


def content(number_of_ranks: int = 8, word: str = "plain", **changes: Any) -> Content:
    """A page with everything on it, ``word`` in each place that takes a name."""
    quiet = [None if 40 <= index < 44 else float(index) for index in range(INTERVALS)]
    rows = [
        RankRow(
            key=word if number == 0 else str(number),
            state="running",
            reason=word if number == 5 else "",
            documents=1000 + number,
            rate=0.5 if number == 5 else 4.0 + number % 7 / 10,
            share=0.4,
            attempts=2,
            slow=number == 5,
            chunks=[(0, 20, "done"), (20, 21, "dead"), (21, 24, "done"), (24, 26, "open")],
            expected_chunks=60,
        )
        for number in range(number_of_ranks)
    ]
    interruptions = [
        Interruption(word, START + 60 * number, word, word, 300.0, 60.0, 17) for number in range(3 * number_of_ranks)
    ]
    fields: dict[str, Any] = {
        "where": word,
        "model": word,
        "state": "running",
        "made_at": START + 60 * INTERVALS,
        "version": "1.0",
        "age": word,
        "figures": [Figure("documents", "Documents", 123_456, "123,456", word), Figure("", "Left", None, word)],
        "costs": [Figure("", "Cost", 1.5, "1.50", word)],
        "timeline": Timeline(
            [START + 60 * index for index in range(INTERVALS + 1)], [int(index == 40) for index in range(INTERVALS)]
        ),
        "documents": Series("documents", quiet),
        "document_rate": Series("documents per second", quiet),
        "tokens": [Series("prompt", quiet), Series("completion", quiet)],
        "errors": [Series(word, [1.0] * INTERVALS), Series("503", [2.0] * INTERVALS)],
        "ranks": rows,
        "median_rate": 4.3,
        "interruptions": interruptions,
        "answers": [Part("sent", 100), Part("from the cache", 20)],
        "causes": [Part(word, 3)],
        "histograms": [Histogram("Latency", "s", [(0.5, 1.0, 3), (1.0, 2.0, 5)])],
        "settings": [(word, word)],
        "identity": [(word, word)],
        "missing": [word],
    }
    return Content(**fields | changes)


def test_the_page_is_nested_well_and_has_each_part() -> None:
    read = Reader(page(content()))
    titles = ["Documents finished", "Documents per second", "Tokens per second", "chunks"]
    titles += ["What interruptions cost", "Where answers came from", "Errors over time", "Dead letters", "Latency"]
    for title in [*titles, "Ranks", "Settings", "Identity"]:
        assert title in read.text
    assert len(read.all("svg")) > 8


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    source = page(content())
    read = Reader(source)
    assert not {"script", "iframe", "object", "embed", "img", "base", "form"} & {tag for tag, _ in read.found}
    assert [part for part in ("http:", "https:", "@import", "url(") if part in source] == []
    assert [one["href"] for one in read.all("link")] == ["data:,"]
    (policy,) = [one["content"] for one in read.all("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy


def test_a_hostile_name_is_text_in_every_place() -> None:
    plain, hostile = Reader(page(content())), Reader(page(content(word=HOSTILE)))
    assert [tag for tag, _ in hostile.found] == [tag for tag, _ in plain.found]
    assert [sorted(one) for _, one in hostile.found] == [sorted(one) for _, one in plain.found]
    assert hostile.text.count("<script>alert(1)</script>") > 8
    assert "\x00" not in hostile.text
    assert "\u202e" not in hostile.text
    page(content(word="\ud800 lone surrogate")).encode()


def test_only_markup_is_not_escaped() -> None:
    assert element("p", "<b>", element("i", "&"), class_='"x"') == '<p class="&quot;x&quot;">&lt;b&gt;<i>&amp;</i></p>'
    assert element("p", hidden=None, stroke_width=1.26) == '<p stroke-width="1.3"></p>'
    assert text("a\x07b") == "a\ufffdb"
    assert name("<x>") == "<bdi>&lt;x&gt;</bdi>"
    assert shortened("a" * 500, 11) == "aaaa...aaaa"


def test_figures_carry_their_exact_values() -> None:
    read = Reader(page(content()))
    figures = [one for one in read.all("dd") if "data-figure" in one]
    assert [(one["data-figure"], one["data-value"]) for one in figures] == [("documents", "123456")]


def test_hundreds_of_ranks_make_a_small_page() -> None:
    read = page(content(300))
    assert len(read) < 600_000
    assert "all 300 ranks" in Reader(read).text


def test_an_empty_run_makes_a_page() -> None:
    read = Reader(page(Content("folder", "", "not started", START, "1.0")))
    assert "not started" in read.text
    assert read.all("svg") == []


@pytest.mark.parametrize("values", [[], [None], [0.0], [None, 3.0, None]])
def test_a_chart_of_odd_values_is_drawn(values: list[float | None]) -> None:
    count = max(len(values), 1)
    timeline = Timeline([START + 60 * index for index in range(count + 1)], [0] * count)
    series = Series("documents", values or [None])
    odd = content(timeline=timeline, documents=series, document_rate=series, tokens=[], errors=[series])
    odd = replace(odd, ranks=[replace(row, rate=None) for row in odd.ranks])
    assert "NaN" not in page(odd)
    assert "inf" not in Reader(page(odd)).text


def test_interruptions_beyond_a_hundred_are_counted_and_the_longest_shown() -> None:
    found = [Interruption(str(number), START + number, "killed", "n1", float(number)) for number in range(150)]
    read = Reader(page(content(interruptions=found)))
    assert "150 interruptions cost" in read.text
    assert "These are the 100 longest of 150" in read.text
