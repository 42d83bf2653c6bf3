"""What goes wrong on a hub, on purpose: for which requests, how often, and before or after the
effect.
"""

from __future__ import annotations

import asyncio
import threading
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
class Rule:
    """Which requests: their kind ("*": any)."""

    kind: str
    times: int | None = 1
    """How many requests are hit. None: all."""
    after_effect: bool = False
    """The hub does what is asked for first."""
    every: int = 1
    """Of the requests that would be hit, only each so-manieth is."""
    hits: int = 0
    _seen: int = 0

    def take(self, kind, after_effect):
        """Whether this request is hit; counts it if so."""
        if self.after_effect is not after_effect or self.kind not in (kind, "*"):
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


@dataclass
class Fault(Rule):
    """Answers with ``status``, or not at all if it is None: the connection is closed."""

    status: int | None = 500
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class Hold(Rule):
    """Requests wait until ``release``. ``reached`` is set when the first one waits."""

    def __init__(self, kind, loop, **rule):
        super().__init__(kind, **rule)  # type: ignore[arg-type]
        self.reached = threading.Event()
        self._released = asyncio.Event()
        self._loop = loop

    async def wait(self):
        self.reached.set()
        await self._released.wait()

    def release(self):
        self.stop()
        self._loop.call_soon_threadsafe(self._released.set)
