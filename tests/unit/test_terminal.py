"""Percent, rates and time left of a command, and the bar that shows them as the last line of a
terminal.
"""

import os
import sys
import threading
from io import TextIOWrapper

import pytest
from loguru import logger

from datatrove_ckpt.process import screen as screens
from datatrove_ckpt.process.screen import (
    WAITING,
    BarTerminal,
    RankProgress,
    RunProgress,
    Screen,
    bar,
    has_terminal,
    leave_terminal,
    reporter,
    reporting_to,
)
from tests.ptys import Terminal


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def rank(documents, done, total=100, attempt=1, **numbers):
    share = None
    if total is not None:
        share = done / total if total else 1.0
    work = (numbers.get("finished", documents), 2 * documents, 10 * documents)
    return RankProgress(attempt, documents, work, share, total, "bytes")


def test_a_share_is_that_of_all_ranks_and_those_that_have_not_begun_are_as_large_as_the_others(
    clock,
):
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


def test_ranks_that_other_processes_complete_count_with_their_documents_and_pace(
    clock,
):
    progress = RunProgress(ranks=4, clock=clock)
    progress.update(0, rank(5, 50))
    clock.now += 100
    progress.sample()
    progress.complete(1, documents=10)
    progress.complete(0, documents=10)
    progress.complete(0)
    assert progress.documents == 15, "of its own rank it has the documents"
    assert progress.share == 0.5
    assert progress.complete_ranks == 2
    assert progress.seconds_left == pytest.approx(100)


def test_a_size_that_is_not_known_makes_no_percent_and_no_time_left(clock):
    progress = RunProgress(ranks=2, clock=clock)
    progress.update(0, rank(0, 0))
    progress.update(1, rank(0, 0, None))
    clock.now += 10
    progress.update(0, rank(5, 50))
    progress.update(1, rank(5, 500, None))
    assert (progress.share, progress.seconds_left) == (None, None)
    assert "%" not in progress.line() + bar(progress, 100)
    assert "10 docs" in progress.line()


def test_what_was_done_before_is_no_rate(clock):
    progress = RunProgress(clock=clock)
    progress.update(0, RankProgress(1, 700, share=0.7, size=100, unit="bytes"))
    assert progress.share == 0.7
    assert progress.documents == 700
    clock.now += 20
    progress.update(0, RankProgress(1, 710, (10, 20, 100), 0.71, 100, "bytes"))
    assert progress.rates == (0.5, 1.0, 5.0)
    assert progress.seconds_left == pytest.approx(29 * 20)


def test_a_rank_that_starts_again_begins_at_0_and_loses_nothing(clock):
    progress = RunProgress(clock=clock)
    progress.update(0, rank(10, 10, attempt=1))
    progress.update(0, RankProgress(2, 9, share=0.09, size=100, unit="bytes"))
    clock.now += 10
    progress.update(0, RankProgress(2, 14, (5, 5, 5), 0.14, 100, "bytes"))
    assert (progress.documents, progress.work[:2]) == (14, [15, 25])


def test_rates_are_those_of_the_last_minute(clock):
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


def test_complete_ranks_count_whole_and_empty_inputs_divide_by_nothing(clock):
    progress = RunProgress(ranks=2, clock=clock)
    progress.update(0, rank(7, 90))
    progress.complete(0)
    progress.update(1, rank(0, 0))
    assert (progress.complete_ranks, progress.share) == (1, 0.5)
    progress.update(0, rank(0, 0, 0))
    progress.update(1, rank(0, 0, 0))
    assert progress.share == 1.0


def test_a_bar_is_shorter_than_its_terminal(clock):
    progress = RunProgress(ranks=8, clock=clock)
    progress.update(0, rank(123, 40))
    clock.now += 10
    progress.update(0, rank(456, 60)._replace(state="the server is starting"))
    for columns in range(1, 140):
        assert len(bar(progress, columns)) < columns
        assert columns < 15 or bar(progress, columns).startswith("~7.5 %")


def test_a_line_has_everything(clock):
    progress = RunProgress(ranks=3, complete=1, documents=100, clock=clock)
    progress.update(0, rank(0, 0))
    clock.now += 10
    progress.update(0, rank(50, 50)._replace(state="waits for the server"))
    assert progress.line() == (
        "~50.0 % of the input, 150 docs, 1/3 tasks, 5.0 doc/s, 10.0 req/s, 50 tok/s, 30 s left, waits for the server"
    )


def test_an_outage_is_in_the_bar_though_other_ranks_say_something_else_and_it_has_no_time_left(
    clock,
):
    progress = RunProgress(ranks=2, clock=clock)
    progress.update(0, rank(0, 0))
    clock.now += 10
    progress.update(0, rank(96, 96))
    assert bar(progress, 140).endswith("10.8 s left")
    for seconds in (40.0, 41.0):
        clock.now += seconds
        progress.update(
            0,
            rank(96, 96)._replace(
                state="the server is unreachable", seconds=seconds, is_outage=True
            ),
        )
        progress.update(1, rank(0, 0)._replace(state=WAITING))
        for columns in (60, 140):
            assert bar(progress, columns).endswith(f", the server is unreachable for {seconds:g} s")
    assert " left" not in progress.line()


def test_nothing_is_left_to_be_said_of_the_time_once_nothing_has_come_for_longer(
    clock,
):
    progress = RunProgress(clock=clock)
    progress.update(0, rank(0, 0))
    clock.now += 98
    progress.update(0, rank(98, 98))
    assert progress.seconds_left == pytest.approx(2)
    clock.now += 60
    progress.update(0, rank(98, 98)._replace(state="no answer", seconds=60.0))
    assert progress.seconds_left is None
    assert progress.line().endswith(", no answer for 60 s")


def test_a_rank_that_reads_nothing_yet_has_not_begun(clock):
    progress = RunProgress(ranks=2, clock=clock)
    progress.update(0, rank(5, 50, finished=0))
    progress.update(1, RankProgress(1, 70, state="waiting for the server"))
    assert (progress.share, progress.is_estimated) == (0.25, True)
    clock.now += 10
    progress.update(1, RankProgress(1, 70, share=0.7, size=100, unit="bytes"))
    assert (progress.share, progress.is_estimated) == (0.6, False)
    assert progress.seconds_left is None  # the 70 were not done in these 10 seconds


def test_the_time_in_which_servers_start_is_no_part_of_a_rate(clock):
    progress = RunProgress(clock=clock)
    for _ in range(50):
        clock.now += 1
        progress.update(
            0, RankProgress(1, 0, share=0.0, size=100, unit="rows", state="waiting for the server")
        )
        progress.sample()
    clock.now += 5
    progress.update(0, rank(10, 10))
    assert progress.rates.documents == 2.0
    assert progress.seconds_left == pytest.approx(45)


def test_an_outage_is_no_part_of_rate_and_time_left(clock):
    progress = RunProgress(clock=clock)

    def pass_time(seconds, done, **numbers):
        for _ in range(seconds):
            clock.now += 1
            progress.update(0, rank(done, done)._replace(**numbers))
            progress.sample()

    progress.update(0, rank(0, 0))
    for done in range(1, 41):
        pass_time(1, done)
    pass_time(30, 40)
    pass_time(270, 40, state="the server is unreachable", is_outage=True)
    for done in range(41, 51):
        pass_time(1, done)
    assert progress.rates.documents == pytest.approx(1.0)
    assert progress.seconds_left == pytest.approx(50.0)


def test_until_the_first_document_is_done_the_bar_shows_the_requests_in_flight(clock):
    progress = RunProgress(ranks=2, clock=clock)
    for number in range(2):
        progress.update(number, rank(0, 0)._replace(in_flight=20))
    assert bar(progress, 120).endswith("0 tok/s, 40 requests in flight")
    progress.update(0, rank(1, 1)._replace(in_flight=19))
    assert "in flight" not in bar(progress, 120)


@pytest.mark.parametrize("lasts", [0.5, 2.0])
def test_the_time_left_of_many_short_tasks_is_that_of_the_whole_run(clock, lasts):
    """A task of half a second reports where it begins and where it ends, and nothing between."""
    progress = RunProgress(ranks=1000, clock=clock)
    for number in range(100):
        progress.update(number, RankProgress(1, 0, state=WAITING))
        assert progress.state == ("" if number else WAITING), (
            "the others finish documents meanwhile"
        )
        clock.now += lasts
        progress.update(number, rank(10, 100))
        progress.complete(number)
        progress.sample()
    assert progress.seconds_left == pytest.approx(900 * lasts, rel=0.05)


def test_a_slow_rank_alone_decides_when_the_run_ends(clock):
    """It does not go faster when the others have finished, whose work of the last ten minutes is in
    the mean rate.
    """
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


def test_the_first_answers_of_a_rank_are_no_pace(clock):
    progress = RunProgress(ranks=100, clock=clock)
    for number in range(50):
        for second in range(11):
            clock.now += 1
            progress.update(number, rank(second * 100, second * 100, 1000))
            progress.sample()
        progress.complete(number)
    progress.update(50, rank(0, 0, 1000))
    clock.now += 1
    progress.update(50, rank(1, 1, 1000))
    progress.sample()
    assert progress.seconds_left == pytest.approx(50 * 11, rel=0.1), (
        "at this pace it would take 1000 s"
    )


# The bar is the last line of a terminal, and everything else stands above it, whoever prints it --


@pytest.fixture
def terminal():
    with Terminal(columns=60, lines=10) as terminal:
        yield terminal


def text(columns):
    return "the bar"


def test_what_has_no_line_break_is_not_torn_apart(terminal):
    with terminal.streams(), BarTerminal(text) as bar:
        bar.draw()
        sys.stdout.write("half a line")
        assert terminal.read() == ["the bar"]
        sys.stdout.flush()
        bar.draw()
        assert terminal.read() == ["half a line"]
        sys.stdout.write(" and the other half\n")
        bar.draw()
        assert terminal.read() == ["half a line and the other half", "the bar"]
        sys.stdout.write("the end")
    assert terminal.read() == ["half a line and the other half", "the end"]


def test_handlers_of_loguru_write_above_and_afterwards_as_before(terminal):
    with terminal.streams():
        before = logger.add(sys.stderr, format="{message}")
        with BarTerminal(text) as bar:
            bar.draw()
            inside = logger.add(sys.stderr, format="{message}, said by a task")
            logger.info("hello")
            assert terminal.read() == ["hello", "hello, said by a task", "the bar"]
        logger.info("bye")
        assert terminal.read() == ["hello", "hello, said by a task", "bye", "bye, said by a task"]
        assert isinstance(sys.stderr, TextIOWrapper)
        logger.remove(inside)
        logger.remove(before)


def test_a_fork_draws_no_bar_and_waits_for_no_lock(terminal):
    with terminal.streams(), BarTerminal(text) as bar:
        bar.draw()
        taken, free = threading.Event(), threading.Event()

        def hold():
            with bar._lock:
                taken.set()
                free.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait()
        pid = os.fork()
        if pid == 0:
            print("from the fork")
            bar.draw()
            os._exit(0)
        os.waitpid(pid, 0)
        free.set()
        thread.join()
        assert terminal.read() == ["from the fork"]
        bar.draw()
        assert terminal.read() == ["from the fork", "the bar"]


def test_a_process_that_ends_by_force_leaves_no_bar_behind(terminal):
    with terminal.streams(), BarTerminal(text) as bar:
        bar.draw()
        with bar._lock:  # another thread's
            thread = threading.Thread(target=leave_terminal)
            thread.start()
            thread.join()
        assert terminal.read() == []


@pytest.mark.parametrize("stream", [None, "closed", "file", "dumb"])
def test_without_a_terminal_there_is_no_bar(terminal, monkeypatch, tmp_path, stream):
    with terminal.streams(), (tmp_path / "file").open("w") as file:
        assert has_terminal()
        if stream == "dumb":
            monkeypatch.setenv("TERM", "dumb")
        else:
            monkeypatch.setattr(sys, "stderr", file if stream else None)
            if stream == "closed":
                file.close()
        assert not has_terminal()


# the screen --------------------------------------------------------------------------------------


def at(done, finished=0):
    return RankProgress(1, done, (finished, finished, finished), done / 100, 100, "rows")


def test_a_screen_shows_the_bar_of_all_ranks_and_then_nothing(terminal):
    clock = Clock()
    with terminal.streams(), Screen(RunProgress(2, clock=clock), 120, clock):
        report = reporter()
        report(0, at(50))
        assert terminal.read() == ["~25.0 % |██▌       | 50 docs, 0/2 tasks, 0.0 doc/s, 0 tok/s"]
        clock.now += 1
        report(1, at(100))
        assert terminal.read()[0].startswith("75.0 % |")
    assert reporter() is None
    assert terminal.read() == []


def test_without_a_terminal_the_first_line_comes_after_10_seconds_then_each_interval():
    clock, said = Clock(), list[tuple[float, str]]()
    progress = RunProgress(1, clock=clock)
    lines = Screen(progress, 120, clock, lambda line: said.append((clock.now - 1000, line)))
    for second in range(300):
        clock.now = 1000.0 + second
        progress.update(0, at(second // 3, second // 3))
        lines.tick()
    assert [seconds for seconds, _ in said] == [10, 130, 250]
    assert said[0][1].startswith("3.0 % of the input, 3 docs, ")


def test_ranks_of_a_worker_report_to_its_parent(terminal):
    reports = []
    with terminal.streams(), reporting_to(lambda *report: reports.append(report), below=True):
        report = reporter()
        report(3, at(1))
        print("above")
    assert reports == [(3, at(1))]
    assert screens.reporter() is None
    assert terminal.read() == ["above"]
