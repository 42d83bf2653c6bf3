"""The state of a run becomes points, and points go to whoever keeps runs: no point is sent twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.maintenance import read_state
from datatrove_ckpt.maintenance.tracking import Point, Tracker
from datatrove_ckpt.maintenance.where import Place
from tests.rank_folders import done, failed, minute, minutes, start, stopped, write_rank

T = 1_800_000_000.0


class Run:
    """Keeps what it gets; as long as ``broken``, it raises."""

    def __init__(self) -> None:
        self.sent_until = 0
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
    moments = [T]
    monkeypatch.setattr(read_state.time, "time", lambda: moments[-1])
    return moments


def make(root: Path, *runs: Run) -> Tracker:
    return Tracker(Place(str(root), root, [str(root)]), [lambda _, run=run: run for run in runs])


def test_a_point_has_the_sums_of_all_ranks_as_status_has_them(tmp_path: Path, now: list[float]) -> None:
    run = Run()
    for number in range(2):
        write_rank(tmp_path, number, [start(T), *minutes(T, 5, 10, 100)], chunks=5, tasks=3)
    now.append(T + 301)
    assert make(tmp_path, run).work() == ""
    (point,) = run.points
    assert point.at == 1000 * (T + 301)
    expected = {
        "documents": 100,
        "requests": 200,
        "requests_in_flight": 8,
        "ranks_running": 2,
        "ranks_done": 0,
        "documents_per_second": pytest.approx(1 / 3),
        "input_done_ratio": pytest.approx(1 / 3),
    }
    assert {name: point.values[name] for name in expected} == expected
    assert run.ends == []


def test_a_service_that_is_away_holds_up_no_other_and_gets_the_next_sums(tmp_path: Path, now: list[float]) -> None:
    first, second = Run(), Run()
    tracked = make(tmp_path, first, second)
    write_rank(tmp_path, 0, [start(T), *minutes(T, 5, 10)])
    first.broken = True
    now.append(T + 301)
    assert tracked.work() == "ConnectionError: no network"
    assert [point.at for point in second.points] == [1000 * (T + 301)]
    first.broken = False
    now.append(T + 362)
    assert tracked.work() == ""
    assert [point.at for point in first.points] == [1000 * (T + 362)]
    assert first.points == second.points[1:]


def test_no_point_is_sent_twice(tmp_path: Path, now: list[float]) -> None:
    """MLflow keeps milliseconds, so a point of a finer time would seem to be newer than itself."""
    write_rank(tmp_path, 0, [start(T), minute(T, 0), done(T + 10.3371)], chunks=1, finished=True)
    run = Run()
    for _ in range(2):
        assert make(tmp_path, run).work() == ""
    assert [point.at for point in run.points] == [1000 * T + 10_337]


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([done, done], "FINISHED"),
        ([done, None], "RUNNING"),
        ([done, stopped], "KILLED"),
        ([stopped, lambda at: failed(at, "DiskFull")], "FAILED"),
    ],
)
def test_the_status_is_that_of_the_run(tmp_path: Path, now: list[float], ends: list[Any], status: str) -> None:
    run = Run()
    tracked = make(tmp_path, run)
    for number, end in enumerate(ends):
        records = [start(T), minute(T, 0), *([] if end is None else [end(T + 10)])]
        write_rank(tmp_path, number, records, chunks=1, finished=end is done, tasks=2)
    now.append(T + 20)
    assert tracked.work() == ""
    assert run.ends == ([] if status == "RUNNING" else [status])
    assert tracked.is_over == (status != "RUNNING")
    assert tracked.work() == ""
    assert len(run.ends) <= 1, "nothing is new"


def test_a_run_that_cannot_be_made_is_made_later(tmp_path: Path, now: list[float]) -> None:
    attempts: list[float] = []
    run = Run()

    def maker(first_at: float) -> Run:
        attempts.append(first_at)
        if len(attempts) == 1:
            raise OSError("no route")
        return run

    tracked = Tracker(Place(str(tmp_path), tmp_path, [str(tmp_path)]), [maker])
    assert tracked.work() == "", "no rank has begun"
    write_rank(tmp_path, 0, [start(T), minute(T, 0), done(T + 10)], chunks=1, finished=True)
    assert tracked.work() == "OSError: no route"
    assert tracked.work() == "", "although nothing is new"
    assert attempts == [T, T]
    assert [point.at for point in run.points] == [1000 * (T + 10)], "whenever it is read"
