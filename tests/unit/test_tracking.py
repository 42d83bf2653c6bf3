"""Histories become points, and points go to whoever keeps runs: what failed is sent later, with its own time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.history_records import End, InputPosition, Progress, Record, Start, WorkCounts
from datatrove_ckpt.checkpoint.layout import HISTORY, rank_folder
from datatrove_ckpt.maintenance import tracking
from datatrove_ckpt.maintenance.tracking import JobHistories, JobPoints, Point, Tracker

MINUTE = 60.0


def start(at: float) -> Start:
    return Start(at=at, attempt=1, host="node", pid=1)


def progress(at: float, documents: int, in_flight: int = 0, done: int = 0) -> Progress:
    total = WorkCounts(
        documents, documents, 0, 10 * documents, 2 * documents, 1, documents + 1, 1, 0, 0, {"timeout": 2}
    )
    return Progress(
        at=at,
        attempt=1,
        documents=DocumentCounts(documents, documents, 0, 0, documents),
        chunks=documents // 2,
        total=total,
        own=total,
        in_flight=in_flight,
        position=InputPosition(done, 100, "bytes"),
    )


def end(at: float, why: Any = "done") -> End:
    return End(at=at, attempt=1, why=why)


def added(points: JobPoints, records: Sequence[tuple[int, Record]], now: float = 0.0) -> list[Point]:
    return list(points.add(records, now))


# points --------------------------------------------------------------------------------------------------------------


def test_each_minute_has_a_point_with_the_sums_of_all_ranks() -> None:
    points = JobPoints(2)
    records = [(0, start(600)), (1, start(601)), (0, progress(610, 10, 4, 50)), (1, progress(615, 5, 3, 30))]
    assert added(points, records, now=659) == []
    (first,) = added(points, [], now=660)
    assert first.at == 660
    assert {name: first.values[name] for name in ("documents", "completion_tokens", "requests_in_flight")} == {
        "documents": 15, "completion_tokens": 30, "requests_in_flight": 7,
    }  # fmt: skip
    assert first.values["errors"] == 4
    assert first.values["input_done_ratio"] == pytest.approx(0.4)
    assert added(points, [], now=661) == [], "each minute once"
    (second,) = added(points, [(0, progress(670, 40))], now=720)
    assert (second.at, second.values["documents"]) == (720, 45)
    assert second.values["documents_per_second"] == pytest.approx(30 / 60)


def test_lines_that_were_not_sent_become_points_of_their_own_time() -> None:
    points = JobPoints(1)
    records: list[tuple[int, Record]] = [(0, start(600))]
    records += [(0, progress(600 + MINUTE * number + 30, number)) for number in range(5)]
    found = added(points, records, now=100_000)
    assert [(point.at, point.values["documents"]) for point in found] == [
        (660, 0), (720, 1), (780, 2), (840, 3), (900, 4),
    ]  # fmt: skip


def test_a_line_that_comes_late_counts_in_the_next_point() -> None:
    points = JobPoints(2)
    added(points, [(0, start(600)), (0, progress(610, 1))], now=660)
    (point,) = added(points, [(1, progress(630, 7)), (0, progress(670, 2))], now=720)
    assert (point.at, point.values["documents"]) == (720, 9)


def test_the_end_is_a_point_although_its_minute_is_not_over() -> None:
    points = JobPoints(1)
    added(points, [(0, start(600)), (0, progress(610, 1)), (0, progress(615, 3, in_flight=2)), (0, end(615))], now=616)
    (point,) = points.latest()
    assert (point.at, point.values["documents"], point.values["ranks_done"]) == (615, 3, 1)
    assert point.values["requests_in_flight"] == 0, "of a rank that has ended"
    assert list(points.latest()) == []


def test_a_rank_that_is_silent_does_not_run() -> None:
    points = JobPoints(2)
    records = [(0, start(600)), (0, progress(610, 1, 9)), (1, start(600)), (1, progress(960, 1, 4))]
    point = added(points, records, now=1020)[-1]
    assert (point.values["ranks_running"], point.values["requests_in_flight"]) == (1, 4)


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([None, None], "RUNNING"),
        (["done", None], "RUNNING"),
        (["done"], "KILLED"),  # the other one has not started
        (["done", "done"], "FINISHED"),
        (["done", "stopped"], "KILLED"),
        (["error", "stopped"], "FAILED"),
    ],
)
def test_the_status_is_that_of_the_job(ends: list[Any], status: str) -> None:
    points = JobPoints(2)
    records: list[tuple[int, Record]] = [(rank, start(600)) for rank in range(len(ends))]
    records += [(rank, end(601, why)) for rank, why in enumerate(ends) if why is not None]
    added(points, records, now=602)
    assert points.status(602) == status


def test_an_attempt_that_starts_again_runs() -> None:
    points = JobPoints(1)
    added(points, [(0, start(600)), (0, end(601, "error")), (0, start(602))], now=603)
    assert points.status(603) == "RUNNING"


def test_large_jobs_have_sums_only() -> None:
    points = JobPoints(100)
    (point,) = added(points, [(0, start(600)), (0, progress(610, 1))], now=660)
    assert not [name for name in point.values if "/" in name]
    assert "input_done_ratio" not in point.values, "of 99 ranks it is not known"


# histories -----------------------------------------------------------------------------------------------------------


def write(root: Path, rank: int, *records: Record) -> None:
    """Appends to the history of a rank."""
    folder = rank_folder(root, rank)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / HISTORY).open("ab") as file:
        file.writelines(record.to_line() for record in records)


def times(found: list[tuple[int, Record]]) -> list[tuple[int, float]]:
    return [(rank, record.at) for rank, record in found]


def test_each_line_is_read_once(tmp_path: Path) -> None:
    histories = JobHistories(tmp_path)
    (tmp_path / "00007").mkdir()  # has no history yet
    write(tmp_path, 0, start(1), progress(2, 1))
    write(tmp_path, 1, start(3))
    assert times(histories.new_records()) == [(0, 1), (0, 2), (1, 3)]
    assert histories.new_records() == []
    write(tmp_path, 0, progress(4, 1))
    assert times(histories.new_records()) == [(0, 4)]


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    histories = JobHistories(tmp_path)
    write(tmp_path, 0, start(1))
    line = progress(2, 1).to_line()
    with (rank_folder(tmp_path, 0) / HISTORY).open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert times(histories.new_records()) == [(0, 1)]
        file.write(line[20:])
    assert times(histories.new_records()) == [(0, 2)]


def test_old_lines_of_a_file_that_was_thinned_are_not_new(tmp_path: Path) -> None:
    histories = JobHistories(tmp_path)
    write(tmp_path, 0, *(progress(at, 1) for at in range(1, 10)))
    histories.new_records()
    new = tmp_path / "new"
    new.write_bytes(progress(1, 1).to_line() + progress(9, 1).to_line() + progress(11, 1).to_line())
    new.replace(rank_folder(tmp_path, 0) / HISTORY)
    assert times(histories.new_records()) == [(0, 11)]


def test_of_long_histories_the_ends_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(progress(1000, 1).to_line())
    monkeypatch.setattr(tracking, "_TAILS_BYTES", 0)
    monkeypatch.setattr(tracking, "_LEAST_TAIL_BYTES", 10 * size + 5)
    write(tmp_path, 0, *(progress(at, 1) for at in range(1000, 1100)))
    write(tmp_path, 1, *(progress(at, 1) for at in range(1080, 1085)))
    histories = JobHistories(tmp_path)
    found = histories.new_records()
    assert times(found) == [(0, at) for at in range(1090, 1100)] + [(1, at) for at in range(1080, 1085)]
    assert histories.whole_from == 1090, "before that, sums would be too small"
    write(tmp_path, 0, progress(1200, 1))
    assert times(histories.new_records()) == [(0, 1200)]


# the tracker ---------------------------------------------------------------------------------------------------------


class Run:
    """Keeps what it gets; as long as ``broken``, it raises."""

    def __init__(self, sent_until: float = 0.0) -> None:
        self.sent_until = sent_until
        self.points: list[Point] = []
        self.broken = False
        self.ends: list[str] = []

    def send(self, point: Point) -> None:
        if self.broken:
            raise ConnectionError("no network")
        self.points.append(point)

    def end(self, status: str) -> None:
        self.ends.append(status)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its last number is the time."""
    moments = [600.0]
    monkeypatch.setattr(tracking.time, "time", lambda: moments[-1])
    return moments


def make(root: Path, *runs: Run, ranks: int = 1) -> Tracker:
    return Tracker(root, ranks, [lambda _, run=run: run for run in runs])


def test_what_could_not_be_sent_is_sent_later_and_once(tmp_path: Path, now: list[float]) -> None:
    first, second = Run(), Run()
    tracked = make(tmp_path, first, second)
    write(tmp_path, 0, start(600), progress(610, 1))
    first.broken = True
    now.append(665)
    assert tracked.work(everything=False) == "ConnectionError: no network"
    assert [point.at for point in second.points] == [660], "one that is away does not hold up the other"
    write(tmp_path, 0, progress(670, 2))
    now.append(725)
    assert tracked.work(everything=False)
    first.broken = False
    now.append(726)
    assert tracked.work(everything=False) == ""
    assert [(point.at, point.values["documents"]) for point in first.points] == [(660, 1), (720, 2)]
    assert first.points == second.points


def test_a_second_process_goes_on_where_the_first_one_stopped(tmp_path: Path, now: list[float]) -> None:
    write(tmp_path, 0, start(600), progress(610, 1), progress(670, 2), progress(730, 3))
    now.append(785)
    run = Run(sent_until=720)
    make(tmp_path, run).work(everything=False)
    assert [point.at for point in run.points] == [780]


def test_the_end_of_the_job_closes_the_run(tmp_path: Path, now: list[float]) -> None:
    run = Run()
    tracked = make(tmp_path, run)
    write(tmp_path, 0, start(600))
    assert tracked.work(everything=False) == ""
    assert run.ends == []
    write(tmp_path, 0, progress(610, 1), end(611))
    assert tracked.work(everything=True) == ""
    assert [point.values["ranks_done"] for point in run.points] == [1]
    assert run.ends == ["FINISHED"]
    assert tracked.work(everything=True) == ""
    assert run.ends == ["FINISHED"], "nothing is new"
    now.append(725)  # the minute is over
    assert tracked.work(everything=True) == ""
    assert run.ends == ["FINISHED"], "only time has passed"
    write(tmp_path, 0, start(730), progress(731, 2), end(732))
    assert tracked.work(everything=True) == ""
    assert run.ends == ["FINISHED", "FINISHED"]
    assert [point.values["documents"] for point in run.points][-1] == 2


def test_a_run_that_cannot_be_made_is_made_later(tmp_path: Path, now: list[float]) -> None:
    attempts: list[float] = []
    run = Run()

    def maker(first_at: float) -> Run:
        attempts.append(first_at)
        if len(attempts) == 1:
            raise OSError("no route")
        return run

    tracked = Tracker(tmp_path, 1, [maker])
    write(tmp_path, 0, start(600), progress(610, 1))
    now.append(665)
    assert tracked.work(everything=False) == "OSError: no route"
    assert tracked.work(everything=False) == "", "although no line is new"
    assert attempts == [600, 600]
    assert [point.at for point in run.points] == [660]
