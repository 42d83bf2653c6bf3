"""``datatrove-ckpt report``, as typed: what it writes, what it refuses."""

import re
import shutil

import pytest

from datatrove_ckpt.checkpoint.history import RequestHistograms
from datatrove_ckpt.cli.main import main
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


def test_some_bad_answers_are_shown(tmp_path):
    lines = [*minutes(T, 6, 10, 100), RequestHistograms(at=T + 360, attempt=1, examples=BAD)]
    write_rank(tmp_path, 0, lines, chunks=5, tasks=1)
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    source = page.read_text()
    tables = dict(re.findall("(?s)<h2>([^<]*)</h2>(.*?)</section>", source))
    assert "<bdi>&lt;b&gt;a&lt;/b&gt;</bdi>" in tables["Bad answers"]
    assert "<script>" not in source
