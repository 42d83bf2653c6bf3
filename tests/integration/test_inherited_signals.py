"""The tests hear signals whatever their parent did to them: nohup, a shell's background, a supervisor that blocks all.

Ignored and blocked signals are inherited over fork and exec: see ``_hear_all_signals`` in tests/conftest.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Becomes pytest, deaf to every signal that a process can be deaf to.
DEAF = """
import os, signal, sys
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
"""

IN_THIS_PROCESS = [
    f"tests/integration/test_preemption.py::{name}"
    for name in (
        "test_requests_in_flight_finish_nothing_new_starts_and_the_old_handler_gets_the_signal",
        "test_ctrl_c_is_a_keyboard_interrupt",
        "test_signals_the_user_names_and_no_others",
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_below_a_parent_that_is_deaf_tests_of_signals_pass(workers: int) -> None:
    passes_below_a_deaf_parent(workers, *IN_THIS_PROCESS)


def passes_below_a_deaf_parent(workers: int, *chosen: str) -> None:
    command = [sys.executable, "-c", DEAF, "-q", "-n", str(workers), "-p", "no:cacheprovider", *chosen]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout


@pytest.mark.slow
def test_what_nohup_ignores_is_still_ignored_and_not_inherited() -> None:
    """A closed terminal ends neither pytest nor its workers; the commands under test hear of it."""
    code = (
        "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
        "from tests import conftest; conftest.pytest_configure(type('Config', (), {}));"
        "signal.raise_signal(signal.SIGHUP); os.execlp('sh', 'sh', '-c', 'kill -HUP $$')"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -signal.SIGHUP


def test_here_no_signal_is_ignored_or_blocked() -> None:
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    assert ignored <= {signal.SIGPIPE, signal.SIGXFSZ}, "Python ignores these itself"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
