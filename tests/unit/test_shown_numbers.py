"""Each number of a run, as it is shown: ``status``, ``--json``, the report, MLflow and Prometheus.

tests/data/numbers is the folder of a run whose tasks are in all states, as a run left it.
"""

import os
import re
import shutil
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash
from prometheus_client import generate_latest

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.history import ProgressRecord, RequestHistograms, parse_line
from datatrove_ckpt.cli.status import describe, table
from datatrove_ckpt.cli.track import RunTracker
from datatrove_ckpt.common.counts import RunNumbers, SkippedLines, WorkCounts
from datatrove_ckpt.generation.prometheus import RankSnapshot, families
from datatrove_ckpt.run_folder.report.page import report_page
from datatrove_ckpt.run_folder.run_state import read_run_state, to_json
from tests.golden import hold
from tests.rank_folders import place_at

DATA = Path(__file__).parents[1] / "data"
NOW = 1_800_000_550.0


@pytest.fixture
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(params=["run", "one task", "0.1.0", "0.2.0"])
def place(request, here, utc):
    """A run's folder, all of whose files are ten seconds old."""
    kept = DATA / "releases" / request.param
    if not kept.exists():
        kept = DATA / "numbers"
    shutil.copytree(kept / "checkpoints", here / "checkpoints")
    if request.param == "one task":
        for folder in (here / "checkpoints").glob("[0-9]*"):
            if folder.name != "00000":
                shutil.rmtree(folder)
    for path in here.rglob("*"):
        os.utime(path, (NOW - 10, NOW - 10))
    return place_at(here / "checkpoints")


def test_what_is_shown_of_a_run(place, request, monkeypatch):
    name = request.node.callspec.params["place"]
    state = read_run_state(place, NOW)
    hold("numbers", f"status: {name}", "\n".join(describe(state)))
    hold("numbers", f"tasks: {name}", "\n".join(table([*state.ranks, *state.retries], NOW)))
    hold("numbers", f"json: {name}", to_json(state).decode())
    page = report_page(state).replace(str(Path.cwd()), "HERE").replace(__version__, "VERSION")
    page = page.replace(Path.cwd().name, "NAME")  # pytest numbers the folders as they come
    tables = re.sub("<style>.*?</style>|<svg.*?</svg>", "", page, flags=re.DOTALL)
    hold("numbers", f"report: {name}", f"{xxhash.xxh3_64_hexdigest(page.encode())}\n{tables}")
    monkeypatch.setattr(time, "time", lambda: NOW)
    job, at, values, status = RunTracker(lambda job: None, place=place).look()
    sent = [f"{job.parameters}", f"{at} {status}"]
    hold("numbers", f"MLflow: {name}", "\n".join(sent + [f"{one} {values[one]}" for one in values]))


def ranks():
    """Each task of the run as its port shows it at its last line."""
    for number in (0, 1):
        path = DATA / f"numbers/checkpoints/{number:05d}/history.jsonl"
        records = [parse_line(line) for line in path.read_bytes().splitlines(keepends=True)]
        minutes = [record for record in records if isinstance(record, ProgressRecord)]
        spreads = [record for record in records if isinstance(record, RequestHistograms)]
        yield RankSnapshot("run", number, "node7", "17_5", 1e9, "running", minutes[-1], spreads[-1])


def test_the_page_of_prometheus():
    registry = SimpleNamespace(collect=lambda: families(list(ranks())))
    hold("numbers", "Prometheus", generate_latest(registry).decode())


def test_numbers_add_subtract_down_to_zero_and_refuse_unknown_names():
    some = WorkCounts(requests=5, errors=Counter({"timeout": 2}))
    more = WorkCounts(requests=3, sent=1, errors=Counter({"timeout": 1, "HTTP 503": 1}))
    assert (some + more).fields() == {
        **WorkCounts(requests=8, sent=1).fields(),
        "errors": {"timeout": 3, "HTTP 503": 1},
    }
    assert some - more == WorkCounts(requests=2, errors=Counter({"timeout": 1}))
    assert SkippedLines(2, 1) | SkippedLines(1, 5) == SkippedLines(2, 5)
    assert not (RunNumbers(exact=True) + RunNumbers(exact=False)).exact
    with pytest.raises(TypeError, match="requets"):
        WorkCounts(requets=1)
    with pytest.raises(AttributeError, match="requets"):
        some.requets = 1
    with pytest.raises(AttributeError, match="damaged"):
        SkippedLines(1, 1) + some
