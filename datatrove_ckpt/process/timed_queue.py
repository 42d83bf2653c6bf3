"""``SimpleQueue.get`` with a timeout, without a fault of CPython (seen in 3.11)."""

from __future__ import annotations

import queue
from typing import TypeVar

T = TypeVar("T")


def get_within(items: queue.SimpleQueue[T], seconds: float | None) -> T:
    """The next item. For queues that one thread reads. ``seconds`` None: without a limit.

    Raises:
        queue.Empty: there was none within that time.
    """
    # The queue's lock may be free although the queue is empty. Then ``get`` takes it, computes how much of its time is
    # left before it waits, and waits for good if that is negative: a thread that had to wait for a processor just then.
    # After a look that found nothing, the lock is taken.
    try:
        return items.get_nowait()
    except queue.Empty:
        return items.get(timeout=seconds)
