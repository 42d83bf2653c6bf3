"""Makes each log line one entry without secrets and control characters, before a sink gets it.

datatrove replaces loguru's sinks for every task; only a patcher survives. A traceback becomes part
of the message, because loguru's own shows values of variables, including API keys.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from loguru import logger

from datatrove_ckpt.common.redaction import log_text
from datatrove_ckpt.common.retrying import code_of_rank
from datatrove_ckpt.errors import CkptError, LimitReached, Preempted, WaitsForBatches, causes

_DATATROVE = "datatrove.executor"
_ROUTINE = (
    _DATATROVE,
    "datatrove.utils",
    "datatrove.pipeline.readers",
    "datatrove_ckpt.generation",
    "datatrove_ckpt.mirror",
    "datatrove_ckpt.readers",
)
_WARNING = logger.level("WARNING").no
_said_later = False
_of_many = False


def safe_log() -> None:
    """Installs the patcher. The user's patcher runs first: the user's sinks may show what it adds.

    loguru has no public way to read it.
    """
    theirs = getattr(getattr(logger, "_core", None), "patcher", None)
    if getattr(theirs, "func", None) is not _patch:
        logger.configure(patcher=partial(_patch, theirs))


class QuietErrors:
    """Keeps tracebacks of this package's errors off the terminal, wherever this object is
    unpickled.

    Also suppresses Python's own printing: on a cluster nothing catches a task's error.
    """

    def __init__(self, said_later: bool = False) -> None:
        safe_log()
        say_errors_later(said_later)
        if not said_later:
            sys.excepthook = _say_nothing_twice

    def __reduce__(self) -> "tuple[type[QuietErrors], tuple[()]]":
        return QuietErrors, ()

    def __repr__(self) -> str:
        return "QuietErrors()"


def _say_nothing_twice(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if own_error(error) is None:
        sys.__excepthook__(kind, error, trace)


@contextmanager
def log_disabled(*packages: str) -> Iterator[None]:
    for name in packages:
        logger.disable(name)
    try:
        yield
    finally:
        for name in packages:
            logger.enable(name)


def say_errors_later(yes: bool) -> None:
    global _said_later
    _said_later = yes


@contextmanager
def task_of_many(yes: bool) -> Iterator[None]:
    """Keeps routine lines of a task off the terminal."""
    global _of_many
    safe_log()
    before = _of_many
    _of_many = yes
    try:
        yield
    finally:
        _of_many = before


def _patch(theirs: Callable[[object], None] | None, record: Any) -> None:
    if theirs is not None:
        theirs(record)
    # The terminal shows INFO and above while a task runs, the log file all, with this name.
    hidden_as = ""
    error = record["exception"] and record["exception"].value
    if error is not None:
        record["exception"] = None
        package_error = None
        if str(record["name"]).startswith(_DATATROVE):
            package_error = own_error(error)
        trace = "".join(traceback.format_exception(error)).rstrip()
        if package_error is None:
            record["message"] += f"\n{trace}"
        elif isinstance(package_error, Preempted | LimitReached):
            # The rank has logged this, and what is saved: it is no error.
            hidden_as = "DEBUG"
        elif isinstance(package_error, WaitsForBatches):
            hidden_as = "INFO"
        else:
            logger.debug(trace)
        if package_error is not None:
            is_later = _said_later and not isinstance(package_error, WaitsForBatches)
            is_named = is_later or isinstance(package_error, Preempted)
            record["message"] = (
                f"stopped by {type(package_error).__name__}" if is_named else str(package_error)
            )
    if _of_many and record["level"].no < _WARNING and str(record["name"]).startswith(_ROUTINE):
        hidden_as = record["level"].name
    if hidden_as:
        record["level"] = type(record["level"])(
            hidden_as, logger.level("DEBUG").no, record["level"].icon
        )
    record["message"] = log_text(record["message"])


def failure_note(error: BaseException) -> tuple[int, str]:
    named = own_error(error) or error
    return code_of_rank(named), log_text(f"{type(named).__name__}: {named}")


def own_error(error: BaseException | None) -> CkptError | None:
    return next((cause for cause in causes(error) if isinstance(cause, CkptError)), None)
