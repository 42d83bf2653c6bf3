"""docs/pictures: the bar, ``status`` and the report of one real run, drawn from what they print.

DATATROVE_CKPT_WRITE_PICTURES=1 writes them. Otherwise the lines in them are compared with those of
the run.
"""

import os
import re
from html import escape

import pytest

from datatrove_ckpt.testing import FakeServer
from tests.pages import ROOT
from tests.ptys import Terminal, on_terminal
from tests.yaml_jobs import write_tasks

PICTURES = ROOT / "docs/pictures"
COLUMNS = 112
_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" role="img">{}</svg>\n'
)


def of_terminal(lines):
    """A picture of these lines."""
    rows = [
        f'<text x="14" y="{25 + 19 * row}" textLength="{8.4 * len(line):.1f}">{escape(line)}</text>'
        for row, line in enumerate(lines)
        if line
    ]
    style = "text { font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #f4f3ef; white-space: pre; }"
    width, height = round(28 + 8.4 * max(map(len, lines))), 19 * len(lines) + 20
    ground = '<rect width="100%" height="100%" rx="8" fill="#1b1b1a"/>'
    return _SVG.format(width, height, width, "\n".join([f"<style>{style}</style>", ground, *rows]))


def of_page(page):
    """A picture of the beginning of a report: its figures and first two charts, without the
    tooltips.
    """
    style = re.search(r"<style>.*?</style>", page, re.DOTALL)
    main = re.sub(
        r'<rect [^>]*class="hit">.*?</rect>', "", page[page.index("<main>") :], flags=re.DOTALL
    )
    shown = "</section>".join(main.split("</section>")[:2]) + "</section></div></main>"
    shown = shown.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    body = f'<body xmlns="http://www.w3.org/1999/xhtml">{shown}</body>'
    whole = f'<foreignObject width="1120" height="760">{body}</foreignObject>'
    return _SVG.format(1120, 760, 1120, f"{style and style[0]}{whole}")


def shape(picture):
    """The first word of each piece of text.

    Numbers, and what is said of them, are other ones in each run.
    """
    shown = re.sub(r"<style>.*?</style>", "", picture, flags=re.DOTALL)
    return [
        found[0] for text in re.split(r"<[^>]*>", shown) if (found := re.search(r"[a-z]{4,}", text))
    ]


def keep(name, picture):
    path = PICTURES / f"{name}.svg"
    if os.environ.get("DATATROVE_CKPT_WRITE_PICTURES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(picture)
    assert shape(path.read_text()) == shape(picture), (
        "DATATROVE_CKPT_WRITE_PICTURES=1 writes it anew"
    )


@pytest.mark.alone  # how long it takes decides which numbers there are
def test_the_pictures_show_what_a_run_prints(here, command):
    write_tasks(here, 4, 40)
    checkpoints = "runs/summaries"
    with FakeServer(delay=lambda payload, times: 0.4) as server, Terminal(COLUMNS) as terminal:
        job = f"run --input input/ --prompt {{text}} --endpoint {server.url} --model my-model --run-folder runs/summaries"
        more = "--tasks 4 --executor.workers=2 --max-concurrent-generations 2"
        with on_terminal(terminal, here, *f"{job} {more}".split()) as process:
            half = re.compile(r" (9|1[0-3])\d docs, 2/4 tasks.*left")
            lines = terminal.until(lambda lines: bool(lines) and half.search(lines[-1]) is not None)
            bar, status = lines[-1], command("status", checkpoints).out
            terminal.until(lambda lines: process.poll() is not None)
    keep("bar", of_terminal(["$ datatrove-ckpt run summaries.yaml", bar]))
    keep("status", of_terminal([f"$ datatrove-ckpt status {checkpoints}", *status.splitlines()]))
    command("report", checkpoints, "-o", "report.html")
    keep("report", of_page((here / "report.html").read_text()))
