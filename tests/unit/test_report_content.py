"""From the state of a run to the page: every figure is there, and nothing that must not be."""

from collections import Counter

from datatrove_ckpt.checkpoint.clock import Seconds
from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_read import Rates
from datatrove_ckpt.checkpoint.history_records import (
    InputPosition,
    Progress,
    Start,
    WorkCounts,
)
from datatrove_ckpt.checkpoint.layout import HISTORY
from datatrove_ckpt.cli.status import describe
from datatrove_ckpt.maintenance.report.gather import gather
from datatrove_ckpt.maintenance.run_state import RankState, RunState, Totals
from tests.unit.test_report_page import Reader

T = 1_790_000_000.0


def rank(folder, number, per_minute=60):
    """A rank that has run for some minutes after an attempt that was killed in its first one."""
    home = folder / f"{number:05d}"
    home.mkdir(parents=True)
    records = [
        Start(at=T, attempt=1, host="n1", pid=7),
        Progress(at=T, attempt=1, in_flight=4),
    ]
    records += [Start(at=T + 100, attempt=2, host="n2", pid=8)]
    for minute in range(11):
        done = minute * per_minute
        work = WorkCounts(done, done, 0, 10 * done, 5 * done, cached=2, errors={"timeout": minute})
        records.append(
            Progress(
                at=T + 100 + 60 * minute,
                attempt=2,
                seconds=Seconds(60.0 * minute, 60.0 * minute + 5),
                documents=DocumentCounts(done, done),
                total=work,
                own=work,
            )
        )
    (home / HISTORY).write_bytes(b"".join(record.to_line() for record in records))
    done = per_minute * 10
    counts, position = DocumentCounts(done, done - 1, 0, 1), InputPosition(done, 4 * done, "rows")
    return RankState(
        "", number, home, "running", counts=counts, position=position, seconds=700, number_of_attempts=2, chunks=3,
        work=WorkCounts(done, done, 0, 10 * done, 5 * done, cached=2, retries=3),
    )  # fmt: skip


def run(ranks, **changes):
    totals = Totals(
        states=Counter(one.state for one in ranks),
        counts=DocumentCounts(2400, 2390, 4, 6, 2405, 23_000, 11_500),
        unfinished=DocumentCounts(7, 7, 0, 0, 7, 1000, 500),
        chunks=12,
        position=InputPosition(1, 4, "rows"),
        work=WorkCounts(2407, 2500, 6, 24_000, 12_000, cached=100, retries=9, resent=2, restarts=1),
        lost_in_flight=16,
        rates=Rates(4.0, 4.1, 40.0, 20.0),
        average=Rates(3.5, 3.6, 35.0, 18.0),
        working_seconds=700.0,
        time_left=7200.0,
        dead_letters=Counter({"RequestRejected: 400 too long": 4, "ValueError: no": 2}),
        number_of_attempts=8,
        killed=4,
        started=T,
    )
    identity = {"model": "org/model", "records_per_chunk": 100, "tasks": 5}
    fields = {
        "tasks": 5,
        "identity": identity,
        "ranks": ranks,
        "totals": totals,
        "newest": T + 700,
    }
    return RunState("a/folder", False, T + 710, **fields | changes)


def table(page, title):
    (one,) = (table for table in page.tables if table.title == title)
    return one


def test_the_sums_are_those_that_status_prints(tmp_path):
    state = run([rank(tmp_path, number) for number in range(2)])
    page = gather(state)
    printed = list(describe(state))
    for topic, text in page.sums[2:]:
        assert f"  {topic:<10} {text}" in printed
    assert {topic for topic, _ in page.sums} >= {
        "ranks",
        "input",
        "documents",
        "rate",
        "tokens",
        "requests",
        "attempts",
    }
    assert dict(page.sums)["input"].startswith("25.0 % of the input, about 2 h left, until ")
    assert (page.state, page.model, page.where) == ("running", "org/model", "a/folder")
    assert page.age == "Last change 10 s ago."


def test_what_a_rank_sent_before_its_first_line_about_that_is_not_known(tmp_path):
    killed = rank(tmp_path, 0)
    killed.state = "lost"
    (killed.folder / HISTORY).write_bytes(Start(at=T, attempt=1, host="n1", pid=7).to_line())
    (row,) = table(gather(run([killed])), "Attempts that ended early").rows
    assert row[-1] == "not known"


def test_ranks_without_history_are_left_out_of_tables(tmp_path):
    ranks = [rank(tmp_path, number) for number in range(3)]
    (ranks[1].folder / HISTORY).unlink()
    (ranks[2].folder / HISTORY).write_bytes(
        b"no history\n" + (ranks[2].folder / HISTORY).read_bytes()
    )
    page = gather(run(ranks))
    assert [row[0] for row in table(page, "Attempts that ended early").rows] == ["0", "2"]


def test_nothing_that_ever_ran_makes_a_page(tmp_path):
    state = RunState("folder", False, T, ranks=[RankState("", 0, tmp_path / "00000", "unfinished")])
    page = gather(state)
    assert page.charts == []
    Reader(page.html())
