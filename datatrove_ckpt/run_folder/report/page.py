"""One HTML page of figures, charts over time and tables. It holds its style, loads nothing and runs
no script.

Names of documents, ranks and errors are not trusted: text becomes markup in ``element`` alone,
which escapes it, and the page's own policy forbids scripts and requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np
import numpy.typing as npt

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.history import (
    History,
    ProgressRecord,
    RequestHistograms,
    read_history,
)
from datatrove_ckpt.checkpoint.identity import without_model
from datatrove_ckpt.checkpoint.layout import HISTORY
from datatrove_ckpt.common.counts import DocumentCounts, LogHistogram
from datatrove_ckpt.common.formatting import figure, percent, short
from datatrove_ckpt.config.monitoring import name_of_folder
from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.run_folder import status_text
from datatrove_ckpt.run_folder.run_state import RankStatus, RunState

_PROGRESS_LINES = 30_000
"""Lines about progress to read in sum.

More of them would cost seconds, and no screen could show them.
"""
_LEAST_LINES = 30
_MAX_LINES = 400
_MAX_ATTEMPTS = 30
_TONES = {"finished": "good", "running": "good", "damaged": "critical", "failed": "critical"}
_ORDER = ("damaged", "running", "failed", "lost", "interrupted", "unfinished")


def report_page(run: RunState) -> str:
    ranks = run.all_ranks
    lines = min(_MAX_LINES, max(_LEAST_LINES, _PROGRESS_LINES // max(1, len(ranks))))
    histories = [_history(rank.folder / HISTORY, lines) for rank in ranks]
    spreads = [spread for history in histories for spread in history.spreads]
    state = "finished"
    if not run.is_finished:
        state = next((state for state in _ORDER if run.totals.states[state]), "unfinished")
    called = name_of_folder(run.what)
    as_of = f", as of {clock(run.read_at)}"
    models = [str(value) for name, value in run.identity.items() if without_model(name) == "model"]
    about = [name(run.what, 400), f"{as_of}. {status_text.age(run).capitalize()}."]
    if models:
        about = [name(", ".join(dict.fromkeys(models))), " in ", *about]
    sums = [
        ("tasks", status_text.ranks_of(run)),
        ("input", status_text.progress_of(run)),
        *status_text.status_lines(run),
    ]
    entries = (element("div", element("dt", topic), element("dd", text)) for topic, text in sums)
    sections = [
        # Retries read documents that were read before: they are not summed.
        *_charts([history.minutes for history in histories[: len(run.ranks)]]),
        *_quality(run.together.done, spreads),
        _attempts(ranks),
        _spreads(spreads, run.totals.done.requests + run.retried.done.requests),
    ]
    parts = {
        "title": escaped(f"{shortened(called, 80)}: {state}"),
        "name": name(called),
        "state": element("span", state, class_=f"pill {_TONES.get(state, 'warning')}"),
        "about": element("p", *about),
        "sums": element("dl", *entries, class_="sums"),
        "sections": joined(sections),
        "footer": escaped(f"Written by datatrove-ckpt {__version__}{as_of}."),
    }
    template = files(__package__ or "").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(parts)


def _history(path: Path, max_lines: int) -> History:
    """Returns the history, without attempts if it is damaged: ``status`` names the damage."""
    with suppress(StorageFailed):
        return read_history(str(path), max_lines)
    return History()


_MAX_INTERVALS = 160
_MAX_KINDS = 20
Values = npt.NDArray[np.float64]


def _charts(ranks: Iterable[Sequence[ProgressRecord]]) -> Iterator[Markup]:
    """Between two lines of a history a sum grows evenly."""
    begun = [minutes for minutes in ranks if minutes]
    if not begun:
        return
    first = min(minutes[0].at for minutes in begun)
    last = max(first + 1.0, *(minutes[-1].at for minutes in begun))
    edges: Values = np.linspace(first, last, int(min(_MAX_INTERVALS, last - first)) + 1)

    # A clock that was set back does no harm.
    times = [np.maximum.accumulate([line.at for line in minutes]) for minutes in begun]

    def grown(value: Callable[[ProgressRecord], float]) -> Values:
        total = np.zeros(len(edges) - 1)
        for at, minutes in zip(times, begun, strict=True):
            values = np.maximum.accumulate([value(line) for line in minutes])
            total += np.diff(np.interp(edges, at, values))
        return total

    seconds = np.diff(edges)
    documents = grown(lambda line: line.documents.read) / seconds
    yield chart("Documents per second", edges, {"documents per second": documents})
    tokens = {
        "prompt": grown(lambda line: line.documents.prompt_tokens) / seconds,
        "completion": grown(lambda line: line.documents.completion_tokens) / seconds,
    }
    yield chart("Tokens per second", edges, tokens)


_EXAMPLES = 3


def _quality(done: DocumentCounts, spreads: Iterable[RequestHistograms]) -> Iterator[Markup]:
    counts = {f"finish_reason {reason}": number for reason, number in done.endings.items()}
    counts |= {_named(kind): number for kind, number in done.bad.items() if number}
    rows = [
        [kind, figure(number), percent(number / max(done.answers, number))]
        for kind, number in [*counts.items()][:_MAX_KINDS]
    ]
    lengths = done.lengths.percentiles
    caption = (
        f"{figure(done.answers)} answers, with {figure(lengths['p50'])} completion tokens in the "
        f"median and {figure(lengths['p95'])} at the 95th percentile, at most a sixth too low. "
        "Bad answers are at least so many."
    )
    yield table("Answers", ("", "answers#", "share#"), rows, caption)
    examples: dict[str, list[list[str]]] = {}
    for spread in spreads:
        for kind, texts in spread.examples.items():
            examples.setdefault(kind, []).extend(texts)
    rows = [
        [_named(kind), shortened(document, _MAX_ID), text]
        for kind in done.bad
        for document, text in examples.get(kind, [])[:_EXAMPLES]
    ]
    caption = f"First bad answers, at most {_EXAMPLES} of a kind."
    yield table("Bad answers", ("what", "document", "answer"), rows, caption)


def _named(kind: str) -> str:
    return kind.replace("_", " ")


def _attempts(ranks: Iterable[RankStatus]) -> Markup:
    ended = [
        (f"{rank.root}/{rank.rank}".lstrip("/"), attempt)
        for rank in ranks
        for attempt in rank.attempts
        if attempt.why != "done" and not (rank.state == "running" and attempt is rank.attempt)
    ]
    newest = sorted(ended, key=lambda pair: pair[1].last_seen)[-_MAX_ATTEMPTS:]
    caption = "Killed: kill -9, out of memory, or a lost node. In flight: requests sent again."
    if len(newest) < len(ended):
        caption += f" These are the last {len(newest)} of {len(ended)}."
    columns = ("task", "started", "last heartbeat", "how it ended", "where", "in flight#")
    rows = []
    for rank, attempt in newest:
        times = (clock(attempt.started), clock(attempt.last_seen))
        in_flight = "not known"
        if attempt.in_flight is not None:
            in_flight = figure(attempt.in_flight)
        rows.append([rank, *times, attempt.outcome, attempt.place, in_flight])
    return table("Attempts that ended early", columns, rows, caption)


_SHARES = (0.5, 0.9, 0.99, 1.0)


def _spreads(spreads: Sequence[RequestHistograms], requests: int) -> Markup:
    """Histograms lack the last minutes before a kill."""
    kinds = {
        "latency, ms": "milliseconds",
        "prompt tokens": "prompt_tokens",
        "completion tokens": "completion_tokens",
    }
    rows = []
    counted = 0
    for kind, name in kinds.items():
        buckets = sum((getattr(spread, name) for spread in spreads), LogHistogram())
        if buckets:
            counted = max(counted, buckets.total())
            rows.append([kind, *(figure(buckets.at_most(share)) for share in _SHARES)])
    caption = (
        f"{figure(counted)} of {figure(requests)} requests; numbers are at most a fifth too high."
    )
    columns = ("", *(f"{100 * share:.3g} % at most#" for share in _SHARES[:-1]), "all at most#")
    return table("Requests", columns, rows, caption)


_MAX_NAME = 160
_MAX_ID = 40
_MAX_CELL = 4000


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = ""
) -> Markup:
    """Returns a table; nothing without a row. A column whose title ends with "#" is of numbers."""
    if not rows:
        return Markup()
    kinds = ["n" if column.endswith("#") else None for column in columns]
    heads = [
        element("th", column.removesuffix("#"), class_=kind)
        for column, kind in zip(columns, kinds, strict=True)
    ]
    lines = [element("tr", *heads)]
    for row in rows:
        cells = [
            element("td", cell if kind else name(cell, _MAX_CELL), class_=kind)
            for cell, kind in zip(row, kinds, strict=True)
        ]
        lines.append(element("tr", *cells))
    body = element("div", element("table", *lines), class_="table")
    return element("section", element("h2", title), element("p", caption), body, class_="wide")


# charts -------------------------------------------------------------------------------------------

_WIDTH = 508
_HEIGHT = 210
_TOP = 10
_LEFT = 52
_END = 494
_FLOOR = 182


def chart(
    title: str, edges: Sequence[float] | Values, lines: Mapping[str, Sequence[float] | Values]
) -> Markup:
    """Returns a chart of lines over time, all in one unit.

    Args:
        edges: Unix seconds, ascending: where each interval starts, all of one length, and where the
            last interval ends.
    """
    highest = max(map(max, lines.values())) or 1.0
    first = clock(edges[0]).removesuffix(" UTC")  # both must fit into the width of a phone
    last = clock(edges[-1])
    if last[:10] == first[:10]:
        last = last[11:]
    labels = (
        (short(highest), _LEFT - 8, _TOP + 4, "end"),
        ("0", _LEFT - 8, _FLOOR + 4, "end"),
        (first, _LEFT, _FLOOR + 20, "start"),
        (last, _END, _FLOOR + 20, "end"),
    )
    parts = [element("path", d=f"M{_LEFT} {_TOP}V{_FLOOR}H{_END}", class_="axis")]
    parts += [element("text", text, x=x, y=y, text_anchor=end) for text, x, y, end in labels]
    step = (_END - _LEFT) / (len(edges) - 1)
    keys = []
    for index, (line, values) in enumerate(lines.items()):
        places = [
            f"{number(_LEFT + step * (at + 0.5))} {number(_FLOOR - (_FLOOR - _TOP) * y / highest)}"
            for at, y in enumerate(values)
        ]
        # The line of a single interval has the length 0; its round ends show as a dot.
        path = f"M{places[0]}L{' '.join(places)}"
        parts.append(element("path", d=path, class_=f"line s{index}"))
        keys.append(element("span", element("i", class_=f"key s{index}"), line))
    drawing = element(
        "svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=title
    )
    legend = element("div", *keys, class_="legend")
    return element("section", element("h2", title), legend, drawing)


def clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


# Control characters, and those that turn the direction of the text around them.
_UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


class Markup(str):
    """Text that is markup already. Only this module makes it."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """In names of attributes an underscore stands for a hyphen, and a last underscore is left out.
    None leaves the attribute out.

    ``Markup`` among the children is taken as it is; any other text is escaped.
    """
    written = [
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return Markup(f"<{tag}{''.join(written)}>{joined(children)}</{tag}>")


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return escaped(value)
    return number(value)


def joined(children: Iterable[str]) -> Markup:
    return Markup(
        "".join(child if isinstance(child, Markup) else escaped(child) for child in children)
    )


def escaped(text: str) -> Markup:
    return Markup(escape(_UNSHOWN.sub("\ufffd", text)))


def name(text: str, limit: int = _MAX_NAME) -> Markup:
    """Returns a foreign name, isolated from the direction of the text around it."""
    return element("bdi", shortened(text, limit))


def shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def number(value: float) -> str:
    """Formats with at most one decimal, which keeps large pages small."""
    return f"{value:.1f}".removesuffix(".0")
