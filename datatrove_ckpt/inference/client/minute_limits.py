"""Keeps the limits of a provider: requests and tokens per minute."""

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import cache

from datatrove_ckpt.config.endpoints import EndpointConfig

MINUTE_SECONDS = 60.0
_MARGIN = 1.01  # a provider sees requests a little later, or earlier, than they are sent
_WEIGHT = 1 / 8  # weight of the newest answer in the mean


@dataclass(eq=False, slots=True)
class QuotaUse:
    """The share of one request in the limits of a minute. ``requests``: 0 or 1."""

    at: float
    requests: int = 0
    tokens: float = 0.0


class MinuteLimits:
    """The limits of one endpoint.

    All requests of a minute may be sent together: providers count per minute.

    Attributes:
        opens_at: monotonic time at which the next request may be sent; 0: now.
    """

    def __init__(self, endpoint: EndpointConfig) -> None:
        self.opens_at = 0.0
        self._most_requests = endpoint.requests_per_minute or math.inf
        self._most_tokens = endpoint.tokens_per_minute or math.inf
        self._sent: deque[QuotaUse] = deque()
        self._requests = 0
        self._tokens = 0.0
        self._mean = 0.0  # tokens of an answered request

    @property
    def frees_at(self) -> float:
        """The monotonic time at which the oldest request of the last minute leaves the minute."""
        ends = (sent.at + MINUTE_SECONDS * _MARGIN for sent in self._sent if sent.requests)
        return next(ends, math.inf)

    def sent(self, size: int) -> QuotaUse:
        """Counts a request of ``size`` bytes, with its expected tokens."""
        sent = QuotaUse(time.monotonic())
        self._sent.append(sent)
        self._count(sent, 1, self._mean or size / 4)  # bytes of a token
        return sent

    def answered(self, sent: QuotaUse, tokens: int) -> None:
        weight = _WEIGHT if self._mean else 1
        self._mean += (tokens - self._mean) * weight
        self._count(sent, 1, tokens)

    def not_counted(self, sent: QuotaUse) -> None:
        """Uncounts a request that was not sent, or was refused: providers do not count it."""
        self._count(sent, 0, 0)

    def _count(self, sent: QuotaUse, requests: int, tokens: float) -> None:
        if self._sent and sent.at >= self._sent[0].at:  # else it is too old to count
            self._requests += requests - sent.requests
            self._tokens += tokens - sent.tokens
            sent.requests = requests
            sent.tokens = tokens
        minute = MINUTE_SECONDS * _MARGIN
        now = time.monotonic()
        while self._sent and self._sent[0].at + minute <= now:
            old = self._sent.popleft()
            self._requests -= old.requests
            self._tokens -= old.tokens
        number = self._requests
        total = self._tokens
        self.opens_at = 0.0
        for each in self._sent:
            if number < self._most_requests and total + self._mean <= self._most_tokens:
                break
            number -= each.requests
            total -= each.tokens
            self.opens_at = each.at + minute


def limits_of(endpoint: EndpointConfig) -> MinuteLimits:
    """Returns the limits of an endpoint, which the next tasks and steps of this process share."""
    # A thread has one event loop at a time, and its tasks run in turn.
    return _limits_in(threading.get_ident(), replace(endpoint, prices=None, weight=None))


@cache
def _limits_in(thread: int, endpoint: EndpointConfig) -> MinuteLimits:
    return MinuteLimits(endpoint)
