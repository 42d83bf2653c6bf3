"""What the command does for its pool's processes before there are any."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import multiprocess.pool
import pytest

from datatrove_ckpt import pool_workers
from datatrove_ckpt.interruption import Interruption


@pytest.mark.parametrize("signals", [["SIGTERM"], []])
def test_workers_leave_between_tasks_where_the_tasks_are_ranks(signals: list[str]) -> None:
    before = multiprocess.pool.worker
    with Interruption(signals):
        assert multiprocess.pool.worker is (pool_workers.worker if signals else before)
    assert multiprocess.pool.worker is before


FORK_SERVER = """
import json, os, signal, sys
import multiprocess
from datatrove_ckpt.interruption import start_fork_server

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
