"""A process that was forked does what a new one does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

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


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "exit", "message", "error", "interrupt", "kill"])
def test_a_forked_process_does_what_a_new_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["script.py", end]
    found = ended(words, True, tmp_path)
    monkeypatch.setattr(forked.Popen, "is_allowed", False)
    assert found == ended(words, False, tmp_path)
    assert found[0] == {"exit": 7, "message": 1, "error": 1, "interrupt": -2, "kill": -9}.get(end, 0)
