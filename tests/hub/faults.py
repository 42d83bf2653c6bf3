"""What goes wrong on a hub, on purpose: for which requests, how often, and before or after the
effect.
"""

import time
from dataclasses import dataclass, field


class Clock:
    """The hub's clock: seconds since its start."""

    def __init__(self):
        self._start = time.monotonic()
        self._skipped = 0.0

    def now(self):
        return time.monotonic() - self._start + self._skipped

    def advance(self, seconds):
        """Lets ``seconds`` of the hub's time pass at once."""
        self._skipped += seconds


@dataclass
class Fault:
    """Answers with ``status``, or not at all if it is None: the connection is closed."""

    kind: str
    """Which requests."""
    status: int | None = 500
    times: int | None = 1
    """How many requests are hit. None: all."""
    after_effect: bool = False
    """The hub does what is asked for first."""
    every: int = 1
    """Of the requests that would be hit, only each so-manieth is."""
    seconds: float = 0.0
    """How long the answer takes."""
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    hits: int = 0
    _seen: int = 0

    def take(self, kind, after_effect):
        """Whether this request is hit; counts it if so."""
        if self.after_effect is not after_effect or self.kind != kind:
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        self._seen += 1
        if self._seen % self.every:
            return False
        self.hits += 1
        return True

    def stop(self):
        """No request is hit from now on."""
        self.times = 0
