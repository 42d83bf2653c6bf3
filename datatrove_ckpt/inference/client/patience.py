"""How long a run waits for servers that give no answers, and when it gives up one request.

A refused connection, a 5xx, a 429 or a body that is no completion is never a document's fault. So such a request is
retried, and two clocks decide when that ends. Both run for ``server_patience_seconds``:

    the outage clock   runs while no request at all is answered. At its end the whole run stops (``ServerUnavailable``).
    a request's clock  adds up the time in which this request fails while others are answered. At its end, and after
                       ``request_max_attempts`` such failures, the request is given up (``RequestFailed``).

A server that answers 429, 503 or 529 says that it is busy. Where many requests compete for a small rate, one of them
may have bad luck for minutes while others are answered. So these failures have ten times the patience. A busy server
that has worked on a request of ours for a minute already is not away, either: long answers need minutes.

A wait that a server asks for (Retry-After) ends with the patience, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from loguru import logger

from datatrove_ckpt.errors import RequestFailed, ServerUnavailable
from datatrove_ckpt.inference.client.answers import RetryableError

# All times are seconds.
_SAY_AFTER = 3.0  # shorter outages are everyday life: a reset connection, one 503
_SAY_AGAIN = 60.0
_SHOWN_CAUSE = 300  # characters
_BUSY_FACTOR = 10
_WORKS = 60.0


class Outage:
    """The outage clock of one client.

    Args:
        patience: ``server_patience_seconds``.
        clock: like ``time.monotonic``.

    Attributes:
        answers: how many requests were answered.
    """

    def __init__(self, patience: float, clock: Callable[[], float]) -> None:
        self.patience = patience
        self.clock = clock
        self.answers = 0
        self._since: float | None = None
        self._said_at: float | None = None

    def answered(self) -> None:
        """A request was answered, or a server of ours was started: an outage is over."""
        self.answers += 1
        if self._since is not None:
            if self._said_at is not None:
                logger.info(f"Requests are answered again, after {self.clock() - self._since:.0f} s.")
            self._since = self._said_at = None

    def failed(self, failure: RetryableError, oldest: Callable[[], float]) -> None:
        """A request failed.

        Args:
            oldest: returns the seconds for which the oldest request in flight has been in flight.

        Raises:
            ServerUnavailable: no request was answered for ``patience`` seconds.
        """
        now = self.clock()
        if self._since is None:
            self._since = now
        waited = now - self._since
        if failure.server_is_limited and waited >= _WORKS and oldest() >= _WORKS:
            return
        if waited >= self.patience:
            raise ServerUnavailable(
                f"No request was answered for {waited:.0f} s (server_patience_seconds={self.patience:g}). The last "
                f"failure: {failure}. Check the server and the network, and run the same command again: finished "
                "work is saved, and no document is blamed for its server."
            )
        self.show(failure)

    def show(self, failure: RetryableError) -> None:
        """Logs that the run waits, if it is time for that."""
        if self._since is not None and self.next_line() <= 0:
            self._said_at = self.clock()
            waited = self._said_at - self._since
            logger.warning(waiting(str(failure), failure.unreachable, waited, self.patience))

    def next_line(self) -> float:
        """Seconds until the next line is due; infinite while requests are answered."""
        if self._since is None:
            return math.inf
        if self._said_at is None:
            return _SAY_AFTER - (self.clock() - self._since)
        return _SAY_AGAIN - (self.clock() - self._said_at)

    def left(self) -> float:
        """Seconds until the patience ends, below 0 afterwards; infinite while requests are answered."""
        return math.inf if self._since is None else self.patience - (self.clock() - self._since)


def waiting(cause: str, unreachable: bool, waited: float, patience: float) -> str:
    """The line that a run shows while it waits."""
    what = "is unreachable" if unreachable else "gives no answers"
    cause = cause if len(cause) <= _SHOWN_CAUSE else f"{cause[:_SHOWN_CAUSE]}..."
    return (
        f"The server {what} ({cause}); waiting, {waited:.0f} s of {patience:g} s (server_patience_seconds). Then the "
        "rank stops; finished work is saved."
    )


class RequestClock:
    """One request's clock."""

    __slots__ = ("_answers", "_at", "_attempts", "_beside", "_outage", "_seconds")

    def __init__(self, outage: Outage) -> None:
        self._outage = outage
        self._attempts = 0
        self._beside = 0  # failures while others were answered
        self._seconds = 0.0
        self._at = outage.clock()
        self._answers = outage.answers

    def failed(self, failure: RetryableError, max_attempts: int) -> int:
        """Returns the number of failures so far.

        Raises:
            RequestFailed: other requests are answered, and this one never is.
        """
        self._attempts += 1
        now = self._outage.clock()
        if self._outage.answers > self._answers:
            self._beside += 1
            self._seconds += now - self._at
        self._at, self._answers = now, self._outage.answers
        if self._beside >= max_attempts and self.left(failure) <= 0:
            raise RequestFailed(
                f"Given up after {self._attempts} attempts: for {self._seconds:.0f} s this request failed while others "
                f"were answered (request_max_attempts={max_attempts}, "
                f"server_patience_seconds={self._outage.patience:g}). Last cause: {failure}"
            )
        return self._attempts

    def left(self, failure: RetryableError) -> float:
        """Seconds until this request's patience ends; 0 or less afterwards."""
        return self._outage.patience * (_BUSY_FACTOR if failure.server_is_limited else 1) - self._seconds
