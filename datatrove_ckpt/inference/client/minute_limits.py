"""Limits of a provider: so many requests, and so many tokens, a minute."""

from __future__ import annotations

import math
import time
from collections import deque

from datatrove_ckpt.config.endpoints import EndpointConfig

MINUTE_SECONDS = 60.0
_MARGIN = 1.01  # a provider sees requests a little later, or earlier, than they are sent
_BYTES_PER_TOKEN = 4
_WEIGHT = 1 / 8  # of the newest answer in the mean


class _Minute:
    """What was sent in the last minute."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit or math.inf
        self._sent: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, now: float, amount: float) -> None:
        if self._limit < math.inf:
            self._sent.append((now, amount))
            self._sum += amount

    def remove_last(self) -> None:
        if self._sent:
            self._sum -= self._sent.pop()[1]

    @property
    def frees_at(self) -> float:
        if self._sent:
            return self._sent[0][0] + MINUTE_SECONDS * _MARGIN
        return math.inf

    def opens_at(self, now: float, amount: float) -> float:
        """Returns when so much more may be sent; 0: now."""
        minute = MINUTE_SECONDS * _MARGIN
        sent = self._sent
        while sent and sent[0][0] + minute <= now:
            self._sum -= sent.popleft()[1]
        left = self._sum
        opens_at = 0.0
        for sent_at, each in sent:
            if left + amount <= self._limit:
                break
            left -= each
            opens_at = sent_at + minute
        return opens_at


class MinuteLimits:
    """The limits of one endpoint.

    The requests of a whole minute may be sent at once: that is what providers count.

    Attributes:
        opens_at: when the next request may be sent, as ``time.monotonic`` counts.
    """

    def __init__(self, endpoint: EndpointConfig) -> None:
        self.opens_at = 0.0
        self._requests = _Minute(endpoint.requests_per_minute)
        self._tokens = _Minute(endpoint.tokens_per_minute)
        self._answers = 0
        self._mean = 0.0  # tokens of an answered request

    @property
    def frees_at(self) -> float:
        """When the first request of the last minute is older than that."""
        return self._requests.frees_at

    def sent(self, size: int) -> float:
        """Counts a request of so many bytes. Returns the tokens that it is expected to take."""
        expected = size / _BYTES_PER_TOKEN
        if self._answers:
            expected = self._mean
        self._requests.add(time.monotonic(), 1)
        self._count(expected)
        return expected

    def answered(self, expected: float, tokens: int) -> None:
        self._mean += (tokens - self._mean) * _WEIGHT ** min(1, self._answers)
        self._answers += 1
        self._count(tokens - expected)

    def not_counted(self) -> None:
        """Takes a request back that was not sent, or refused, which providers do not count. All
        requests count alike, so the last one goes.
        """
        self._requests.remove_last()
        self._tokens.remove_last()
        self._count(0)

    def _count(self, tokens: float) -> None:
        now = time.monotonic()
        if tokens:
            self._tokens.add(now, tokens)
        opens_at = self._requests.opens_at(now, 1)
        self.opens_at = max(opens_at, self._tokens.opens_at(now, self._mean))
