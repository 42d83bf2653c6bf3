"""How long an event loop was kept from its work, told apart from what a busy machine does to it.

Of each callback, Linux tells what its time went to:

- ``cpu``: it computed itself, garbage collection included.
- ``gil``: it waited while other threads of the process computed, so presumably for the
  interpreter's lock. That is the smaller one of two times: what the thread neither ran nor waited
  for a core (``schedstat``), and what CPU time the process' other threads took meanwhile. The first
  alone would count a lock whose holder has no core, the second alone what others compute without
  the lock.

Both are nearly the same on a busy machine. Waiting for a disk shows in neither: see
test_loop_health.py.
"""

import asyncio
import asyncio.events
import heapq
import os
import threading
import time
from pathlib import Path

_KEPT = 8


class _Clock:
    """(wall, CPU of this thread, CPU of the others, waiting for a core) in seconds, of the thread
    that made it.
    """

    def __init__(self):
        path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._file = os.open(path, os.O_RDONLY) if path.exists() else None

    def read(self):
        wall, cpu = time.perf_counter(), time.thread_time()
        delay = (
            int(os.pread(self._file, 100, 0).split()[1]) / 1e9 if self._file is not None else 0.0
        )
        return wall, cpu, time.process_time() - cpu, delay


class _Watch:
    def __init__(self):
        self.longest = []
        self.count = 0
        self.cpu = self.gil = 0.0

    def note(self, before, after, handle):
        wall, cpu, others, delay = (b - a for a, b in zip(before, after, strict=True))
        gil = max(0.0, min(wall - cpu - delay, others))
        self.count += 1
        self.cpu, self.gil = max(self.cpu, cpu), max(self.gil, gil)
        weight = max(cpu, gil)
        if len(self.longest) < _KEPT or weight > self.longest[0][0]:
            entry = (weight, self.count, cpu, gil, _name(handle))
            (heapq.heappush if len(self.longest) < _KEPT else heapq.heapreplace)(
                self.longest, entry
            )

    def to_json(self):
        return {
            "cpu_ms": round(self.cpu * 1e3, 1),
            "gil_ms": round(self.gil * 1e3, 1),
            "callbacks": [
                {"cpu_ms": round(cpu * 1e3, 1), "gil_ms": round(gil * 1e3, 1), "what": name}
                for _, _, cpu, gil, name in sorted(self.longest, reverse=True)
            ],
        }


def _name(handle):
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"{task.get_coro().__qualname__} in a task"  # type: ignore[union-attr]
    # No repr: that of an aiohttp response caches its headers before there are any, and breaks it.
    return getattr(callback, "__qualname__", type(callback).__qualname__)


def watched(work, result):
    """The same work, with its (one, pure Python) event loop watched.

    What is found goes into ``result``.
    """
    watch = _Watch()
    plain_run = asyncio.events.Handle._run

    clock = _Clock()

    def run(handle):
        before = clock.read()
        plain_run(handle)
        watch.note(before, clock.read(), handle)

    def watching():
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
        try:
            work()
        finally:
            asyncio.events.Handle._run = plain_run  # type: ignore[method-assign]
            result["loop"] = watch.to_json()

    return watching
