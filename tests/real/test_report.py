"""The report in a real Chromium: of a run of real processes that were killed three times, with a rank that is slow."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.real.chromium import Chromium, install
from tests.real.report_job import KILLS, SLOW, Endpoint, run_and_kill

TASKS, DOCUMENTS = 4, 40

pytestmark = pytest.mark.timeout(600)  # the first one may install Chromium


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run."""
    folder = tmp_path_factory.mktemp("report") / "run <b>&amp;"
    with Endpoint() as server:
        run_and_kill(folder, server, TASKS, DOCUMENTS)
    return folder


def command(folder: Path, *arguments: str) -> bytes:
    done = subprocess.run(
        [sys.executable, "-m", "datatrove_ckpt", *arguments], cwd=folder, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    prices = ("--price-per-gpu-hour", "2.50", "--price-per-million-tokens", "0.15,0.60")
    command(run, "report", "job.yaml", "-o", "report.html", *prices)
    return run / "report.html"


def browse(folder: Path, what: Callable[[Chromium], Awaitable[Any]]) -> Any:
    """What comes of it. The page must have said nothing, and asked for nothing but itself."""

    async def all_of_it() -> Any:
        async with Chromium(folder) as browser:
            found = await what(browser)
        assert browser.console == []
        assert {url.partition(":")[0] for url in browser.requests} <= {"file", "data"}
        return found

    install()
    return asyncio.run(all_of_it())


def at(content: Any, path: str) -> Any:
    """The value at a path of keys; the sum of those at several."""
    total = None
    for one in path.split(" + "):
        value = content
        for key in one.split("."):
            value = value[key]
        total = value if total is None else total + value
    return total


def test_the_figures_are_those_of_status(run: Path, page: Path, tmp_path: Path) -> None:
    async def figures(browser: Chromium) -> Any:
        await browser.open(page)
        return await browser.evaluate(
            "[...document.querySelectorAll('[data-figure]')].map(one => [one.dataset.figure, one.dataset.value])"
        )

    shown = browse(tmp_path, figures)
    status = orjson.loads(command(run, "status", "job.yaml", "--json"))
    assert len(shown) == 13
    assert {path: float(value) for path, value in shown} == {path: at(status, path) for path, _ in shown}
    totals = status["totals"]
    assert totals["documents"] == TASKS * DOCUMENTS
    assert totals["attempts_without_a_word"] > 0


def test_what_happened_can_be_seen(run: Path, page: Path, tmp_path: Path) -> None:
    async def look(browser: Chromium) -> Any:
        await browser.open(page)
        slow = "[...document.querySelectorAll('tr:has(td.b:nth-child(6) .slow)')].map(one => one.innerText)"
        return {
            "slow": await browser.evaluate(slow),
            "titles": await browser.evaluate("[...document.querySelectorAll('h2')].map(one => one.textContent)"),
            "text": await browser.evaluate("document.body.innerText"),
            "scripts": await browser.evaluate("document.scripts.length"),
        }

    found = browse(tmp_path, look)
    (slow,) = found["slow"]
    assert slow.split()[:2] == [str(SLOW), "finished"]
    titles = ["Documents finished", "Documents per second", "Tokens per second", "What interruptions cost"]
    titles += ["Where answers came from", "Errors over time", "Dead letters"]
    titles += ["Latency of requests", "Prompt tokens of requests", "Completion tokens of requests"]
    assert found["titles"] == [*titles, "Ranks", "Settings", "Identity"]
    assert found["text"].count("without a word") >= KILLS
    assert "HTTP 503" in found["text"]
    assert str(run) in found["text"], "its name is text, whatever it holds"
    assert found["scripts"] == 0


def test_it_fits_light_and_dark_screens_of_any_width_and_paper(page: Path, tmp_path: Path) -> None:
    async def look(browser: Chromium) -> Any:
        colours = []
        for dark in (False, True):
            for width in (380, 1280):
                await browser.open(page, dark=dark, width=width)
                assert await browser.evaluate("document.documentElement.scrollWidth") <= width
                assert (await browser.picture()).startswith(b"\x89PNG")
            colours.append(await browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        await browser.open(page, dark=True, media="print")
        colours.append(await browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (await browser.print()).startswith(b"%PDF")
        return colours

    light, dark, paper = browse(tmp_path, look)
    assert light != dark
    assert paper == "rgb(255, 255, 255)"
