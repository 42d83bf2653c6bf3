"""Repeats reads from remote storage after errors that pass: 408, 425, 429, 5xx, lost connections.

The libraries below retry for half a minute. A hub that limits its clients asks for up to an hour, and a rank that ends
for it gives its GPU back, so this waits longer, and as long as the server says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from loguru import logger

from datatrove_ckpt.backoff import backoff_seconds
from datatrove_ckpt.formatting import duration
from datatrove_ckpt.remote_errors import failure_line, http_status, is_permanent

_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524}
_NO_CONNECTION = {"OfflineModeIsEnabled"}
_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 60.0
_PATIENCE_SECONDS = 600.0
"""How long errors may last, without the times that the server advises."""
_LONGEST_ADVICE_SECONDS = 3600.0

_Result = TypeVar("_Result")


def retrying(call: Callable[[], _Result], what: str) -> _Result:
    """The call's result. Repeats it while its errors may pass.

    Args:
        what: what is read, for a log line.
    """
    waited, patience, failures = 0.0, _PATIENCE_SECONDS, 0
    while True:
        try:
            return call()
        except Exception as error:
            failures += 1
            advice = _advised_seconds(error)
            wait = max(advice, backoff_seconds(failures, _FIRST_SECONDS, _LONGEST_SECONDS, jitter=0.5))
            waited += wait
            patience += advice
            if not is_transient(error) or waited > patience:
                raise
            left = f"for {duration(patience - waited)} more" if patience > waited else "for the last time"
            logger.warning(f"{what}: {failure_line(error)}. Again in {duration(wait)}, {left}.")
        _sleep(wait)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    for one in _chain(error):
        status = http_status(one)
        if status is not None:
            return status in _TRANSIENT_STATUS
        if type(one).__name__ in _NO_CONNECTION:
            return False
    if is_permanent(error):
        return False
    kinds = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    return bool(kinds & {"ConnectionError", "TimeoutError", "TimeoutException", "NetworkError", "RemoteProtocolError"})


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes: a library's ConnectionError hides the status of the answer."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _advised_seconds(error: BaseException) -> float:
    for one in _chain(error):
        headers = getattr(getattr(one, "response", None), "headers", None) or {}
        advice = headers.get("retry-after") or headers.get("Retry-After")
        if advice:
            return min(_parse(str(advice)), _LONGEST_ADVICE_SECONDS)
    return 0.0


def _parse(advice: str) -> float:
    try:
        return max(0.0, float(advice))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(advice).timestamp() - time.time())
    except ValueError:
        return 0.0


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


class RetryingFile:
    """A remote file opened for reading, whose reads are repeated."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def read(self, size: int = -1) -> bytes:
        return bytes(retrying(lambda: self._file.read(size), self._name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
