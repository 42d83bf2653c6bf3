"""Percent, rates and time left of a command, from what its ranks report."""

from __future__ import annotations

import pytest

from datatrove_ckpt.process.run_progress import WAITING, RankProgress, RunProgress, bar


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rank(documents: int, done: int, total: int | None = 100, attempt: int = 1, **numbers: int) -> RankProgress:
    work = {"finished": documents, "requests": 2 * documents, "tokens": 10 * documents, **numbers}
    return RankProgress(attempt, documents, done=done, total=total, unit="bytes", **work)


def test_a_share_is_that_of_all_ranks_and_those_that_have_not_begun_are_as_large_as_the_others(clock: Clock) -> None:
    assert RunProgress(ranks=4, clock=clock).share is None
    progress = RunProgress(ranks=4, complete=1, clock=clock)
    assert progress.share == 0.25
    progress.update(0, rank(5, 50))
    assert progress.share == pytest.approx((1 + 0.5) / 4)
    assert progress.is_estimated
    progress.update(2, rank(30, 300, 300))
    assert progress.share == pytest.approx((200 + 50 + 300) / 800)  # the mean rank has 200
    progress.update(3, rank(0, 0))
    assert progress.share == pytest.approx((500 / 3 + 50 + 300) / (2000 / 3))
    assert not progress.is_estimated


def test_a_size_that_is_not_known_makes_no_percent_and_no_time_left(clock: Clock) -> None:
    progress = RunProgress(ranks=2, clock=clock)
    progress.update(0, rank(0, 0))
    progress.update(1, rank(0, 0, None))
    clock.now += 10
    progress.update(0, rank(5, 50))
    progress.update(1, rank(5, 500, None))
    assert (progress.share, progress.seconds_left) == (None, None)
    assert "%" not in progress.line() + bar(progress, 100)
    assert "10 documents done, 10 of them in this run" in progress.line()


def test_what_was_done_before_is_no_rate(clock: Clock) -> None:
    progress = RunProgress(clock=clock)
    progress.update(0, RankProgress(1, 700, done=70, total=100, unit="bytes"))
    assert progress.share == 0.7
    assert progress.documents == 700
    clock.now += 20
    progress.update(0, RankProgress(1, 710, 10, 20, 100, done=71, total=100, unit="bytes"))
    assert progress.rates == (0.5, 1.0, 5.0)
    assert progress.seconds_left == pytest.approx(29 * 20)


def test_a_rank_that_starts_again_begins_at_0_and_loses_nothing(clock: Clock) -> None:
    progress = RunProgress(clock=clock)
    progress.update(0, rank(10, 10, attempt=1))
    progress.update(0, RankProgress(2, 9, done=9, total=100, unit="bytes"))
    clock.now += 10
    progress.update(0, RankProgress(2, 14, 5, 5, 5, done=14, total=100, unit="bytes"))
    assert (progress.documents, progress.finished, progress.requests) == (14, 15, 25)


def test_rates_are_those_of_the_last_minute(clock: Clock) -> None:
    progress = RunProgress(clock=clock)
    for second in range(200):
        progress.update(0, rank(second * 10, second, 1000))
        progress.sample()
        clock.now += 1
    for _ in range(120):
        progress.sample()
        clock.now += 1
    assert progress.rates == (0.0, 0.0, 0.0)
    assert progress.seconds_left == pytest.approx((1 - 0.199) / (0.199 / 320), rel=0.01)


def test_complete_ranks_count_whole(clock: Clock) -> None:
    progress = RunProgress(ranks=2, clock=clock)
    progress.update(0, rank(7, 90))
    progress.complete(0)
    progress.update(1, rank(0, 0))
    assert progress.share == 0.5
    assert progress.complete_ranks == 1
    progress.complete(1)
    assert progress.share == 1.0


def test_empty_inputs_divide_by_nothing(clock: Clock) -> None:
    progress = RunProgress(ranks=2, clock=clock)
    progress.update(0, rank(0, 0, 0))
    assert progress.share == 0.5
    progress.complete(0)
    progress.update(1, rank(0, 0, 0))
    assert progress.share == 1.0


def test_a_bar_is_shorter_than_its_terminal(clock: Clock) -> None:
    progress = RunProgress(ranks=8, clock=clock)
    progress.update(0, rank(123, 40))
    clock.now += 10
    progress.update(0, rank(456, 60)._replace(state="the server is starting"))
    for columns in range(1, 140):
        assert len(bar(progress, columns)) < columns
        assert columns < 15 or bar(progress, columns).startswith("~7.5 %")


def test_the_bar_is_as_long_as_the_share(clock: Clock) -> None:
    progress = RunProgress(clock=clock)
    progress.update(0, rank(1, 0))
    clock.now += 60
    progress.update(0, rank(60, 50))
    shown = bar(progress, 140)
    assert shown == f"50.0 % |{'█' * 20}{' ' * 20}| 60 docs, 1.0 doc/s, 2.0 req/s, 10 tok/s, 60 s left"


def test_a_line_has_everything(clock: Clock) -> None:
    progress = RunProgress(ranks=3, complete=1, documents=100, clock=clock)
    progress.update(0, rank(0, 0))
    clock.now += 10
    progress.update(0, rank(50, 50)._replace(state="waits for the server"))
    assert progress.line() == (
        "about 50.0 % of the input, 150 documents done, 50 of them in this run, 1 of 3 tasks, 100 requests, "
        "5.0 doc/s, 10.0 req/s, 50 tok/s, 30 s left, waits for the server"
    )


def test_a_rank_that_reads_nothing_yet_has_not_begun(clock: Clock) -> None:
    progress = RunProgress(ranks=2, clock=clock)
    progress.update(0, rank(5, 50, finished=0))
    progress.update(1, RankProgress(1, 70, state="waiting for the server"))
    assert (progress.share, progress.is_estimated) == (0.25, True)
    clock.now += 10
    progress.update(1, RankProgress(1, 70, done=70, total=100, unit="bytes"))
    assert (progress.share, progress.is_estimated) == (0.6, False)
    assert progress.seconds_left is None  # the 70 were not done in these 10 seconds


def test_the_time_in_which_servers_start_is_no_part_of_a_rate(clock: Clock) -> None:
    progress = RunProgress(clock=clock)
    for _ in range(50):
        clock.now += 1
        progress.update(0, RankProgress(1, 0, done=0, total=100, unit="rows", state="waiting for the server"))
        progress.sample()
    clock.now += 5
    progress.update(0, rank(10, 10))
    assert progress.rates.documents == 2.0
    assert progress.seconds_left == pytest.approx(45)


@pytest.mark.parametrize("lasts", [0.5, 2.0])
def test_the_time_left_of_many_short_tasks_is_that_of_the_whole_run(clock: Clock, lasts: float) -> None:
    """A task of half a second reports where it begins and where it ends, and nothing between."""
    progress = RunProgress(ranks=1000, clock=clock)
    for number in range(100):
        progress.update(number, RankProgress(1, 0, state=WAITING))
        assert progress.state == ("" if number else WAITING), "the others finish documents meanwhile"
        clock.now += lasts
        progress.update(number, rank(10, 100))
        progress.complete(number)
        progress.sample()
    assert progress.seconds_left == pytest.approx(900 * lasts, rel=0.05)


def test_a_slow_rank_alone_decides_when_the_run_ends(clock: Clock) -> None:
    """It does not go faster when the others have finished, whose work of the last ten minutes is in the mean rate."""
    progress = RunProgress(ranks=6, clock=clock)
    for second in range(1, 101):
        clock.now += 1
        for number in range(5):
            progress.update(number, rank(second, second))
        progress.update(5, rank(second // 8, second // 8))
        progress.sample()
    for number in range(5):
        progress.complete(number)
    assert progress.seconds_left == pytest.approx(88 * 100 / 12, rel=0.1)
    clock.now += 100  # it hangs
    progress.update(5, rank(12, 12))
    progress.sample()
    assert progress.seconds_left == pytest.approx(88 * 200 / 12, rel=0.1)
