"""Runs ``datatrove-ckpt`` in children of one process that has imported everything: a tenth of a second per command.

Reads one JSON order per line from stdin, and forks a child for it. Writes {"pid"} when the child was started, and
{"pid", "code"} when it ended; the code is that of ``os.waitstatus_to_exitcode``. Ends when stdin is closed.

This process must stay without threads: a fork copies only the thread that calls it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
import traceback
from typing import Any, NoReturn

from datatrove.pipeline.readers import jsonl  # noqa: F401
from datatrove.pipeline.writers import jsonl as jsonl_writer  # noqa: F401

import datatrove_ckpt.__main__
import datatrove_ckpt.cli.execution
import datatrove_ckpt.cli.preflight_commands
import datatrove_ckpt.cli.run
import datatrove_ckpt.cli.status
import datatrove_ckpt.cli.verify_repair
import datatrove_ckpt.generation.rank
import datatrove_ckpt.inference.servers.endpoint
import datatrove_ckpt.preflight.doctor
import datatrove_ckpt.readers
import datatrove_ckpt.rollouts

with contextlib.suppress(ImportError):
    import uvloop  # noqa: F401
    import zstandard  # noqa: F401


def serve() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(write_end)
    orders = b""
    while True:
        ready, _, _ = select.select([0, read_end], [], [])
        if read_end in ready:
            os.read(read_end, 4096)
            _report_ended()
        if 0 in ready:
            received = os.read(0, 65536)
            if not received:
                return
            *lines, orders = (orders + received).split(b"\n")
            for line in lines:
                _start(json.loads(line), (read_end, write_end))


def _start(order: dict[str, Any], pipe: tuple[int, int]) -> None:
    pid = os.fork()
    if pid == 0:
        _become(order, pipe)
    _say({"pid": pid})


def _report_ended() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(message: dict[str, int]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _become(order: dict[str, Any], pipe: tuple[int, int]) -> NoReturn:
    """The child: runs the command as a fresh process would, and ends."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in pipe:
        os.close(end)
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    if order["file_size"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_size"], order["file_size"]))
    sys.argv = ["datatrove-ckpt", *order["argv"]]
    code: object = 1
    try:
        code = datatrove_ckpt.__main__.main()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    serve()
