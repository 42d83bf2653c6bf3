"""Limits of a provider: so many requests, and so many tokens, a minute."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from datatrove_ckpt.config.endpoints import EndpointConfig

MINUTE_SECONDS = 60.0
_MARGIN = 1.01  # a provider sees requests a little later, or earlier, than they are sent
_BYTES_PER_TOKEN = 4
_WEIGHT = 1 / 8  # of the newest answer in the mean


@dataclass(eq=False, slots=True)
class Sent:
    """What one request adds to what was sent in a minute."""

    at: float
    amount: float


NOTHING_SENT = (Sent(-math.inf, 0), Sent(-math.inf, 0))


class _Minute:
    """What was sent in the last minute."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit or math.inf
        self._sent: deque[Sent] = deque()
        self._sum = 0.0

    def add(self, now: float, amount: float) -> Sent:
        sent = Sent(now, amount)
        self._sent.append(sent)
        self._sum += amount
        return sent

    def change(self, sent: Sent, amount: float) -> None:
        if self._sent and sent.at >= self._sent[0].at:  # else it is too old to count
            self._sum += amount - sent.amount
            sent.amount = amount

    @property
    def frees_at(self) -> float:
        ends = (sent.at + MINUTE_SECONDS * _MARGIN for sent in self._sent if sent.amount)
        return next(ends, math.inf)

    def opens_at(self, now: float, amount: float) -> float:
        """Returns when so much more may be sent; 0: now."""
        minute = MINUTE_SECONDS * _MARGIN
        while self._sent and self._sent[0].at + minute <= now:
            self._sum -= self._sent.popleft().amount
        left = self._sum
        opens_at = 0.0
        for sent in self._sent:
            if left + amount <= self._limit:
                break
            left -= sent.amount
            opens_at = sent.at + minute
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

    def sent(self, size: int) -> tuple[Sent, Sent]:
        """Counts a request of so many bytes, with the tokens that it is expected to take."""
        now = time.monotonic()
        expected = self._mean if self._answers else size / _BYTES_PER_TOKEN
        counted = self._requests.add(now, 1), self._tokens.add(now, expected)
        self._look(now)
        return counted

    def answered(self, counted: tuple[Sent, Sent], tokens: int) -> None:
        self._mean += (tokens - self._mean) * _WEIGHT ** min(1, self._answers)
        self._answers += 1
        self._tokens.change(counted[1], tokens)
        self._look(time.monotonic())

    def not_counted(self, counted: tuple[Sent, Sent]) -> None:
        """Takes a request back that was not sent, or refused, which providers do not count."""
        self._requests.change(counted[0], 0)
        self._tokens.change(counted[1], 0)
        self._look(time.monotonic())

    def _look(self, now: float) -> None:
        opens_at = self._requests.opens_at(now, 1)
        self.opens_at = max(opens_at, self._tokens.opens_at(now, self._mean))
