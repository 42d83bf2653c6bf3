"""cProfile for every thread of a run, and what each cost in CPU time.

The profiler's clock is the thread's own CPU time, so waiting for a lock, a disk or the GIL is not counted. It makes
Python calls about twice as dear as they are, and C functions not: compare, and take totals from a run without it.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def profiled(work: Callable[[], None], path: str) -> Callable[[], None]:
    """The same work; afterwards ``path``/<thread>.pstats for each thread, and ``path``/threads.json with CPU s."""
    folder = Path(path)
    with_profiler = (folder / "no-profiler").exists() is False
    seconds: dict[str, float] = {}
    plain = threading.Thread.run

    def measure(name: str, function: Callable[[], Any]) -> None:
        profiler = cProfile.Profile(time.thread_time)
        before = time.thread_time()
        try:
            if with_profiler:
                profiler.runcall(function)
            else:
                function()
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.thread_time() - before
            if with_profiler:
                pstats.Stats(profiler).dump_stats(folder / f"{name.replace(' ', '-')}.pstats")

    def run(thread: threading.Thread) -> None:
        measure(thread.name, lambda: plain(thread))

    def profiling() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        threading.Thread.run = run  # type: ignore[method-assign]
        try:
            measure("event loop", work)
        finally:
            threading.Thread.run = plain  # type: ignore[method-assign]
            (folder / "threads.json").write_text(json.dumps(seconds, indent=1))

    return profiling
