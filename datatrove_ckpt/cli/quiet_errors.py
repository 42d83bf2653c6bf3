"""Errors of this package on the terminal: one message, no traceback."""

from __future__ import annotations

import sys
from types import TracebackType

from datatrove_ckpt.process.task_errors import own_error, safe_log, say_errors_later


class QuietErrors:
    """Keeps tracebacks of this package's errors off the terminal, in every process that unpickles this object.

    On a cluster nothing catches the error that ends a task, so Python's own printing is suppressed, too.

    Args:
        said_later: the command itself will print the message at its end, so the log only names the error.
    """

    def __init__(self, said_later: bool = False) -> None:
        safe_log()
        say_errors_later(said_later)
        if not said_later:
            sys.excepthook = _say_nothing_twice

    def __reduce__(self) -> tuple[type[QuietErrors], tuple[()]]:
        return QuietErrors, ()

    def __repr__(self) -> str:
        return "QuietErrors()"


def _say_nothing_twice(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if own_error(error) is None:
        sys.__excepthook__(kind, error, trace)
