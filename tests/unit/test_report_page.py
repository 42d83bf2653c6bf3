"""The report's page: well formed, self-contained, safe for any name, small for many ranks."""

import re

from datatrove_ckpt.run_folder.report.page import chart, report_page, table
from datatrove_ckpt.run_folder.run_state import RunState

START = 1_790_000_000.0
INTERVALS = 160
HOSTILE = (
    "</style></title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00\u202egnp"
)


def a_page(word="plain"):
    """A page, and all that can be on it, with ``word`` in each place that takes a name."""
    values = [float(index) for index in range(INTERVALS)]
    edges = [START + 60 * index for index in range(INTERVALS + 1)]
    parts = [
        report_page(RunState(word, True, START, identity={"model": word})),
        chart("Documents", edges, {"documents": values}),
        chart("Errors", edges, {word: values}),
        table(word, (word, "documents#"), [[word, "1,000"]] * 8, word),
    ]
    return "".join(parts)


def tags(source):
    """Tags and names of attributes, in their order."""
    return [re.sub('="[^"]*"', "", tag) for tag in re.findall("<[^>]+>", source)]


def test_the_page_has_each_part_loads_nothing_and_runs_nothing():
    source = a_page()
    for text in ("Documents", "Errors", "1,000"):
        assert f">{text}<" in source
    assert (source.count("<svg "), source.count("<tr>")) == (2, 9)
    assert not re.search("<(script|iframe|object|embed|img|base|form)", source)
    assert [part for part in ("http:", "https:", "@import", "url(") if part in source] == []
    assert re.findall('<link [^>]*href="([^"]*)', source) == ["data:,"]
    assert "default-src 'none'" in source
    # Both ends of an axis fit into the width of a phone.
    assert ">2026-09-21 14:13:20</text>" in source
    assert ">16:53:20 UTC</text>" in source
    assert "max-width: 520px" in source, "charts fit a phone, with larger labels"


def test_a_hostile_name_is_text_in_every_place():
    hostile = a_page(word=HOSTILE)
    assert tags(hostile) == tags(a_page())
    assert hostile.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 8
    assert not {"\x00", "\u202e"} & {*hostile}
    a_page(word="\ud800 lone surrogate").encode()
