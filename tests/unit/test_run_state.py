"""The state of a run from the files of its ranks: sums, and which ranks need attention, and why."""

import datetime
import os
from dataclasses import replace

import pytest

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.history import OutageStatus, WaitStatus
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.checkpoint.rank_summary import JobTotals
from datatrove_ckpt.cli.status import describe
from datatrove_ckpt.common.counts import RunNumbers, WorkCounts
from datatrove_ckpt.run_folder.report.page import escaped, report_page
from datatrove_ckpt.run_folder.run_location import RunLocation
from datatrove_ckpt.run_folder.run_state import read_run_state
from datatrove_ckpt.run_folder.run_summary import _attempts
from datatrove_ckpt.run_folder.status_text import status_lines
from tests.rank_folders import (
    HERE,
    done,
    failed,
    finish,
    minute,
    minutes,
    start,
    stopped,
    work,
    write_rank,
)

T = 1_800_000_000.0
"""When the attempts of these tests start."""
MIN = 60.0


@pytest.fixture
def hold():
    """Works on ranks, in this process, until the test ends."""
    locks = []
    yield lambda folder: locks.append(Lock(folder / layout.LOCK))
    for lock in locks:
        lock.release()


@pytest.fixture
def running(tmp_path, hold):
    """Writes a rank on which this process works since ``at``. Returns its folder."""

    def write(*records, number=0, at=T, **made):
        folder = write_rank(tmp_path, number, [start(at, host=HERE), *records], **made)
        hold(folder)
        return folder

    return write


def read(root, now=T, **place):
    return read_run_state(RunLocation(str(root), root, [str(root)], **place), now)


def read_one(root, now=T):
    (rank,) = read(root, now).ranks
    return rank


def write_history(folder, records):
    (folder / layout.HISTORY).write_bytes(b"".join(record.to_line() for record in records))


# what ranks do -----------------------------------------------------------------------------------


def test_a_rank_that_was_killed_in_its_first_minute_has_worked_until_its_files_changed(
    tmp_path,
):
    folder = write_rank(tmp_path, chunks=3, journal=10, history=[start(T, host=HERE), minute(T, 0)])
    os.utime(folder / layout.COMMITS, (T, T))
    os.utime(layout.journal_path(folder, 3), (T + 40, T + 40))
    state = read(tmp_path, T + 100)
    assert (state.ranks[0].state, state.totals.average.documents) == ("lost", 1.0)


KILLED = "its last attempt was killed, or its node lost, or its disk full; its last line is 4 min old: pid 42 on node7, Slurm job 17_3"


@pytest.mark.parametrize(
    "ends, state, reason",
    [
        (
            [failed(T + 5 * MIN, "DiskFull: no room")],
            "failed",
            "4 min ago on node7: DiskFull: no room",
        ),
        (
            [stopped(T + 5 * MIN)],
            "interrupted",
            "stopped by SIGTERM 4 min ago",
        ),
        ([], "lost", KILLED),
    ],
)
def test_a_rank_whose_attempt_ended_says_how(tmp_path, ends, state, reason):
    write_rank(tmp_path, history=[start(T, job="17_3"), *minutes(T, 5, 1), *ends])
    if not ends:  # where locks end at the node, a history that goes on is a rank that runs
        assert read_one(tmp_path, T + 6 * MIN).state == "running"
    rank = read_one(tmp_path, T + 9 * MIN)
    assert (rank.state, rank.trouble, rank.reason) == (state, state, reason)
    assert rank.lost_in_flight == (0 if ends else 4)


def test_a_rank_that_runs_without_a_word_is_silent(tmp_path, running):
    running(*minutes(T, 5, 1))
    rank = read_one(tmp_path, T + 17 * MIN)
    assert (rank.state, rank.trouble) == ("running", "silent")
    assert rank.reason.startswith("no word for 12 min from pid ")
    assert rank.reason.endswith(f" on {HERE}, which holds its lock")
    assert rank.rates.documents == 0


def stuck(start_at, number):
    """Ten documents in the first minute, and none afterwards."""
    quiet = (WaitStatus(60.0 * max(0, n - 1)) for n in range(number + 1))
    lines = (minute(start_at + MIN * n, min(n, 1) * 10, wait=wait) for n, wait in enumerate(quiet))
    return [start(start_at, host=HERE), *lines]


def test_a_rank_in_which_nothing_is_finished_is_stuck(tmp_path, hold):
    folder = write_rank(tmp_path, history=stuck(T, 11))
    hold(folder)
    rank = read_one(tmp_path, T + 11 * MIN)
    write_history(folder, stuck(T, 10))
    not_yet = read_one(tmp_path, T + 10 * MIN)
    assert (rank.state, rank.trouble) == ("running", "stuck")
    assert rank.reason == "no answer and no document for 10 min: 4 requests in flight, 2 waiting"
    assert not_yet.trouble is None


@pytest.mark.parametrize(
    "seconds, is_stuck, patience",
    [(28.0, False, 600.0), (31.0, True, 600.0), (590.0, True, 600.0), (130.0, True, 0.0)],
)
def test_ranks_whose_requests_all_fail_are_said_at_once_with_no_rate_and_no_time_left(
    tmp_path, running, seconds, is_stuck, patience
):
    """One outage has one reason, however many ranks it has met."""
    for number in range(2):  # they have lost the server at nearly the same time
        silence = OutageStatus(seconds - number, patience, patience > 0)
        lines = [*minutes(T, 3, 60, 3600), minute(T + 3 * MIN + 10, 180, 3600, silence=silence)]
        running(*lines, number=number)
    history = [start(T, host=HERE), *minutes(T, 2, 60, 120), done(T + 2 * MIN)]
    write_rank(tmp_path, 2, history=history, chunks=1, per_chunk=120, finished=True)
    state = read(tmp_path, T + 3 * MIN + 10)
    since = datetime.datetime.fromtimestamp(T + 3 * MIN + 10 - seconds).astimezone()
    what, ends = "gives no answers", "each request waits for its request_timeout"
    if patience:
        what, ends = "is unreachable", "a task stops after 600 s (server_patience_seconds)"
    expected = (None, "")
    if is_stuck:
        expected = ("stuck", f"the server {what}: no answer since {since:%H:%M}; {ends}")
    assert {(rank.trouble, rank.reason) for rank in state.ranks[:2]} == {expected}
    assert sum("no answer since" in line for line in describe(state)) == is_stuck
    assert bool(state.totals.rates.documents) == bool(state.totals.time_left) == (not is_stuck)
    assert (state.totals.in_flight, state.totals.waiting) == (8, 4)


def test_attempts_are_counted_with_the_time_of_those_that_saved_nothing(tmp_path):
    """``repair`` takes numbers, too."""
    history = [start(T), minute(T, 0), stopped(T + 10)]
    history += [start(T + 20, 4), minute(T + 20, 0, attempt=4), stopped(T + 25, 4)]
    write_rank(tmp_path, history=history, attempts=4)
    state = read(tmp_path, T + 100)
    assert dict(status_lines(state))["attempts"].startswith("2; 15 s together")
    assert state.totals.working_seconds == 15.0


def test_a_cost_without_a_counted_request_estimates_the_whole(tmp_path):
    """A kill may lose the count of the answers whose cost is known."""
    paid = work(10, requests=0, cost=5_000_000_000)
    history = [start(T), replace(minute(T + 1, 10, 100), total=paid), stopped(T + 2)]
    write_rank(tmp_path, history=history, chunks=1)
    assert "; about 50 for the whole input" in dict(status_lines(read(tmp_path, T + 100)))["paid"]


@pytest.mark.parametrize("uncertain, said", [(0, ""), (1, "at least ")])
def test_the_closing_line_says_at_least_where_an_end_made_it_uncertain(uncertain, said):
    sent = WorkCounts(sent=5, retries=1, completion_tokens=9)
    numbers = RunNumbers(number_of_attempts=2, uncertain=uncertain, work=sent)
    job = JobTotals(ranks=1, parts=1, numbers=numbers)
    assert _attempts(job) == (
        f" In 2 attempts of 1 task, {said}5 requests were sent, {said}1 of them again, and {said}9 "
        "completion tokens paid outside finished chunks."
    )


# sums --------------------------------------------------------------------------------------------


def test_the_sums_of_a_run(tmp_path, running):
    write_rank(tmp_path, 0, [start(T), *minutes(T, 10, 10, 100)], chunks=10, finished=True, tasks=4)
    for number in (1, 2):
        lines = minutes(T + 5 * MIN, 6, 10, 200)
        running(*lines, number=number, at=T + 5 * MIN, chunks=5, journal=10, tasks=4)
    state = read(tmp_path, T + 11 * MIN)
    totals = state.totals
    assert (state.tasks, totals.not_started, dict(totals.states)) == (
        4,
        1,
        {"finished": 1, "running": 2},
    )
    assert (totals.documents, totals.chunks, totals.unfinished_chunks) == (100 + 60 * 2, 20, 2)
    # The fourth rank is taken to have as much as the others on average: (100 + 200 + 200) / 3.
    assert (totals.position.done, totals.position.total, totals.position.unit) == (
        220,
        500 + 166,
        "rows",
    )
    assert totals.total_is_estimated
    assert totals.time_left == pytest.approx((666 - 220) / (2 / 6))
    assert totals.working_seconds == 11 * MIN
    assert totals.work.requests == (100 + 60 + 60) * 2
    assert (totals.in_flight, totals.number_of_attempts) == (8, 3)
    page = report_page(state)
    printed = list(describe(state))
    for topic, text in status_lines(state):
        assert f"  {topic:<10} {text}" in printed
        assert escaped(text) in page, "the report shows what status prints"


def test_the_run_tells_its_number_of_ranks_and_only_else_the_yaml_file(tmp_path):
    write_rank(tmp_path / "new", history=[start(T)], tasks=3)
    assert read(tmp_path / "new", tasks=5, config={"executor": {}}).totals.not_started == 2
    write_rank(tmp_path / "unknown", history=[start(T)])
    assert read(tmp_path / "unknown", tasks=5, config={"executor": {}}).totals.not_started == 4


def test_an_unfinished_rank_needs_attention_when_nothing_runs(tmp_path, hold):
    write_rank(tmp_path, 0, chunks=1)
    folder = write_rank(tmp_path, 1, [start(T, host=HERE), minute(T, 0)])
    hold(folder)
    assert read(tmp_path).troubled == []
    finish(folder)
    assert [rank.trouble for rank in read(tmp_path).troubled] == ["unfinished"]
