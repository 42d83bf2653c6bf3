"""Errors of this package on the terminal: one message, no traceback."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import Any

from loguru import logger

from datatrove_ckpt.process.task_errors import own_error, show_own


class QuietErrors:
    """Keeps tracebacks of this package's errors off the terminal, in every process that unpickles this object.

    datatrove ends a failed task with ``logger.exception`` and replaces loguru's sinks for every task; only a patcher
    survives that. Other errors keep their traceback, but as plain text: loguru's own format shows the values of local
    variables, API keys included. On a cluster nobody catches the error that ends a task, so Python's own printing of
    the traceback is suppressed as well.

    Args:
        said_later: the command itself will print the message at its end, so the log only names the error.
    """

    def __init__(self, said_later: bool = False) -> None:
        self.said_later = said_later  # the command prints the message at its end
        logger.configure(patcher=self._patch)
        if not said_later:
            sys.excepthook = _say_nothing_twice

    def __reduce__(self) -> tuple[type[QuietErrors], tuple[()]]:
        return QuietErrors, ()

    def __repr__(self) -> str:
        return "QuietErrors()"

    def _patch(self, record: Any) -> None:
        if record["exception"] is None or record["exception"].value is None:
            return
        error = record["exception"].value
        if (own := own_error(error)) is not None:
            show_own(record, own, f"stopped by {type(own).__name__}" if self.said_later else str(own))
        else:
            record["exception"] = None
            record["message"] += "\n" + "".join(traceback.format_exception(error))


def _say_nothing_twice(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if own_error(error) is None:
        sys.__excepthook__(kind, error, trace)
