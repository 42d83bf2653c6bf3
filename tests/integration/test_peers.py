"""The systems side by side: every figure of the table is there, and what is not installed says
so.
"""

import subprocess
import sys

import pytest

from tests.bench.measure import ROOT


@pytest.mark.slow
def test_a_killed_run_of_each_system_gets_its_row(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tests.bench.peers",
        "--systems",
        "ours",
        "datatrove",
        "curator",
    ]
    small = [
        "--documents",
        "200",
        "--concurrency",
        "8",
        "--latency-ms",
        "20",
        "--folder",
        str(tmp_path),
    ]
    process = subprocess.run(
        [*command, *small], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows = [
        line.strip("| ").split(" | ")
        for line in process.stdout.splitlines()
        if line.startswith("| ")
    ]
    ours, datatrove, curator = rows[1:]
    assert (ours[0], ours[6:8]) == ("ours", ["0", "0"]), process.stdout
    assert int(ours[5]) < 100, "answers of the first half are paid once"
    assert all(float(cell) > 0 for cell in [*ours[1:5], *ours[8:]])
    assert datatrove[0] == "datatrove"
    # datatrove writes its `last_chunk` file in place: a kill that meets it empty ends every later
    # start.
    if not datatrove[1].startswith(
        "exit code 1: ValueError: invalid literal for int() with base 10: ''"
    ):
        assert datatrove[6:8] == ["0", "0"], process.stdout
        assert all(float(cell) > 0 for cell in [*datatrove[1:5], *datatrove[8:]])
    assert curator[:2] == [
        "curator",
        "not installed: ModuleNotFoundError: No module named 'bespokelabs'",
    ]
