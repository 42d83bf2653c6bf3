"""What the command does for its pool's processes before there are any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import multiprocess
import multiprocess.pool
import pytest
from multiprocess import popen_forkserver
from multiprocess.managers import BaseManager
from multiprocess.pool import Pool
from multiprocess.process import BaseProcess

from datatrove_ckpt.cli import interruption
from datatrove_ckpt.cli.interruption import Interruption, Signalled
from datatrove_ckpt.process import pool_workers


@pytest.mark.parametrize("signals", [["SIGTERM"], []])
def test_workers_leave_between_tasks_where_the_tasks_are_ranks(signals: list[str]) -> None:
    before = multiprocess.pool.worker, Pool.__init__, BaseManager.start
    with Interruption(signals):
        assert getattr(multiprocess.pool.worker, "func", None) is (pool_workers.worker if signals else None)
    assert (multiprocess.pool.worker, Pool.__init__, BaseManager.start) == before


def make_pool() -> object:
    return multiprocess.get_context("forkserver").Pool(3)


def starts(make: Callable[[], object], told_at: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes a pool or manager, and is asked to stop at one of the moments around its processes' starts.

    Among them are those when a process runs and nobody knows its number. Returns how many there are.
    """
    moments = 0

    def moment() -> None:
        nonlocal moments
        if threading.current_thread() is threading.main_thread():
            if moments == told_at:
                signal.raise_signal(signal.SIGTERM)
            moments += 1

    def start(process: Any) -> None:
        moment()
        original(process)
        moment()

    def read_number(pipe: int) -> int:
        moment()
        return int(read(pipe))

    original, read = BaseProcess.start, popen_forkserver.forkserver.read_signed
    with monkeypatch.context() as patch, suppress(Signalled), Interruption(["SIGTERM"]):
        patch.setattr(BaseProcess, "start", start)
        patch.setattr(popen_forkserver.forkserver, "read_signed", read_number)
        made: Any = make()
        patch.undo()
        assert told_at == -1, "it was told and went on"
        made.terminate() if isinstance(made, Pool) else made.shutdown()
    return moments


@pytest.mark.parametrize("make", [make_pool, multiprocess.Manager])
def test_a_signal_while_processes_are_started_leaves_none(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    moments = starts(make, -1, monkeypatch)
    assert moments >= 2
    for moment in range(moments):
        starts(make, moment, monkeypatch)
        assert multiprocess.active_children() == []
    assert "Traceback" not in capfd.readouterr().err


def test_what_a_second_signal_left_is_ended_even_if_it_loses_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "_AGAIN", 0.1)
    context = multiprocess.get_context("fork")
    told = context.Event()
    process = context.Process(target=heeds_the_second, args=(told,))
    process.start()
    assert told.wait(60)
    with pytest.raises(Signalled), Interruption(["SIGTERM"]):
        signal.raise_signal(signal.SIGTERM)
    assert process.exitcode == 3


def heeds_the_second(told: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, lambda *_: os._exit(3)))
    told.set()
    while True:
        signal.pause()


FORK_SERVER = """
import json, os, signal, sys
import multiprocess
from datatrove_ckpt.cli.interruption import start_fork_server

def dispositions():
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    return os.getppid(), [signal.getsignal(n) for n in numbers], [int(n) for n in signal.pthread_sigmask(0, [])]

def work(results):
    if (own := os.fork()) == 0:  # what a worker forks has the worker's handlers
        signal.raise_signal(signal.SIGTERM)
    results.put([dispositions(), os.waitpid(own, 0)[1]])
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))
    if (own := os.fork()) == 0:
        signal.raise_signal(signal.SIGTERM)
    results.put(os.waitstatus_to_exitcode(os.waitpid(own, 0)[1]))

if __name__ == "__main__":
    start_fork_server(["SIGTERM", "SIGUSR1"])
    context = multiprocess.get_context("forkserver")
    results, found = context.SimpleQueue(), []
    for _ in range(2):
        process = context.Process(target=work, args=(results,))
        process.start()
        found.append([*results.get(), results.get()])
        process.join()
        os.kill(found[-1][0][0], signal.SIGTERM)  # the fork server
    print(json.dumps(found))
"""


def test_the_fork_server_outlives_sigterm_and_its_workers_do_not(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FORK_SERVER)
    found = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    first, second = json.loads(found.stdout)
    assert first == second, "the same server forked both"
    (_, handlers, blocked), status, exitcode = first
    assert handlers == [signal.SIG_DFL, signal.SIG_IGN, signal.SIG_IGN]
    assert blocked == []
    assert (status, exitcode) == (signal.SIGTERM, 9)
