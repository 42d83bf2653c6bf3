"""cProfile for every thread of a run, and what each cost in CPU time.

The profiler's clock is the thread's own CPU time, so waiting for a lock, a disk or the GIL is not counted. It makes
Python calls about twice as dear as they are, and C functions not: compare, and take totals from a run without it.
"""

from __future__ import annotations

import cProfile
import gc
import json
import pstats
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def profiled(work: Callable[[], None], path: str) -> Callable[[], None]:
    """The same work; afterwards ``path`` holds a .pstats file and the CPU s of each thread.

    Also what garbage collection took: it strikes wherever an object happens to be made, so it shows in no function.
    With a file "no-profiler" in ``path``, only the seconds are measured.
    """
    folder = Path(path)
    with_profiler = not (folder / "no-profiler").exists()
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

    began = 0.0
    collections: dict[int, list[float]] = {}

    def note_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()
            return
        taken = time.thread_time() - began
        entry = collections.setdefault(info["generation"], [0, 0.0, 0.0])
        entry[:] = [entry[0] + 1, entry[1] + taken, max(entry[2], taken)]

    def run(thread: threading.Thread) -> None:
        measure(thread.name, lambda: plain(thread))

    def profiling() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        gc.callbacks.append(note_collection)
        threading.Thread.run = run  # type: ignore[method-assign]
        try:
            measure("event loop", work)
        finally:
            threading.Thread.run = plain  # type: ignore[method-assign]
            gc.callbacks.remove(note_collection)
            (folder / "collections.json").write_text(json.dumps(collections))
            (folder / "threads.json").write_text(json.dumps(seconds, indent=1))

    return profiling
