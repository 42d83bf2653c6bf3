"""Settings of Python's garbage collector that fit a run.

By default Python collects after every 700 new objects. Documents are in no reference cycles, so
these collections find nothing, take CPU time, and stop the event loop.
"""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# A collection scans all documents in work: a thousand are 50,000 objects and take 20 to 40 ms.
_THRESHOLDS = (100_000, 10, 10)

_lock = threading.Lock()
_runs = 0
_before = (0, 0, 0)
_froze = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Runs no collections, for imports: they make a hundred thousand objects and no garbage.

    After an import, all objects count as old.
    """
    enabled = gc.isenabled()
    modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules and gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def gc_tuned() -> Iterator[None]:
    """Runs fewer collections, which skip objects made before the run.

    Enter it around all ranks of a process, because leftovers of a rank must not be frozen for the
    next rank. If ranks run in threads, the last thread to leave restores the settings. A disabled
    collector stays disabled, and higher thresholds stay.
    """
    global _runs, _before, _froze
    with _lock:
        _runs += 1
        if _runs == 1:
            _before = gc.get_threshold()
            # ``gc.unfreeze`` would also unfreeze other code's frozen objects; if there are any,
            # freeze nothing.
            _froze = gc.get_freeze_count() == 0
            if _froze:
                # Frozen garbage stays until the end.
                gc.collect(1)
                gc.freeze()
            if _before[0]:  # 0 switches collections off
                gc.set_threshold(*map(max, _before, _THRESHOLDS))
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            if not _runs:
                gc.set_threshold(*_before)
                if _froze:
                    gc.unfreeze()
