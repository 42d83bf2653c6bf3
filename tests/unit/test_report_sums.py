"""From the lines of histories to what the report draws: intervals, interruptions, histograms, chunks, prices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.checkpoint.clock import Seconds
from datatrove_ckpt.checkpoint.commits import Commit, DocumentCounts
from datatrove_ckpt.checkpoint.history_records import (
    End,
    Progress,
    Record,
    ServerEvent,
    Spread,
    Start,
    WorkCounts,
)
from datatrove_ckpt.checkpoint.lines import seal
from datatrove_ckpt.maintenance.report import timeline
from datatrove_ckpt.maintenance.report.content import Content, Interruption
from datatrove_ckpt.maintenance.report.gather import chunk_runs, histograms
from datatrove_ckpt.maintenance.report.interruptions import interruptions, together
from datatrove_ckpt.maintenance.report.page import page
from datatrove_ckpt.maintenance.report.prices import Prices, costs, gpus_in
from datatrove_ckpt.maintenance.report.rank_log import RankLog, parse_log
from datatrove_ckpt.maintenance.run_state import RankState, RunState, Totals

T = 1_790_000_000.0


def line(attempt: int, at: float, documents: int, in_flight: int = 0, **work: Any) -> Progress:
    total = WorkCounts(documents=documents, **work)
    counts = DocumentCounts(documents, documents, 0, 0, documents, 10 * documents, 5 * documents)
    seconds = Seconds(at, at)
    return Progress(at=T + at, attempt=attempt, seconds=seconds, documents=counts, total=total, in_flight=in_flight)


def log_of(records: Sequence[Record]) -> RankLog:
    return parse_log(b"".join(record.to_line() for record in records))


def start(attempt: int, at: float, **changes: Any) -> Start:
    return Start(at=T + at, attempt=attempt, host="node7", pid=1, **changes)


def server(attempt: int, at: float, what: Any, why: str = "", name: str = "0") -> ServerEvent:
    return ServerEvent(at=T + at, attempt=attempt, what=what, name=name, why=why)


def killed_once(until: float = 600) -> RankLog:
    """Half a document a second; killed after 290 seconds, started again at 400, ready at 430."""
    records: list[Record] = [start(1, 0), server(1, 0, "start"), server(1, 0, "ready")]
    records += [line(1, at, at // 2, in_flight=7) for at in range(0, 241, 60)]
    records += [start(2, 400), server(2, 401, "start"), server(2, 430, "ready"), line(2, 400, 145), line(2, 430, 145)]
    records += [line(2, at, 145 + (at - 430) // 2) for at in range(490, int(until) + 1, 60)]
    return log_of(records)


def axis(*histories: RankLog, now: float | None = None) -> timeline.Axis:
    found = timeline.time_axis(histories, now)
    assert found is not None
    return found


def between(found: timeline.Axis, values: Any, low: float, high: float) -> float:
    """The sum of the values in intervals that lie between two times."""
    inside = (found.edges[:-1] >= T + low - 1e-6) & (found.edges[1:] <= T + high + 1e-6)
    return float(values[inside].sum())


# time ----------------------------------------------------------------------------------------------------------------


def test_an_axis_reaches_from_the_first_record_to_the_last_or_to_now() -> None:
    history = killed_once(550)
    assert axis(history).edges[[0, -1]].tolist() == [T, T + 550]
    assert axis(history, now=T + 1000).edges[-1] == T + 1000
    assert len(axis(history).edges) == timeline.MAX_INTERVALS + 1
    assert timeline.time_axis([log_of([]), log_of([])]) is None


def test_documents_are_counted_when_they_were_finished_and_none_is_lost() -> None:
    history = killed_once(550)
    found = axis(history)
    times = timeline.rank_times(history, found)
    assert times.documents.sum() == pytest.approx(205)
    assert between(found, times.documents, 0, 240) == pytest.approx(120, abs=2)
    assert between(found, times.documents, 240, 304) == pytest.approx(25, abs=3), "before the kill, in no line"
    assert between(found, times.documents, 304, 428) == 0
    assert between(found, times.documents, 430, 550) == pytest.approx(60, abs=3)
    assert times.prompt_tokens.sum() == pytest.approx(10 * times.documents.sum())


def test_a_rank_ran_while_its_attempts_wrote_lines_and_until_now_if_it_runs() -> None:
    history = killed_once(550)
    found = axis(history, now=T + 700)
    assert timeline.rank_times(history, found).ran.sum() == pytest.approx(240 + 150)
    assert timeline.rank_times(history, found, until=T + 700).ran.sum() == pytest.approx(240 + 300)


def test_rates_are_unknown_while_nothing_ran_and_sums_hold_all_ranks() -> None:
    first, second = killed_once(550), log_of([start(1, 430), line(1, 430, 0), line(1, 550, 60)])
    found = axis(first, second)
    sums = timeline.summed(found, [timeline.rank_times(each, found) for each in (first, second)])
    assert sums.documents.values[-1] == 265

    def rates(low: float, high: float) -> set[float | None]:
        known = zip(found.edges - T, sums.document_rate.values, strict=False)
        return {value and round(value, 6) for at, value in known if low < at < high}

    assert rates(250, 390) == {None}
    assert rates(10, 200) == {0.5}
    assert rates(440, 540) == {1.0}


def test_records_of_a_clock_that_was_set_back_do_no_harm() -> None:
    history = log_of([line(1, 100, 10), line(1, 50, 20), line(2, 20, 5), line(2, 200, 40)])
    found = axis(history)
    times = timeline.rank_times(history, found)
    assert (times.documents >= 0).all()
    assert times.documents.sum() <= 40


# interruptions -------------------------------------------------------------------------------------------------------


def test_a_kill_costs_the_time_until_servers_are_ready_and_the_requests_in_flight() -> None:
    (found,) = interruptions("3", killed_once(), is_running=True)
    assert (found.rank, found.at, found.away, found.starting, found.repeated) == ("3", T + 240, 160, 30, 7)
    assert found.seconds == 190
    assert (found.why, found.place) == ("without a word", "node7")


def test_the_way_an_attempt_ended_is_told() -> None:
    records: list[Record] = [start(1, 0, job="77_1"), End(at=T + 9, attempt=1, why="stopped", what="SIGTERM")]
    records += [start(2, 20), End(at=T + 30, attempt=2, why="error", what="DiskFull: no room")]
    records += [start(3, 40), End(at=T + 50, attempt=3, why="done")]
    found = list(interruptions("0", log_of(records), is_running=False))
    told = [("stopped by SIGTERM", "node7, Slurm job 77_1"), ("DiskFull: no room", "node7")]
    assert [(one.why, one.place) for one in found] == told
    assert [one.away for one in found] == [11, 10]


def test_an_attempt_that_still_runs_is_no_interruption_and_one_that_nothing_followed_is_open() -> None:
    history = log_of([start(1, 0), line(1, 60, 5, in_flight=3)])
    assert list(interruptions("0", history, is_running=True)) == []
    (found,) = interruptions("0", history, is_running=False)
    assert (found.away, found.starting, found.repeated) == (None, None, 3)


def test_what_was_in_flight_when_an_attempt_was_killed_is_not_0_because_its_last_line_has_none() -> None:
    idle, busy = log_of([start(1, 0), line(1, 0, 0)]), log_of([start(1, 0), line(1, 60, 5, in_flight=3)])
    ended = log_of([start(1, 0), line(1, 60, 5), End(at=T + 60, attempt=1, why="stopped", what="SIGTERM")])
    found = [next(interruptions(str(rank), log, is_running=False)) for rank, log in enumerate((idle, busy, ended))]
    assert [one.repeated for one in found] == [None, 3, 0]
    assert [one.repeated for one in together(found)] == [None, 0], "two were killed in one minute"
    told = page(Content("folder", "", "lost", T, "1", interruptions=found))
    assert "it is not known how many requests were sent again" in told
    assert '<td class="n">not known</td>' in told


def test_a_server_that_died_is_an_interruption_until_it_is_ready_again() -> None:
    records: list[Record] = [start(1, 0), server(1, 5, "ready"), server(1, 5, "ready", name="1")]
    records += [
        server(1, 50, "death", "CUDA out of memory"),
        server(1, 52, "restart"),
        server(1, 70, "ready", name="1"),
    ]
    records += [server(1, 95, "ready"), End(at=T + 100, attempt=1, why="done")]
    (found,) = interruptions("0", log_of(records), is_running=False)
    assert (found.at, found.why, found.away, found.starting) == (T + 50, "server 0 died: CUDA out of memory", 0, 45)


def test_ranks_that_ended_together_are_one_interruption_whose_costs_are_added() -> None:
    found = [Interruption(str(rank), T + rank, "without a word", f"n{rank // 2}", 10, 2, 4) for rank in range(4)]
    found += [Interruption("0", T + 30, "without a word", "n0", 10, None, 4)]
    found += [Interruption("1", T + 5, "stopped by SIGTERM", "n1", 20), Interruption("2", T + 500, "without a word")]
    killed, stopped, again, late = together(reversed(found))
    assert (killed.rank, killed.ranks, killed.place) == ("4 ranks: 0-3", 4, "2 places: n0, ...")
    assert (killed.at, killed.away, killed.starting, killed.repeated) == (T, 40, 8, 16)
    assert (stopped.rank, stopped.why, stopped.starting) == ("1", "stopped by SIGTERM", None)
    assert (again.rank, again.ranks, late.rank) == ("0", 1, "2")


# histograms, chunks --------------------------------------------------------------------------------------------------


def test_histograms_add_the_last_of_each_attempt() -> None:
    def spread(attempt: int, *milliseconds: float) -> Spread:
        found = Spread(at=T + attempt, attempt=attempt)
        for value in milliseconds:
            found.milliseconds.count(value)
            found.prompt_tokens.count(7)
        return found

    history = log_of([spread(1, 900), spread(1, 900, 950), spread(2, 90_000)])
    latency, prompt = histograms([history, log_of([spread(1, 0.5)])], 4)
    assert (latency.title, latency.unit, latency.count) == ("Latency of requests", "s", 4)
    assert len(latency.bins) <= 26
    (around,) = [one for one in latency.bins if one[0] <= 0.9 < one[1]]
    assert around[2] == 2
    assert latency.bins[0] == (0.0, pytest.approx(latency.bins[1][0]), 1)
    assert prompt.count == 4
    assert [high for _, high, _ in latency.bins[:-1]] == [low for low, _, _ in latency.bins[1:]]


def write_commits(folder: Path, dead: dict[int, int], indices: list[int]) -> None:
    commits = [Commit(index, index * 2, DocumentCounts(2, 2, 0, dead.get(index, 0))) for index in indices]
    (folder / "commits.jsonl").write_bytes(b"".join(seal(commit.to_json()) for commit in commits))


def test_chunks_are_runs_of_one_state(tmp_path: Path) -> None:
    write_commits(tmp_path, {3: 1}, [1, 0, 2, 3, 4, 7])
    for index in (5, 7, 8):
        (tmp_path / f"chunk_{index:05d}.jsonl").touch()
    expected = [(0, 3, "done"), (3, 4, "dead"), (4, 5, "done"), (5, 6, "open"), (7, 8, "done"), (8, 9, "open")]
    assert chunk_runs(tmp_path) == expected


def test_a_damaged_or_missing_log_leaves_the_rest(tmp_path: Path) -> None:
    assert chunk_runs(tmp_path / "missing") == []
    write_commits(tmp_path, {}, [0, 1])
    path = tmp_path / "commits.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    assert chunk_runs(tmp_path) == [(0, 1, "done")]


# prices --------------------------------------------------------------------------------------------------------------


def run_of(seconds: float, ranks: int = 2, **work: Any) -> RunState:
    states = [RankState("", number, Path(), "finished", seconds=seconds) for number in range(ranks)]
    totals = Totals(counts=DocumentCounts(1000, 1000), work=WorkCounts(**work))
    return RunState("folder", False, T, ranks=states, totals=totals)


def test_gpus_and_tokens_cost_what_their_prices_say() -> None:
    run = run_of(7200, prompt_tokens=3_000_000, completion_tokens=1_000_000)
    found = {one.label: one.value for one in costs(run, Prices(2.5, (0.1, 0.4), 8), {}, 360)}
    assert found["GPU hours"] == pytest.approx(32)
    assert found["Cost of GPUs"] == pytest.approx(80)
    assert found["Lost to interruptions"] == pytest.approx(2)
    assert found["Cost of tokens"] == pytest.approx(0.7)
    assert found["Cost"] == pytest.approx(80.7)
    assert list(costs(run, Prices(), {}, 0)) == []


def test_gpus_are_those_of_the_yaml_file() -> None:
    settings = {"server_type": "vllm", "tp": 4, "replicas": 2}
    config = {"executor": {"init_args": {"pipeline": [{}, {"init_args": {"config": settings}}]}}}
    assert gpus_in(config) == 8
    assert gpus_in({}) is None
    (hours, *_) = costs(run_of(3600, 1), Prices(gpu_hour=1), config, 0)
    assert hours.value == pytest.approx(8)


def test_of_many_lines_an_even_share_is_read_and_those_around_each_start() -> None:
    records: list[Record] = [start(1, 0)]
    for number in range(1, 4):
        records += [start(number, 1000 * number), server(number, 1000 * number + 5, "ready")]
        for minute in range(300):
            records.append(line(number, 1000 * number + 10 + minute, 300 * number + minute))
            if minute % 10 == 9:
                spread = Spread(at=T + 1000 * number + 10 + minute, attempt=number)
                for _ in range(minute):
                    spread.milliseconds.count(5)
                records.append(spread)
    data = b"".join(record.to_line() for record in records)
    log = parse_log(data, 30)
    assert [attempt.number for attempt in log.attempts] == [1, 2, 3]
    assert sum(len(attempt.minutes) for attempt in log.attempts) <= 30 + 8
    for attempt in log.attempts:
        first = 300 * attempt.number
        assert [attempt.minutes[0].documents, attempt.minutes[-1].documents] == [first, first + 299]
        assert attempt.spread is not None
        assert attempt.spread.milliseconds == {int(4 * 2.3219280948) + 1: 299}
    assert log.last == parse_log(data).last


# reading -------------------------------------------------------------------------------------------------------------


def test_torn_and_damaged_lines_cost_themselves_only() -> None:
    data = b"".join(record.to_line() for record in [start(1, 0), line(1, 0, 0), line(1, 60, 30), line(1, 120, 60)])
    lines = data.splitlines(keepends=True)
    assert parse_log(data[:-5]).damaged == 0
    assert parse_log(data[:-5]).last == parse_log(b"".join(lines[:3])).last
    damaged = parse_log(lines[0] + lines[1][:-9] + b"x" * 8 + b"\n" + b"\x00\n" + b"".join(lines[2:]))
    assert damaged.damaged == 2
    assert [minute.documents for minute in damaged.attempts[0].minutes] == [30, 60]
