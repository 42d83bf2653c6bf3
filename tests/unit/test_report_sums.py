"""From the lines of histories to what the report shows: intervals, attempts, requests."""

import pytest

from datatrove_ckpt.checkpoint.history_read import parse_history
from datatrove_ckpt.checkpoint.history_records import (
    ServerEvent,
    Spread,
)
from datatrove_ckpt.checkpoint.layout import HISTORY
from datatrove_ckpt.maintenance.report.gather import gather
from datatrove_ckpt.maintenance.report.histories import (
    time_axis,
)
from datatrove_ckpt.maintenance.report.page import clock
from datatrove_ckpt.maintenance.run_state import RankState, RunState
from tests import rank_folders
from tests.rank_folders import done, failed, minute, stopped, work
from tests.unit.test_report_page import Reader

T = 1_790_000_000.0


def line(attempt, at, documents, in_flight=0):
    return minute(T + at, documents, attempt=attempt, in_flight=in_flight, own=work(in_flight))


def log_of(records):
    return parse_history([record.to_line() for record in records], 1000)


def start(attempt, at, job=None):
    return rank_folders.start(T + at, attempt, job=job)


def server(attempt, at, what, why="", name="0"):
    return ServerEvent(at=T + at, attempt=attempt, what=what, name=name, why=why)


def killed_once():
    """Half a document a second; killed after 290 seconds, started again at 400, ready at 430."""
    records = [start(1, 0), server(1, 0, "start"), server(1, 0, "ready")]
    records += [line(1, at, at // 2, in_flight=7) for at in range(0, 241, 60)]
    records += [
        start(2, 400),
        server(2, 401, "start"),
        server(2, 430, "ready"),
        line(2, 400, 145),
        line(2, 430, 145),
    ]
    records += [line(2, at, 145 + (at - 430) // 2) for at in range(490, 551, 60)]
    return log_of(records)


def over_time(*logs, now=None, until=None):
    found = time_axis(logs, now)
    for log in logs:
        found.add(log, until)
    return found


# time --------------------------------------------------------------------------------------------


def test_rates_are_unknown_while_nothing_ran_and_sums_hold_all_ranks():
    found = over_time(
        killed_once(), log_of([start(1, 430), line(1, 430, 0), line(1, 550, 60)]), now=T + 700
    )
    assert found.documents.sum() == pytest.approx(265)

    def rates(low, high, found=found):
        known = zip(found.edges - T, found.rate(found.documents), strict=False)
        return {value and round(value, 6) for at, value in known if low < at < high}

    assert rates(250, 390) == {None}
    assert rates(10, 200) == {0.5}
    assert rates(440, 540) == {1.0}
    assert rates(560, 690) == {None}
    assert rates(560, 690, over_time(killed_once(), now=T + 700, until=T + 700)) == {0.0}, (
        "it still runs"
    )


def test_records_of_a_clock_that_was_set_back_do_no_harm():
    found = over_time(log_of([line(1, 100, 10), line(1, 50, 20), line(2, 20, 5), line(2, 200, 40)]))
    assert (found.documents >= 0).all()
    assert found.documents.sum() <= 40


# attempts ----------------------------------------------------------------------------------------


def report_of(folder, *ranks, state="lost"):
    """The tables of the report of ranks with these histories, by title."""
    states = []
    for number, records in enumerate(ranks):
        home = folder / str(number)
        home.mkdir()
        (home / HISTORY).write_bytes(b"".join(record.to_line() for record in records))
        states.append(RankState("", number, home, state))
    return {
        table.title: table for table in gather(RunState("folder", False, T, ranks=states)).tables
    }


def test_the_way_an_attempt_ended_is_told(tmp_path):
    records = [start(1, 0, job="77_1"), stopped(T + 9)]
    records += [start(2, 20), failed(T + 30, "DiskFull: no room", 2)]
    records += [start(3, 40), line(3, 45, 5, in_flight=3)]
    records += [start(4, 60), done(T + 70, 4)]
    table = report_of(tmp_path, records, state="finished")["Attempts that ended early"]
    assert table.rows == [
        ["0", clock(T), clock(T + 9), "stopped by SIGTERM", "node7, Slurm job 77_1", "0"],
        ["0", clock(T + 20), clock(T + 30), "DiskFull: no room", "node7", "0"],
        ["0", clock(T + 40), clock(T + 45), "killed", "node7", "3"],
    ]


def test_a_rank_without_history_has_no_row_and_what_one_sent_before_its_first_line_is_not_known(
    tmp_path,
):
    (row,) = report_of(tmp_path, [], [start(1, 0)])["Attempts that ended early"].rows
    assert (row[0], row[-1]) == ("1", "not known")


def test_nothing_that_ever_ran_makes_a_page(tmp_path):
    state = RunState("folder", False, T, ranks=[RankState("", 0, tmp_path / "0", "unfinished")])
    page = gather(state)
    assert page.charts == []
    Reader(page.html())


def test_attempts_beyond_thirty_are_counted_and_the_last_shown(tmp_path):
    records = [start(number, 100 * number + number**2) for number in range(151)]
    table = report_of(tmp_path, records, state="running")["Attempts that ended early"]
    assert table.note.endswith("These are the last 30 of 150.")
    assert len(table.rows) == 30


# requests ----------------------------------------------------------------------------------------


def test_requests_of_all_attempts_have_their_latency_and_tokens(tmp_path):
    def spread(attempt, *milliseconds):
        found = Spread(at=T + attempt, attempt=attempt)
        for value in milliseconds:
            found.milliseconds.count(value)
            found.prompt_tokens.count(7)
        return found

    first = [start(1, 0), spread(1, 900), spread(1, 900, 950), start(2, 1), spread(2, 90_000)]
    table = report_of(tmp_path, first, [start(1, 0), spread(1, 0.5)])["Requests"]
    assert table.note.startswith("4 of 0 requests;")
    latency, prompt = table.rows
    assert latency == ["latency, ms", "1,024", "92,682", "92,682", "92,682"]
    assert prompt == ["prompt tokens", "8", "8", "8", "8"]


def test_of_many_lines_an_even_share_is_read_and_those_around_each_start():
    records = [start(1, 0)]
    for number in range(1, 4):
        records += [start(number, 1000 * number), server(number, 1000 * number + 5, "ready")]
        for second in range(300):
            records.append(line(number, 1000 * number + 10 + second, 300 * number + second))
            if second % 10 == 9:
                spread = Spread(at=T + 1000 * number + 10 + second, attempt=number)
                for _ in range(second):
                    spread.milliseconds.count(5)
                records.append(spread)
    history = parse_history([record.to_line() for record in records], 30)
    assert [attempt.number for attempt in history.attempts] == [1, 2, 3]
    assert len(history.minutes) <= 30 + 8
    for number in (1, 2, 3):
        first = 300 * number
        known = [one.documents.read for one in history.minutes if one.attempt == number]
        assert [known[0], known[-1]] == [first, first + 299]
    assert [spread.milliseconds for spread in history.spreads] == [
        {int(4 * 2.3219280948) + 1: 299}
    ] * 3
