"""A process that user code forked with ``os.fork`` and that does not end itself.

Such a fork shares the sockets and the open checkpoint files with its rank. If it went on in our code, it would send
requests on the rank's connections, or write into its files. So it ends at once, and closes nothing. What it printed is
written out, as at the end of any Python process. If the error of a task ends it, uvloop lets other rollouts make a step
in it first, and one of them may give the exit code.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress

_pid = os.getpid()


def _note_fork() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_note_fork)  # a system call for each rollout would cost more


def end_fork(pid: int, error: BaseException | None = None) -> None:
    """Ends this process if it is a fork. Call it where user code has returned or raised.

    The exit code is what ``sys.exit`` asked for, 0 without an error, and 1 for another error, whose traceback is
    printed.

    Args:
        pid: of the process that called the user code. If it is this process, nothing happens.
        error: what user code raised.
    """
    if _pid == pid:
        return
    code = 1
    try:
        code = _code(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        os._exit(code)


def _code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1
