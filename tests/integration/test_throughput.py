"""What share of the engines' ideal a run gets, on small simulated engines in virtual time: the jobs
of ``python -m tests.bench.throughput`` in small.

The ideal has all requests in the engines' queues from the start, so it forgets prefixes that a run
can keep: several of these shares are far above 1.
"""

import re
import time

import pytest

from datatrove_ckpt.run_folder.run_location import RunLocation
from datatrove_ckpt.run_folder.run_state import read_run_state
from datatrove_ckpt.run_folder.status_text import status_lines
from tests.bench.throughput_jobs import Job, Kills, calls, in_sequence, one_call, shared
from tests.bench.throughput_kills import MOST_TWICE
from tests.bench.throughput_run import killed, run

ENGINE = {"blocks": 1600, "budget": 2048}  # 25,600 tokens


@pytest.fixture
def share_of_ideal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "monotonic", time.monotonic)  # it becomes the virtual time's

    def measure(job):
        ideal = run(job, "ideal", seed=1)
        ours = run(job, "ours", seed=1)
        assert ours["requests"] == ideal["requests"]
        return ideal["seconds"] / ours["seconds"], ours

    return measure


def equal_rows(number, answer):
    def rows(chance):
        return [{"text": f"{row} " * 8, "answers": [answer]} for row in range(number)]

    return rows


def test_all_places_of_eight_servers_are_taken(share_of_ideal):
    engine = {"places": 100, "base": 0.1}
    share, _ = share_of_ideal(Job(8, equal_rows(1_050, 80), one_call, engine))
    assert share >= 0.85  # 0.66, if they shared 500 requests


def test_rows_that_share_a_document_go_to_one_server(share_of_ideal):
    job = Job(4, shared(40, prompt=1000, answer=10), one_call, ENGINE)
    share, ours = share_of_ideal(job)
    assert share >= 1.6
    assert ours["cached"] >= 0.8  # seven of eight rows find the document


def test_shuffled_rows_wait_for_the_server_that_has_their_document(share_of_ideal):
    job = Job(4, shared(48, each=24, prompt=1000, answer=10, shuffled=True), one_call, ENGINE)
    share, ours = share_of_ideal(job)
    assert share >= 3  # 1.0, if they do not wait; which rows are read first moves it by 0.2
    assert ours["cached"] >= 0.85


@pytest.mark.parametrize("shuffled", [False, True])
def test_status_says_that_caches_lose_what_they_had_in_the_sample(
    tmp_path, monkeypatch, share_of_ideal, shuffled
):
    checkpoints = tmp_path / "run/checkpoints"
    for folder, documents in (("sample", 2), ("run", 20)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        rows = shared(documents, each=10, prompt=3000, answer=60, shuffled=shuffled)
        run(Job(1, rows, one_call, ENGINE), "ours", seed=1)
    (tmp_path / "sample/checkpoints").rename(checkpoints / "sample-00001")
    said = dict(status_lines(read_run_state(RunLocation("", checkpoints, []))))
    assert ("prefix cache" in said) == shuffled
    if shuffled:
        assert re.match(
            r"gave \d+(\.\d)? % of the prompts' tokens, and \d\d(\.\d)? % in samples\. Sort the input "
            r".*input: \{sql: \"select \* from 'FILE' order by COLUMN\"\}",
            said["prefix cache"],
        )


def test_new_documents_push_no_open_document_out_of_the_cache(share_of_ideal):
    job = Job(1, calls(100, 3, prompt=500, answer=30), in_sequence(), ENGINE)
    share, ours = share_of_ideal(job)
    assert share >= 1.5
    assert ours["cached"] >= 0.6
    assert ours["preemptions"] == 0


def test_the_others_take_over_what_a_dead_server_had(share_of_ideal):
    rows = calls(100, 3, prompt=500, answer=30)
    share, _ = share_of_ideal(Job(2, rows, in_sequence(), ENGINE, death=(2.0, 3.0)))
    assert share >= 1.1


def test_two_tasks_over_the_same_servers_push_nothing_out_of_their_caches(share_of_ideal):
    rows = calls(100, 3, prompt=500, answer=30)
    share, _ = share_of_ideal(Job(2, rows, in_sequence(), ENGINE, tasks=2))
    assert share >= 1.4


@pytest.mark.parametrize("victim", ["client", "server"])
def test_kills_cost_no_long_answers(victim, monkeypatch):
    monkeypatch.setattr(time, "monotonic", time.monotonic)
    job = Kills(victim, every=30.0, answers=60, tokens=1500)
    before = killed(job, "false", seed=1)
    ours = killed(job, "ours", seed=1)
    assert 0 < ours["twice"] <= min(MOST_TWICE, before["twice"] / 5)
    assert before["mean"] < 0.9 * before["true_mean"]  # long ones were cut, and drawn again
    assert ours["mean"] == pytest.approx(ours["true_mean"], rel=0.01)
