"""The sums of a run go to a service that keeps runs, also to one that was away."""

import pytest

from datatrove_ckpt.cli.track import RunTracker
from datatrove_ckpt.run_folder import run_state
from tests.rank_folders import done, failed, minute, minutes, place_at, start, stopped, write_rank

T = 1_800_000_000.0


class Run:
    """Keeps what it gets; as long as ``broken``, it raises."""

    def __init__(self):
        self.points = []
        self.broken = False
        self.ends = []

    def send(self, at, values):
        if self.broken:
            raise ConnectionError("no network")
        self.points.append((at, values))

    def end(self, status):
        self.ends.append(status)


@pytest.fixture
def now(monkeypatch):
    """Its last number is the time."""
    moments = [T]
    monkeypatch.setattr(run_state.time, "time", lambda: moments[-1])
    return moments


def make(root, run):
    place = place_at(root)
    return RunTracker(lambda job: run, place=place)


def test_a_service_that_was_away_gets_the_next_sums(tmp_path, now):
    run = Run()
    tracked = make(tmp_path, run)
    write_rank(tmp_path, 0, [start(T), *minutes(T, 5, 10)])
    run.broken = True
    now.append(T + 301)
    assert tracked.work() == "ConnectionError: no network"
    run.broken = False
    now.append(T + 362)
    assert tracked.work() == ""
    assert [at for at, _ in run.points] == [T + 362]


@pytest.mark.parametrize(
    "ends, status",
    [
        ([done, done], "FINISHED"),
        ([done, None], "RUNNING"),
        ([done, stopped], "KILLED"),
        ([stopped, lambda at: failed(at, "DiskFull")], "FAILED"),
    ],
)
def test_the_status_is_that_of_the_run(tmp_path, now, ends, status):
    run = Run()
    tracked = make(tmp_path, run)
    for number, end in enumerate(ends):
        records = [start(T), minute(T, 0), *([] if end is None else [end(T + 10)])]
        write_rank(tmp_path, number, records, chunks=1, finished=end is done, tasks=2)
    now.append(T + 20)
    for look in range(3):
        assert run.ends == []
        assert not tracked.is_over
        assert tracked.work() == ""
        if status == "FINISHED" or look == 2:
            break
    assert run.ends == ([] if status == "RUNNING" else [status])
    assert tracked.is_over == (status != "RUNNING")
