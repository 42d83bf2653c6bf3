"""``datatrove-ckpt report``, as typed: what it writes, what it refuses."""

import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest

from datatrove_ckpt.checkpoint.history import RequestHistograms
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.common.counts import LogHistogram
from datatrove_ckpt.testing import outputs
from tests.rank_folders import minutes, start, write_rank

T = 1_800_000_000.0


@pytest.fixture
def checkpoints(tmp_path):
    for number in range(3):
        write_rank(
            tmp_path / "checkpoints", number, [start(T), *minutes(T, 5, 10, 100)], chunks=5, tasks=3
        )
    return tmp_path / "checkpoints"


def test_the_page_is_written_beside_nothing_else(checkpoints, tmp_path):
    page = tmp_path / "out/report.html"
    page.parent.mkdir()
    before = outputs(checkpoints)
    assert main(["report", str(checkpoints), "-o", str(page)]) == 0
    source = page.read_text()
    assert source.startswith("<!DOCTYPE html>")
    assert f"<title>{tmp_path.name}: running</title>" in source
    assert re.search(r", as of [-0-9]{10} [:0-9]{8} UTC\. Last change [^<]* ago\.<", source)
    titles = re.findall("<h2>([^<]*)</h2>", source)
    assert titles == ["Documents per second", "Tokens per second"], "an older history has no more"
    assert [*page.parent.iterdir()] == [page]
    assert outputs(checkpoints) == before


def test_without_a_name_it_is_written_into_the_run_folder(checkpoints, here, command):
    run = here / "run"
    shutil.copytree(checkpoints, run / "checkpoints")
    assert command("report", run).out.startswith(f"{run / 'report.html'}: the report of ")
    assert command("report", "run/checkpoints").out.startswith("run/report.html: ")
    shutil.copytree(checkpoints, here / "elsewhere")
    assert command("report", "elsewhere").out.startswith("report.html: ")


BAD = {"looping": [["<b>a</b>", "again and again"]], "invalid": [["b", "</td><script>"]]}


def test_cost_bad_answers_and_busy_places_are_shown_over_time_and_some_answers(tmp_path):
    """Two ranks, of which one is killed after three of six minutes and starts again at once."""
    for number in range(2):
        lines = minutes(T, 6, 10, 100)
        for line in lines:
            read = line.documents.read
            reasons = Counter(stop=2 * read, looping=read)
            lengths = LogHistogram.of([100.0] * read)
            line.documents = replace(
                line.documents,
                answers=2 * read,
                cut_off=read // 5,
                reasons=reasons,
                lengths=lengths,
            )
            line.total = replace(line.total, cost=read * 10**9)
            line.places = 8
            line.in_flight = 4 - 2 * number
            line.attempt = 2 if number and line.at > T + 180 else 1
        lines.append(RequestHistograms(at=T + 360, attempt=1, examples=BAD))
        write_rank(tmp_path, number, lines, chunks=5, tasks=2)
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    charts = {
        title: re.findall("<title>([^<]*)</title>", drawn)
        for title, drawn in re.findall("(?s)<h2>([^<]*)</h2>(.*?)</section>", page.read_text())
    }
    cost = charts["Cost per hour"]
    assert {re.sub(".* UTC\n", "", each) for each in cost} == {"1,200 cost per hour"}
    bad = {re.sub(".* UTC\n", "", each) for each in charts["Bad answers, %"]}
    assert bad == {"10 cut off\n50 looping"}
    busy = [re.sub(".* UTC\n", "", each) for each in charts["Capacity in use at the servers, %"]]
    assert set(busy[:70]) == {"37.5 capacity in use"}, "6 of 16"
    assert "50 capacity in use" in busy[80:110], "the killed rank has no places"
    assert busy[-5] == "37.5 capacity in use"
    source = page.read_text()
    assert "<bdi>&lt;b&gt;a&lt;/b&gt;</bdi>" in source
    assert "<script>" not in source
