"""How the end of a task is logged: our error as its message, an interruption as no error at all.

datatrove ends a failed task with ``logger.exception``, which prints pages of traceback with the values of variables,
and replaces loguru's sinks for every task. Only a patcher survives that. Ours changes the record in which datatrove
says that a task has ended with an error of this package, and no other one.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loguru import logger

from datatrove_ckpt.errors import CkptError, Preempted

_DATATROVE = "datatrove.executor"


def quiet_task_errors() -> None:
    """From now on, in this process. A patcher that somebody has set stays."""
    if getattr(getattr(logger, "_core", None), "patcher", logger) is None:
        logger.configure(patcher=_patch)


def _patch(record: Any) -> None:
    if record["exception"] is None or not str(record["name"]).startswith(_DATATROVE):
        return
    if (own := own_error(record["exception"].value)) is not None:
        show_own(record, own, str(own))


def show_own(record: Any, own: CkptError, message: str) -> None:
    """Lets a record that ends a task show the message. The traceback goes into the task's log file."""
    error = record["exception"].value
    record["exception"] = None
    record["message"] = message
    if isinstance(own, Preempted):  # the rank has said so, with what is saved: it is no error
        debug = logger.level("DEBUG")
        record["level"] = type(record["level"])(debug.name, debug.no, debug.icon)
        record["message"] = f"stopped by {type(own).__name__}"
    else:
        # The terminal shows INFO and above while a task runs, the log file shows everything.
        logger.debug("".join(traceback.format_exception(error)))


def own_error(error: BaseException | None) -> CkptError | None:
    """The error of this package that was raised or that caused ``error``; None if there is none."""
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


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Disables the log of these packages inside the block."""
    for name in names:
        logger.disable(name)
    try:
        yield
    finally:
        for name in names:
            logger.enable(name)
