"""Percent, rates and time left of a command, and the bar that shows them as the last line of a
terminal.
"""

import io
import os
import sys
import threading
from io import TextIOWrapper
from types import ModuleType

import pytest
from loguru import logger

from datatrove_ckpt.common.counts import InputPosition, Processed
from datatrove_ckpt.process.screen import (
    BarTerminal,
    RankProgress,
    RunProgress,
    Screen,
    has_terminal,
    leave_terminal,
    reporter,
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


def rank(documents, done, tasks=None):
    work = Processed(documents, 2 * documents, 0, 10 * documents)
    return RankProgress(1, documents, work, InputPosition(done, 100, "bytes", tasks))


def test_a_rank_that_starts_again_begins_at_0_and_loses_nothing(clock):
    progress = RunProgress(clock=clock)
    progress.update(0, rank(10, 10))
    progress.update(0, RankProgress(2, 9, position=InputPosition(9, 100, "bytes")))
    clock.now += 10
    progress.update(0, RankProgress(2, 14, Processed(5, 5, 0, 5), InputPosition(14, 100, "bytes")))
    assert (progress.documents, progress.work) == (14, Processed(15, 25, 0, 105))


def test_tasks_without_input_are_no_part_of_the_percentage(clock):
    progress = RunProgress(ranks=20, clock=clock)
    for number in range(3):
        progress.update(number, rank(0, 0, tasks=4))
    progress.complete(19)
    clock.now += 10
    for number in range(3):
        progress.update(number, rank(50, 50, tasks=4))
    assert progress.line().startswith("~37.5 % of the input, 150 docs, ")
    assert "1/20 tasks" in progress.line()
    progress.update(3, rank(50, 50, tasks=4))
    assert progress.head == "50.0 %"


def test_an_outage_is_no_time_at_work_and_requests_show_until_the_first_document(clock):
    progress = RunProgress(clock=clock)

    def work(documents, **state):
        clock.now += 1
        progress.update(0, rank(documents, documents)._replace(**state))
        progress.sample()

    work(0, in_flight=8)
    assert "8 requests in flight" in progress.line()
    for documents in range(1, 41):
        work(documents, in_flight=8)
    assert "in flight" not in progress.line()
    for seconds in range(300):
        work(40, state="unreachable", seconds=seconds, is_outage=True)
    assert progress.seconds_left is None
    for documents in range(41, 81):
        work(documents)
    assert progress.rates().documents == pytest.approx(1, rel=0.1)
    assert progress.seconds_left == pytest.approx(20, rel=0.1)


# The bar is the last line of a terminal, and everything else stands above it, whoever prints it --


@pytest.fixture
def terminal():
    with Terminal(columns=60, lines=10) as terminal:
        yield terminal


def text(columns):
    return "the bar"


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
            try:
                print("from the fork")
                bar.draw()
            finally:  # never a second pytest
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
    return RankProgress(
        1, done, Processed(finished, finished, 0, finished), InputPosition(done, 100, "rows")
    )


def test_a_screen_shows_the_bar_of_all_ranks_and_then_nothing(terminal):
    clock = Clock()
    with terminal.streams(), Screen(RunProgress(2, clock=clock), 120, clock):
        report = reporter()
        report(0, at(50))
        assert terminal.read() == ["~25.0 % |██▌       | 50 docs, 0.0 doc/s, 0/2 tasks, 0 tok/s"]
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


@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_has_the_bar_of_tqdm_where_its_widgets_are_installed(monkeypatch, has_widgets):
    shown = []

    class Bar:
        def __init__(self, **options):
            if not has_widgets:
                raise ImportError("IProgress not found")

        def set_description_str(self, text, refresh):
            self.text = text

        def set_postfix_str(self, text):
            shown.append((self.n, self.text, text))

        def close(self):
            shown.append("closed")

    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    widgets = ModuleType("ipywidgets") if has_widgets else None
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    monkeypatch.setattr("tqdm.notebook.tqdm", Bar)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clock, lines = Clock(), []
    with Screen(RunProgress(1, clock=clock), 120, clock, lines.append) as screen:
        clock.now += 1
        screen.update(0, at(50, 50))
        assert screen.has_bar is has_widgets
    assert not lines
    assert [one[:2] for one in shown[-2:-1]] == [(0.5, "50.0 %")] * has_widgets
    assert shown[-1:] == ["closed"] * has_widgets
