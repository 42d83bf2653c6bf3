"""From the lines of histories to what the report shows: intervals, attempts, requests."""

from datatrove_ckpt.checkpoint.history_read import parse_history
from datatrove_ckpt.checkpoint.layout import HISTORY
from datatrove_ckpt.maintenance.report.gather import gather
from datatrove_ckpt.maintenance.report.histories import (
    time_axis,
)
from datatrove_ckpt.maintenance.run_state import RankState, RunState
from tests import rank_folders
from tests.rank_folders import minute, work

T = 1_790_000_000.0


def line(attempt, at, documents, in_flight=0):
    return minute(T + at, documents, attempt=attempt, in_flight=in_flight, own=work(in_flight))


def log_of(records):
    return parse_history([record.to_line() for record in records], 1000)


def start(attempt, at, job=None):
    return rank_folders.start(T + at, attempt, job=job)


def over_time(*logs, now=None, until=None):
    found = time_axis(logs, now)
    for log in logs:
        found.add(log, until)
    return found


# time --------------------------------------------------------------------------------------------


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


def test_a_rank_without_history_has_no_row_and_what_one_sent_before_its_first_line_is_not_known(
    tmp_path,
):
    (row,) = report_of(tmp_path, [], [start(1, 0)])["Attempts that ended early"].rows
    assert (row[0], row[-1]) == ("1", "not known")


# requests ----------------------------------------------------------------------------------------
