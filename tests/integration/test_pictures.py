"""docs/pictures: the bar, ``status`` and the report of one real run, drawn from what they print.

DATATROVE_CKPT_WRITE_PICTURES=1 writes them. Otherwise the run must still print each line in them; a
further one needs no new picture.
"""

import json
import os
import re
import textwrap
from html import escape

import pytest

from datatrove_ckpt.testing import FakeServer
from tests.pages import ROOT
from tests.ptys import Terminal, on_terminal
from tests.yaml_jobs import write_tasks

PICTURES = ROOT / "docs/pictures"
COLUMNS = 112
NARROW = 58  # of the recording, which is read on telephones, too
_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" role="img">{}</svg>\n'
)


_STYLE = (
    "text { font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #f4f3ef; white-space: pre; }"
)
_STILL = "@media (prefers-reduced-motion: reduce) { g { animation: none !important } }"
_GROUND = '<rect width="100%" height="100%" rx="8" fill="#1b1b1a"/>'


def text_of(lines):
    rows = [
        f'<text x="14" y="{25 + 19 * row}" textLength="{8.4 * len(line):.1f}">{escape(line)}</text>'
        for row, line in enumerate(lines)
        if line
    ]
    return "\n".join(rows)


def of_terminal(lines):
    """A picture of these lines."""
    width, height = round(28 + 8.4 * max(map(len, lines))), 19 * len(lines) + 20
    inside = f"<style>{_STYLE}</style>\n{_GROUND}\n{text_of(lines)}"
    return _SVG.format(width, height, width, inside)


def recording(frames):
    """A picture that moves. It begins with its last frame, so that it is full at first sight.

    Args:
        frames: for how many seconds each is seen, and its lines. Where pictures do not move, or
            the reader wants none that does, the last is seen.
    """
    whole = sum(seconds for seconds, _ in frames)
    styles, drawn, start = [_STYLE, _STILL], [], 0.0
    for number, (seconds, lines) in enumerate(frames):
        last = number == len(frames) - 1
        steps = f"{100 * start / whole:.2f}% {{ opacity: 1 }} "
        start += seconds
        steps += "" if last else f"{100 * start / whole:.2f}%, 100% {{ opacity: 0 }} "
        before = "0% { opacity: 0 } " if number else ""
        styles.append(f"@keyframes f{number} {{ {before}{steps}}}")
        shown = whole - frames[-1][0]  # before the last frame
        times = f"{whole:.1f}s step-end -{shown:.1f}s infinite"
        animation = f"opacity: {last:d}; animation: f{number} {times}"
        drawn.append(f'<g style="{animation}">{text_of(lines)}</g>')
    width = round(28 + 8.4 * NARROW)
    height = 19 * max(len(lines) for _, lines in frames) + 20
    inside = "\n".join([f"<style>{' '.join(styles)}</style>", _GROUND, *drawn])
    return _SVG.format(width, height, width, inside)


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
    """The first word of each piece of text; of a recording, in its last frame.

    Numbers, and what is said of them, are other ones in each run.
    """
    last = picture.rpartition('<g style="opacity: 1')[2]
    shown = re.sub(r"<style>.*?</style>", "", last, flags=re.DOTALL)
    return [
        found[0] for text in re.split(r"<[^>]*>", shown) if (found := re.search(r"[a-z]{4,}", text))
    ]


def keep(name, picture):
    path = PICTURES / f"{name}.svg"
    if os.environ.get("DATATROVE_CKPT_WRITE_PICTURES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(picture)
    gone = [word for word in shape(path.read_text()) if word not in shape(picture)]
    assert not gone, "DATATROVE_CKPT_WRITE_PICTURES=1 writes it anew"


@pytest.mark.alone  # how long it takes decides which numbers there are
def test_the_pictures_show_what_a_run_prints(here, command):
    write_tasks(here, 4, 40)
    checkpoints = "runs/summaries"
    with FakeServer(delay=lambda payload, times: 0.4) as server, Terminal(COLUMNS) as terminal:
        job = f"run --input input/ --prompt {{text}} --endpoint {server.url} --model my-model --run-folder runs/summaries"
        more = "--tasks 4 --executor.workers=2 --max-concurrent-generations 2"
        with on_terminal(terminal, here, *f"{job} {more}".split()) as process:
            half = re.compile(r" (9|1[0-3])\d docs.* left.* 2/4 tasks")
            lines = terminal.until(lambda lines: bool(lines) and half.search(lines[-1]) is not None)
            bar, status = lines[-1], command("status", checkpoints).out
            terminal.until(lambda lines: process.poll() is not None)
    keep("bar", of_terminal(["$ datatrove-ckpt run summaries.yaml", bar]))
    keep("status", of_terminal([f"$ datatrove-ckpt status {checkpoints}", *status.splitlines()]))
    command("report", checkpoints, "-o", "report.html")
    keep("report", of_page((here / "report.html").read_text()))


JOB = """\
run_folder: runs/summaries
input: summaries.jsonl
prompt: "Summarise in one sentence: {text}"
endpoint: URL
model: my-model
records_per_chunk: 10
max_concurrent_generations: 8
"""
RUN = "$ datatrove-ckpt run summaries.yaml"


def unwrapped(lines):
    """The text of a narrow terminal, which has wrapped it at any character."""
    return re.sub(r" +", " ", "".join(line.ljust(NARROW) for line in lines))


@pytest.mark.alone
def test_the_recording_shows_a_run_that_is_killed_and_finished_by_the_same_command(here):
    rows = [json.dumps({"id": f"{number}", "text": f"text {number}"}) for number in range(240)]
    (here / "summaries.jsonl").write_text("\n".join(rows))
    frames = [(1.0, [RUN])]

    def film(terminal, until, shown):
        """Takes a picture of each new bar, below what was shown before, up to this percentage."""
        percent = 0
        while percent < until:
            line = terminal.until(lambda lines: lines[-1:] not in ([], frames[-1][1][-1:]))[-1]
            if bar := re.match(r" *(\d+)\.\d % .*left", line):
                frames.append((0.6, [*shown, line]))
                percent = int(bar[1])

    with FakeServer(delay=lambda payload, times: 0.35) as server:
        (here / "summaries.yaml").write_text(JOB.replace("URL", server.url))
        words = ["run", "summaries.yaml"]
        with Terminal(NARROW) as terminal, on_terminal(terminal, here, *words) as process:
            film(terminal, 50, [RUN])
            process.kill()
        shown = [*frames[-1][1], "$ kill -9 %1", RUN]
        frames += [(1.5, shown[:-1]), (1.0, shown)]
        with Terminal(NARROW) as terminal, on_terminal(terminal, here, *words) as process:
            resuming = re.compile(r"Resuming: .* output files\)")
            lines = terminal.until(lambda lines: resuming.search(unwrapped(lines)) is not None)
            shown += textwrap.wrap(resuming.search(unwrapped(lines))[0], NARROW)
            film(terminal, 80, shown)
            lines = terminal.until(lambda lines: process.poll() is not None)
    closing = re.search(r"240 of 240 documents are in .*? requests were sent", unwrapped(lines))
    said = closing[0].replace(f"{here}/", "")
    frames.append((6.0, [*frames[-1][1], *textwrap.wrap(said, NARROW)]))
    keep("crash", recording(frames))
