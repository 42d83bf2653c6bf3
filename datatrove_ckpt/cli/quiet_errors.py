"""Errors of this package on the terminal: one message, no traceback."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import Any

from loguru import logger

from datatrove_ckpt.errors import CkptError, Preempted


class QuietErrors:
    """Makes loguru keep tracebacks of this package's errors off the terminal, wherever this object is unpickled.

    datatrove ends a failed task with ``logger.exception`` and exchanges loguru's sinks for every task; only a patcher
    outlives that. Other errors keep their traceback everywhere, but as plain text: loguru's own shows the values of
    local variables, API keys included. On a cluster, where nobody catches what ends a task, Python is kept from
    printing the traceback once more.
    """

    def __init__(self, said_later: bool = False) -> None:
        self.said_later = said_later  # the command itself ends with the message: the log need not say it as well
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
        own = own_error(error)
        text = "".join(traceback.format_exception(error))
        record["exception"] = None
        if own is None:
            record["message"] += f"\n{text}"
        else:
            record["message"] = (
                f"stopped by {type(own).__name__}" if self.said_later or isinstance(own, Preempted) else str(own)
            )
            logger.debug(text)  # the terminal shows INFO and up while a task runs, its log file everything


def _say_nothing_twice(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if own_error(error) is None:
        sys.__excepthook__(kind, error, trace)


def own_error(error: BaseException) -> CkptError | None:
    """This package's error, alone or as the cause of what was raised, or None."""
    waiting: list[Any] = [error]
    seen: list[Any] = []
    while waiting:
        found = waiting.pop(0)
        if isinstance(found, CkptError):
            return found
        if isinstance(found, BaseException) and found not in seen:
            seen.append(found)
            waiting += [getattr(found, "error", None), found.__cause__, found.__context__]
            waiting += getattr(found, "exceptions", ())
    return None
