"""What each log line is before a sink gets it: without secrets, without control characters, and one entry.

datatrove replaces loguru's sinks for every task; only a patcher survives that. Ours stays as long as the process.
A traceback becomes a part of the message, because loguru's own shows the values of variables, API keys included.
The record in which datatrove says that a task has failed gets our error as its message; an interruption is no error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from loguru import logger

from datatrove_ckpt.errors import CkptError, Preempted, causes
from datatrove_ckpt.redaction import log_text

_DATATROVE = "datatrove.executor"
_said_later = False


def safe_log() -> None:
    """From now on, in this process. A patcher that somebody has set comes first."""
    theirs = getattr(getattr(logger, "_core", None), "patcher", None)
    if not (isinstance(theirs, partial) and theirs.func is _patch):
        logger.configure(patcher=partial(_patch, theirs))


@contextmanager
def log_disabled(*packages: str) -> Iterator[None]:
    """Disables the log of packages, whose lines are about a copy, or one for each file."""
    for name in packages:
        logger.disable(name)
    try:
        yield
    finally:
        for name in packages:
            logger.enable(name)


def say_errors_later(yes: bool) -> None:
    """Whether the command prints the message of a task's error at its end, so that the log only names the error."""
    global _said_later
    _said_later = yes


def _patch(theirs: Callable[[Any], None] | None, record: Any) -> None:
    if theirs is not None:
        theirs(record)
    error = record["exception"] and record["exception"].value
    if error is not None:
        record["exception"] = None
        own = own_error(error) if str(record["name"]).startswith(_DATATROVE) else None
        trace = "".join(traceback.format_exception(error)).rstrip()
        if own is None:
            record["message"] += f"\n{trace}"
        elif isinstance(own, Preempted):  # the rank has said so, with what is saved: it is no error
            debug = logger.level("DEBUG")
            record["level"] = type(record["level"])(debug.name, debug.no, debug.icon)
        else:  # the terminal shows INFO and above while a task runs, the log file shows everything
            logger.debug(trace)
        if own is not None:
            is_named = _said_later or isinstance(own, Preempted)
            record["message"] = f"stopped by {type(own).__name__}" if is_named else str(own)
    record["message"] = log_text(record["message"])


def own_error(error: BaseException | None) -> CkptError | None:
    """The error of this package that was raised or that caused ``error``; None if there is none."""
    return next((found for found in causes(error) if isinstance(found, CkptError)), None)
