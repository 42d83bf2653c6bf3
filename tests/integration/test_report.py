"""``datatrove-ckpt report``, as typed: what it writes, what it refuses."""

import os
import shutil
import threading

import pytest

from datatrove_ckpt.cli.main import main
from tests.rank_folders import minutes, start, write_rank

T = 1_800_000_000.0


@pytest.fixture
def checkpoints(tmp_path):
    for number in range(3):
        write_rank(
            tmp_path / "checkpoints", number, [start(T), *minutes(T, 5, 10, 100)], chunks=5, tasks=3
        )
    return tmp_path / "checkpoints"


def test_the_page_is_replaced_in_one_step_and_nothing_else_is_left(checkpoints, tmp_path):
    (tmp_path / "out").mkdir()
    page = tmp_path / "out/report.html"
    page.write_text("old")
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    assert main(["report", str(checkpoints), "-o", str(page)]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in page.parent.iterdir()] == ["report.html"]
    assert {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()} == before


def test_a_link_stays_one_and_a_pipe_too(checkpoints, tmp_path):
    page, link, pipe = (tmp_path / name for name in ("page.html", "link.html", "pipe"))
    page.write_text("old")
    link.symlink_to(page)
    assert main(["report", str(checkpoints), "-o", str(link)]) == 0
    assert link.is_symlink()
    assert page.read_text().startswith("<!DOCTYPE html>")
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert main(["report", str(checkpoints), "-o", str(pipe)]) == 0
    reader.join()
    assert read[0].startswith("<!DOCTYPE html>")
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("", 2, "is a folder. Give the name of a file"),
        ("missing/page.html", 1, "cannot be written: No such file"),
    ],
)
def test_a_page_that_cannot_be_written_is_told(target, code, said, checkpoints, tmp_path, command):
    assert said in command("report", checkpoints, "-o", tmp_path / target, code=code).err


def test_without_a_name_it_is_written_into_the_run_folder(checkpoints, here, command):
    run = here / "run"
    shutil.copytree(checkpoints, run / "checkpoints")
    assert command("report", run).out.startswith(f"{run / 'report.html'}: the report of ")
    assert command("report", "run/checkpoints").out.startswith("run/report.html: ")
    shutil.copytree(checkpoints, here / "elsewhere")
    assert command("report", "elsewhere").out.startswith("report.html: ")


def test_where_nothing_is_there_is_no_report(here, command):
    assert "contains no checkpoint" in command("report", here, code=2).err
    assert list(here.iterdir()) == []
