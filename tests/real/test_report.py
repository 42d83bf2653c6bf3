"""The report in a real Chromium: of a run of real processes that were killed three times."""

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import orjson
import pytest

from datatrove_ckpt.testing import FakeServer
from tests.real.environment import DEBIAN, install_debian
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

TASKS, DOCUMENTS, KILLS = 4, 40, 3
SLOW = 2  # the rank whose documents take seven times as long

pytestmark = pytest.mark.timeout(600)  # the first one may install Chromium

# A minute of the history is half a second long.
ROLLOUT = """
from datatrove_ckpt.generation import progress

progress.MINUTE_SECONDS = 0.5


async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})
"""
# A page around the report, which looks at it in a narrow and a wide window. The report itself runs
# no script.
AROUND = """<iframe id=report src=report.html height=900></iframe><script>
report.onload = () => {
  const page = report.contentDocument, all = (which, what) => [...page.querySelectorAll(which)].map(what)
  const widths = [380, 1280].map(width => (report.width = width, page.documentElement.scrollWidth))
  document.body.dataset.found = JSON.stringify({
    widths, background: getComputedStyle(page.body).backgroundColor, text: page.body.innerText,
    sums: all('dl.sums dt', one => [one.textContent, one.nextElementSibling.textContent]),
    titles: all('h2', one => one.textContent), scripts: page.scripts.length,
    loaded: report.contentWindow.performance.getEntriesByType('resource').map(one => one.name)})
}</script>"""


def text(task, number):
    kind = {3: "bad", 5: "busy"}.get(number % 40, "slow" if task == SLOW else "fast")
    return f"{kind} {task} {number} {'word ' * (number % 90)}"


def seconds(payload, times):
    asked = payload["messages"][-1]["content"]
    return 1.5 if asked.startswith("slow") else 0.1 + len(asked) % 10 / 50


def refusal(payload, times):
    """Some documents are refused; at the first request of others the endpoint is busy."""
    kind = payload["messages"][-1]["content"].split()[0]
    return 400 if kind == "bad" else 503 if kind == "busy" and not times else None


def command(folder, *arguments):
    line = [sys.executable, "-m", "datatrove_ckpt", *arguments]
    done = subprocess.run(line, cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of the run, with its report."""
    folder = tmp_path_factory.mktemp("report") / "run <b>&amp;"
    folder.mkdir()
    (folder / "half_seconds.py").write_text(ROLLOUT)
    with FakeServer(delay=seconds, status=refusal) as server:
        job = job_yaml(
            f"{ENDPOINT.replace('URL', server.url)}, max_concurrent_generations: 4", TASKS
        )
        job = re.sub("rollout_fn: .*", "rollout_fn: half_seconds.rollout", job).replace(
            "workers: 1", f"workers: {TASKS}"
        )
        job = job.replace("workers: 1", f"workers: {TASKS}")
        job += "          records_per_chunk: 10\n          skip_bad_requests: true\n"
        write_job(
            folder,
            job,
            *([text(task, number) for number in range(DOCUMENTS)] for task in range(TASKS)),
        )
        for _ in range(KILLS):
            line = [sys.executable, "-m", "datatrove_ckpt", "run", "job.yaml"]
            asked = len(server.payloads) + TASKS * DOCUMENTS // (KILLS + 3)
            with subprocess.Popen(
                line, cwd=folder, stderr=subprocess.DEVNULL, start_new_session=True
            ) as process:
                while len(server.payloads) < asked:
                    assert process.poll() is None, "the job has ended before its time"
                    time.sleep(0.01)
                os.killpg(process.pid, signal.SIGKILL)
        command(folder, "run", "job.yaml")
    command(folder, "report", "job.yaml", "-o", "report.html")
    return folder


def chromium(folder, *options):
    """What it prints. It has no network, and says nothing on its console."""
    if not shutil.which("chromium"):
        install_debian(DEBIAN["chromium"])
    line = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    line += [
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
    ]
    line += [
        "--allow-file-access-from-files",
        "--virtual-time-budget=10000",
        f"--user-data-dir={folder}/profile",
    ]
    done = subprocess.run([*line, *options], cwd=folder, capture_output=True, text=True, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def looked_at(folder, dark=False):
    (folder / "around.html").write_text(AROUND)
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    (found,) = re.findall(
        'data-found="([^"]*)"', chromium(folder, scheme, "--dump-dom", "around.html")
    )
    return json.loads(html.unescape(found))


def test_the_page_shows_what_happened_with_the_figures_of_status(run):
    found = looked_at(run)
    status = orjson.loads(command(run, "status", "job.yaml", "--json"))
    printed = command(run, "status", "job.yaml").decode().splitlines()
    assert {"documents", "requests", "tokens"} <= dict(found["sums"]).keys()
    for topic, said in found["sums"][2:]:  # before them: where ranks and input stand
        assert f"  {topic:<10} {said}" in printed
    assert status["totals"]["counts"]["read"] == TASKS * DOCUMENTS
    assert status["totals"]["killed"] > 0
    titles = ["Documents per second", "Tokens per second", "Attempts that ended early", "Requests"]
    assert found["titles"] == titles
    assert found["text"].count("killed") >= KILLS
    assert "HTTP 503" in found["text"]
    assert str(run) in found["text"], "its name is text, whatever it holds"
    assert (found["scripts"], found["loaded"]) == (0, [])


def test_it_fits_light_and_dark_screens_of_any_width_and_can_be_printed(run):
    light, dark = looked_at(run), looked_at(run, dark=True)
    assert light["widths"] == dark["widths"] == [380, 1280]
    assert light["background"] != dark["background"]
    chromium(run, "--print-to-pdf=report.pdf", "report.html")
    assert (run / "report.pdf").read_bytes().startswith(b"%PDF")
