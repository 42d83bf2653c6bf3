"""A process that was forked does what a new one does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.patience import Patience

SCRIPT = """
import __main__ as main
import atexit, json, logging, os, random, signal, sys, tempfile, threading, warnings
import datatrove, multiprocess.process
from loguru import logger
from sys import flags

class Kept:
    def __del__(self):
        print("deleted", flush=True)

kept = Kept()
atexit.register(lambda: print("at exit"))
warnings.warn("a warning", DeprecationWarning)
warnings.warn("another")
logger.info("a line of loguru")
logging.warning("a line of logging")
print(json.dumps({
    "names": sorted(vars(main)),
    "argv": sys.argv, "path": sys.path[:2], "orig_argv": sys.orig_argv, "flags": list(flags),
    "file": globals().get("__file__"), "loader": type(__loader__).__name__, "spec": repr(__spec__),
    "main": kept.__class__.__module__, "handler": list(logger._core.handlers),
    "cwd": os.getcwd(), "original": multiprocess.process.ORIGINAL_DIR, "environment": dict(os.environ),
    "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(), "umask": os.umask(0),
    "signals": {n: str(signal.getsignal(n)).split(" at ")[0] for n in sorted(signal.valid_signals())},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "threads": threading.active_count(),
    "open": [n for n in range(3, 300) if os.path.exists(f"/proc/self/fd/{n}")],
    "streams": [(s.name, s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "input": sys.stdin.read(), "temporary": tempfile.gettempdir(), "limits": open("/proc/self/limits").read(),
}))
threading.Timer(0.2, lambda: print("a thread ends")).start()
end = sys.argv[1]
if end == "exit":
    sys.exit(7)
if end == "message":
    sys.exit("why")
if end == "error":
    try:
        {}["no"]
    except KeyError:
        raise ValueError("wrong")
if end == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
if end == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def ended(words: list[str], forked_one: bool, folder: Path) -> tuple[int, object, str]:
    """Its exit code, what it printed, and its errors."""
    environment = {**os.environ, "OF_THE_TEST": "1"}
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert (process._forked_by is not None) == forked_one
    printed, errors = process.communicate("given to it")
    shown = [json.loads(line) if line.startswith("{") else line for line in printed.splitlines()]
    return process.returncode, shown, re.sub(r"\d\d\d\d-\S+ \S+ ", "", errors)


@pytest.mark.parametrize("end", ["", "exit", "message", "error", "interrupt", "kill"])
@pytest.mark.parametrize("kind", ["script", "code"])
def test_a_forked_process_does_what_a_new_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, end: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["script.py", end] if kind == "script" else ["-c", SCRIPT, end]
    found = ended(words, True, tmp_path)
    monkeypatch.setattr(forked.Popen, "is_allowed", False)
    assert found == ended(words, False, tmp_path)
    assert found[0] == {"exit": 7, "message": 1, "error": 1, "interrupt": -2, "kill": -9}.get(end, 0)


def test_a_command_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-m", "datatrove_ckpt", "status", "nowhere"]
    found = ended(words, True, tmp_path)
    monkeypatch.setattr(forked.Popen, "is_allowed", False)
    assert found == ended(words, False, tmp_path)


def test_one_that_has_ended_is_a_zombie_until_it_is_looked_at() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import datatrove, time; time.sleep(600)"])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.kill(process.pid, signal.SIGTERM)
    assert Patience(60).ends(os.pidfd_open(process.pid))
    os.kill(process.pid, 0)
    assert process.wait() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.real_process
def test_a_test_can_ask_for_new_processes() -> None:
    assert not started_by_a_fork()


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {**os.environ, "PYTHONHASHSEED": "1"}},
        {"env": {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1"}},
        {"env": {**os.environ, "TZ": "Asia/Tokyo"}},
        {"preexec_fn": int},
        {"executable": sys.executable},
        {"umask": 0o77},
    ],
    ids=lambda changes: "".join(changes),
)
def test_what_would_differ_is_a_new_process(changes: dict[str, Any]) -> None:
    assert started_by_a_fork()
    assert not started_by_a_fork(**changes)


def test_so_is_what_asks_for_imports_or_needs_none() -> None:
    assert not started_by_a_fork("import sys; assert 'datatrove_ckpt' not in sys.modules")
    assert not started_by_a_fork("pass")


def test_what_the_code_under_test_starts_is_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "__name__", "datatrove_ckpt.process")
    assert not started_by_a_fork()


def started_by_a_fork(code: str = "import datatrove", **changes: Any) -> bool:
    with subprocess.Popen([sys.executable, "-c", code], **changes) as process:
        assert process.wait() == 0
        return process._forked_by is not None
