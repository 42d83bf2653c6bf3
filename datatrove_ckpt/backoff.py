"""How long to wait before the next attempt. One formula for requests, servers, uploads and probes."""

from __future__ import annotations

import random


def backoff_seconds(failures: int, first: float, longest: float, growth: float = 2.0, jitter: float = 0.0) -> float:
    """Seconds to wait after the ``failures``-th failure in a row, counted from 1.

    The wait grows geometrically from ``first`` to ``longest``. ``jitter`` is the share of it that is random: 0 for one
    caller, 1 ("full jitter") for thousands of requests that failed together and must not return together. See
    M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015.
    """
    # The exponent is bounded: 2.0 ** 1100 overflows.
    wait = min(longest, first * growth ** min(failures - 1, 100))
    return wait * random.uniform(1 - jitter, 1)
