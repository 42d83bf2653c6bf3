"""How many requests a server gets that shows no metrics, under ``max_concurrent_generations:
auto``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from datatrove_ckpt.common.retrying import SERVER, Quota
from datatrove_ckpt.config.inference_config import FIRST_LIMIT, REQUESTS_WITHOUT_METRICS
from datatrove_ckpt.inference.client.attempts import Target

_MARGIN = 0.25  # seconds by which a provider's window may end later than it says
_TOGETHER = 0.1  # seconds within which a provider may get requests in another order
_TICK = 0.001  # seconds by which a timer may be early
_WEIGHT = 1 / 8  # of the newest answer in a mean
_STEPS = 8  # round trips until a limit that was halved is as high as before


class Pace:
    """Adapts a target's limit to its answers, as TCP does.

    - The limit doubles in each round trip until the first refusal. Then it is halved at most once
      per round trip, and grows by an eighth in each.
    - A refused request keeps its place while it waits, for as long as an answer takes at least. So
      a server that refuses at once gets no more requests than one that works.
    - A provider that shows what is left of its limit gets no more requests than that.
    """

    def __init__(self, target: Target) -> None:
        self.seconds = 0.0  # that an answer takes
        self._target = target
        self._exact = float(FIRST_LIMIT)
        self._step = math.inf  # requests more per round trip
        self._most = float(REQUESTS_WITHOUT_METRICS)
        self._halved_at = 0.0
        self._is_proven = True  # a request that was sent after that was answered
        self._refusals = 0  # in a row
        self._tokens = 0.0  # of a request
        # What may be sent until the reset, how much each reset adds, and when that was known.
        self._left = math.inf
        self._resets_at = 0.0
        self._gain = math.inf
        self._every = 0.0
        self._known_at = 0.0
        self._lowest: dict[bool, float] = {}  # what was left after requests that were sent together
        self._resize()

    def take(self) -> float:
        """Returns 0 if a request may be sent now, else the seconds to wait."""
        now = time.monotonic()
        if now >= self._resets_at:
            self._left += self._gain
            self._resets_at = now + self._every
        if self._left < 1:
            self._target.cooldown_until = self._resets_at
            return self._resets_at - now + _TICK
        self._left -= 1
        return 0.0

    def answered(self, sent_at: float, tokens: float, quotas: Sequence[Quota]) -> None:
        self._refusals = 0
        self._is_proven |= sent_at > self._halved_at
        self.seconds = _mean(self.seconds, time.monotonic() - sent_at)
        self._tokens = _mean(self._tokens, tokens)
        if self._target.in_flight >= self._target.limit:
            self._exact += min(1.0, self._step / self._exact)
        if quotas and sent_at >= self._known_at - _TOGETHER:
            self._note(sent_at, quotas)
        self._resize()

    def refused(self, sent_at: float, asked: float) -> None:
        """``asked``: seconds. One request may be refused for what it is, so the next decides."""
        now = time.monotonic()
        self._refusals += 1
        if asked and self._refusals > 1:
            self._left = 0.0
            self._gain = math.inf
            self._known_at = now
            self._resets_at = now + min(asked, SERVER.longest_advice)
        if self._is_proven:
            self._is_proven = False
            self._halved_at = now
            self._exact = max(1.0, min(self._exact, self._target.in_flight) / 2)
            self._step = max(1.0, self._exact / _STEPS)
            self._resize()

    def _note(self, sent_at: float, quotas: Sequence[Quota]) -> None:
        if sent_at > self._known_at + _TOGETHER:
            self._known_at = sent_at
            self._lowest = {}
        # Without the answered request itself.
        since = self._known_at - _TOGETHER
        sent_later = sum(other.started_at >= since for other in self._target.attempts) - 1
        self._most = float(REQUESTS_WITHOUT_METRICS)
        self._left = math.inf
        for quota in quotas:
            each = max(1.0, self._tokens) if quota.of_tokens else 1.0
            self._most = min(self._most, quota.limit / each)
            lowest = min(quota.left, self._lowest.get(quota.of_tokens, math.inf))
            self._lowest[quota.of_tokens] = lowest
            left = lowest / each - sent_later
            if left < self._left:
                self._left = left
                # A bucket fills by no more, because of what was sent later.
                self._gain = max(1.0, (quota.limit - quota.left) / each)
                self._every = min(quota.seconds, SERVER.longest_advice) + _MARGIN
                self._resets_at = sent_at + self._every

    def _resize(self) -> None:
        self._exact = max(1.0, min(self._exact, self._most))
        self._target.limit = int(self._exact)


def _mean(mean: float, newest: float) -> float:
    if not mean:
        return newest
    return mean + (newest - mean) * _WEIGHT
