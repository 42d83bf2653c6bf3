"""How long an event loop was kept from its work.

``gap``: the longest time between two ticks of a 1 ms ticker. A full turn of the loop lies in it, so with thousands of
answers arriving at once it is long without anything being wrong.
``callbacks``: the longest single callbacks. ``wall`` is what others wait; ``cpu`` is what it computed itself. Much wall
and little CPU is waiting: for a disk, or for the interpreter's lock (GIL) or a core that another thread or process has.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import heapq
import time
from collections.abc import Callable
from typing import Any

_TICK = 0.001
_KEPT = 8


class _Watch:
    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.longest: list[tuple[float, int, float, str]] = []
        self.count = 0
        self.above_20_ms = 0
        self.slowest_cpu = 0.0

    def note(self, wall: float, cpu: float, handle: Any) -> None:
        self.count += 1
        self.above_20_ms += wall > 0.02
        self.slowest_cpu = max(self.slowest_cpu, cpu)
        if len(self.longest) < _KEPT or wall > self.longest[0][0]:
            entry = (wall, self.count, cpu, _name(handle))
            (heapq.heappush if len(self.longest) < _KEPT else heapq.heapreplace)(self.longest, entry)

    def to_json(self) -> dict[str, Any]:
        gaps = sorted(self.gaps, reverse=True)
        return {
            "gap_ms": round(max(gaps, default=0.0) * 1e3, 1),
            "gaps_above_20_ms": sum(gap > 0.02 for gap in gaps),
            "callbacks_above_20_ms": self.above_20_ms,
            "callback_cpu_ms": round(self.slowest_cpu * 1e3, 1),
            "callbacks": [
                {"wall_ms": round(wall * 1e3, 1), "cpu_ms": round(cpu * 1e3, 1), "what": name}
                for wall, _, cpu, name in sorted(self.longest, reverse=True)
            ],
        }


def _name(handle: Any) -> str:
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"{task.get_coro().__qualname__} in a task"  # type: ignore[union-attr]
    # No repr: that of an aiohttp response caches its headers before there are any, and breaks it.
    return getattr(callback, "__qualname__", type(callback).__qualname__)


def watched(work: Callable[[], None], result: dict[str, Any]) -> Callable[[], None]:
    """The same work, with its (one, pure Python) event loop watched. What is found goes into ``result``."""
    watch = _Watch()
    plain_run, plain_once = asyncio.events.Handle._run, asyncio.BaseEventLoop.run_forever

    def run(handle: Any) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        plain_run(handle)
        watch.note(time.perf_counter() - wall, time.thread_time() - cpu, handle)

    def tick(loop: asyncio.AbstractEventLoop, last: float) -> None:
        now = time.perf_counter()
        watch.gaps.append(now - last - _TICK)
        loop.call_later(_TICK, tick, loop, now)

    def run_forever(loop: Any) -> None:
        loop.call_later(_TICK, tick, loop, time.perf_counter())
        plain_once(loop)

    def watching() -> None:
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
        asyncio.BaseEventLoop.run_forever = run_forever  # type: ignore[method-assign]
        try:
            work()
        finally:
            asyncio.events.Handle._run = plain_run  # type: ignore[method-assign]
            asyncio.BaseEventLoop.run_forever = plain_once  # type: ignore[method-assign]
            result["loop"] = watch.to_json()

    return watching
