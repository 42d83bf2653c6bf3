"""The report's page: well formed, self-contained, safe for any name, small for many ranks."""

from html.parser import HTMLParser

from datatrove_ckpt.run_folder.report.page import chart, page, table

START = 1_790_000_000.0
INTERVALS = 160
HOSTILE = (
    "</style></title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00\u202egnp"
)
_VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Reads a page, and fails where elements are not nested."""

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.found = []
        self.shown = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.shown.append(data)

    @property
    def text(self):
        return "".join(self.shown)

    def all(self, tag):
        return [attributes for found, attributes in self.found if found == tag]


def a_page(word="plain"):
    """A page with everything on it, ``word`` in each place that takes a name."""
    values = [float(index) for index in range(INTERVALS)]
    edges = [START + 60 * index for index in range(INTERVALS + 1)]
    return page(
        where=word,
        model=word,
        state="running",
        made_at=START + 60 * INTERVALS,
        age=word,
        sums=[("documents", "123,456"), ("left", word)],
        sections=[
            chart("Documents", edges, {"documents": values}),
            chart("Errors", edges, {word: values}),
            table(word, (word, "documents#"), [[word, "1,000"]] * 8, word),
        ],
    )


def test_the_page_has_each_part_loads_nothing_and_runs_nothing():
    source = a_page()
    read = Reader(source)
    for text in ("123,456", "Documents", "Errors", "1,000"):
        assert text in read.text
    assert (len(read.all("svg")), len(read.all("tr"))) == (2, 9)
    assert not {"script", "iframe", "object", "embed", "img", "base", "form"} & {
        tag for tag, _ in read.found
    }
    assert [part for part in ("http:", "https:", "@import", "url(") if part in source] == []
    assert [one["href"] for one in read.all("link")] == ["data:,"]
    (policy,) = [
        one["content"]
        for one in read.all("meta")
        if one.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in policy


def test_a_hostile_name_is_text_in_every_place():
    plain, hostile = Reader(a_page()), Reader(a_page(word=HOSTILE))
    assert [tag for tag, _ in hostile.found] == [tag for tag, _ in plain.found]
    assert [sorted(one) for _, one in hostile.found] == [sorted(one) for _, one in plain.found]
    assert hostile.text.count("<script>alert(1)</script>") > 8
    assert "\x00" not in hostile.text
    assert "\u202e" not in hostile.text
    a_page(word="\ud800 lone surrogate").encode()
