"""The bar is the last line of a terminal, and everything else stands above it, whoever prints it."""

from __future__ import annotations

import os
import sys
import termios
import threading
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from datatrove_ckpt.process import screen as screens
from datatrove_ckpt.process.run_progress import RankProgress, RunProgress
from datatrove_ckpt.process.screen import LogLines, Screen, reporter, reporting_to
from datatrove_ckpt.process.terminal import BarTerminal, has_terminal, leave_terminal
from tests.ptys import Terminal


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal(columns=60, lines=10) as terminal:
        yield terminal


def text(columns: int) -> str:
    return "the bar"


def test_lines_go_above_the_bar_whoever_prints_them(terminal: Terminal) -> None:
    with terminal.streams(), BarTerminal(text) as bar:
        bar.draw()
        assert terminal.read() == ["the bar"]
        assert terminal.cursor == (0, 0)
        print("to stdout")
        sys.stderr.write("to stderr\nin two lines\n")
        assert terminal.read() == ["to stdout", "to stderr", "in two lines", "the bar"]
        bar.draw()
        assert terminal.read() == ["to stdout", "to stderr", "in two lines", "the bar"]
    assert terminal.read() == ["to stdout", "to stderr", "in two lines"]


def test_what_has_no_line_break_is_not_torn_apart(terminal: Terminal) -> None:
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


def test_a_narrower_terminal_gets_a_shorter_bar(terminal: Terminal) -> None:
    widths: list[int] = []

    def note(columns: int) -> str:
        widths.append(columns)
        return ""

    with terminal.streams(), BarTerminal(note) as bar:
        bar.draw()
        termios.tcsetwinsize(terminal.slave, (10, 33))
        bar.draw()
    assert widths == [60, 33]


def test_handlers_of_loguru_write_above_and_afterwards_as_before(terminal: Terminal) -> None:
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


def test_a_fork_draws_no_bar_and_waits_for_no_lock(terminal: Terminal, tmp_path: Path) -> None:
    with terminal.streams(), BarTerminal(text) as bar:
        bar.draw()
        taken, free = threading.Event(), threading.Event()

        def hold() -> None:
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


def test_a_process_that_ends_by_force_leaves_no_bar_behind(terminal: Terminal) -> None:
    with terminal.streams(), BarTerminal(text) as bar:
        bar.draw()
        with bar._lock:  # another thread's
            thread = threading.Thread(target=leave_terminal)
            thread.start()
            thread.join()
        assert terminal.read() == []


@pytest.mark.parametrize("stream", [None, "closed", "file", "dumb"])
def test_without_a_terminal_there_is_no_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stream: str | None
) -> None:
    with terminal.streams(), (tmp_path / "file").open("w") as file:
        assert has_terminal()
        if stream == "dumb":
            monkeypatch.setenv("TERM", "dumb")
        else:
            monkeypatch.setattr(sys, "stderr", file if stream else None)
            if stream == "closed":
                file.close()
        assert not has_terminal()


# the screen ----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def at(done: int, finished: int = 0) -> RankProgress:
    return RankProgress(1, done, finished, finished, finished, done, 100, "rows")


def test_a_screen_shows_the_bar_of_all_ranks_and_then_nothing(terminal: Terminal) -> None:
    clock = Clock()
    with terminal.streams(), Screen(RunProgress(2, clock=clock), 120, clock):
        report = reporter()
        assert report is not None
        report(0, at(50))
        assert terminal.read() == ["~25.0 % |██▌       | 50 docs, 0/2 tasks, 0.0 doc/s, 0 tok/s"]
        clock.now += 1
        report(1, at(100))
        assert terminal.read()[0].startswith("75.0 % |")
    assert reporter() is None
    assert terminal.read() == []


def test_without_a_terminal_the_first_line_comes_after_10_seconds_then_each_interval() -> None:
    clock, said = Clock(), list[tuple[float, str]]()
    progress = RunProgress(1, clock=clock)
    lines = LogLines(progress, 120, lambda line: said.append((clock.now - 1000, line)), clock)
    for second in range(300):
        clock.now = 1000.0 + second
        progress.update(0, at(second // 3, second // 3))
        lines.tick()
    assert [seconds for seconds, _ in said] == [10, 130, 250]
    assert said[0][1].startswith("3.0 % of the input, 3 documents done, 3 of them in this run, ")


def test_ranks_of_a_worker_report_to_its_parent(terminal: Terminal) -> None:
    reports: list[Any] = []
    with terminal.streams(), reporting_to(lambda *report: reports.append(report), below=True):
        report = reporter()
        assert report is not None
        report(3, at(1))
        print("above")
    assert reports == [(3, at(1))]
    assert screens.reporter() is None
    assert terminal.read() == ["above"]
