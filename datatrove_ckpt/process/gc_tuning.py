"""Python's garbage collector, told what a run is like.

By default it looks for garbage after every 700 new objects, and through all objects of the process now and then. A run
has thousands of documents in work, none of them garbage, so it looks in vain: a third of the run's CPU time, and pauses
of the event loop of 80 ms (measured; torch and vLLM in the process make it worse). Documents are freed when they are
done, as they are in no cycles; only what a user's rollout leaves in cycles has to wait for a collection.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# New objects until the youngest are looked through (what is freed meanwhile does not count), and how often until older
# ones are, too. 10,000 objects take 4 ms, on a busy machine 10; a thousand documents in work are 30,000.
_THRESHOLDS = (10_000, 50, 10)

_lock = threading.Lock()
_runs = 0
_before: tuple[tuple[int, int, int], bool] = ((0, 0, 0), False)


@contextmanager
def gc_tuned() -> Iterator[None]:
    """Fewer collections, which leave out what was there before; the settings of before come back in the end.

    Settings belong to the process, and ranks may run in threads of one: the last one that ends puts them back. A
    collector that is switched off stays off, and thresholds that are higher already stay.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _runs, _before
    with _lock:
        _runs += 1
        if _runs > 1:
            return
        before = gc.get_threshold()
        # Objects that somebody else has frozen would be thawed with ours: then we freeze none.
        freezes = gc.get_freeze_count() == 0
        _before = before, freezes
        if freezes:
            gc.collect()  # frozen garbage would stay for as long as the run
            gc.freeze()
        if before[0]:  # 0 means never
            gc.set_threshold(*map(max, before, _THRESHOLDS))


def _leave() -> None:
    global _runs
    with _lock:
        _runs -= 1
        if _runs:
            return
        thresholds, froze = _before
        gc.set_threshold(*thresholds)
        if froze:
            gc.unfreeze()
