"""An event loop whose clock moves only when there is nothing to do.

Where a program would wait for a timer, its clock jumps to it. So a simulation of hours takes
seconds, and how fast the machine is, or what else runs on it, changes no result.
"""

import asyncio
import selectors
import threading
import time
from pathlib import Path

_LOOK_AGAIN = 0.0001  # seconds of real time


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``time`` begins at 0. Callbacks, sockets and other threads take no time."""

    def __init__(self):
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self):
        return self.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self._loop = loop
        self._is_settled = False
        self._threads = {}

    def select(self, timeout=None):
        events = super().select(0)
        while not events and timeout != 0:
            # Only what comes from a socket, or from another thread, gives threads something to do.
            if not self._is_settled:
                # Threads that wait for the GIL take it now. ``select`` would wait for 1 ms.
                time.sleep(_LOOK_AGAIN)
                events = super().select(0)
                self._is_settled = self._others_wait() and not events
                continue
            if timeout is None:
                return super().select(1.0)
            # Timers run a moment early. One that is set for the rest of it would run at once, and
            # again and again: this clock would stand still.
            self._loop.now += timeout + self._loop._clock_resolution
            return []
        if events:
            self._is_settled = False
        return events

    def _others_wait(self):
        """Whether all other threads of this process wait, and none has run since the last look."""
        before = self._threads
        self._threads = _other_threads()
        working = any(state in "RD" for state, _ in self._threads.values())
        return not working and self._threads == before


def _other_threads():
    """The state of each (R: it runs or waits for a processor, D: for a disk), and how often it has
    stopped to run.
    """
    this = str(threading.get_native_id())
    threads = {}
    for thread in Path("/proc/self/task").iterdir():
        if thread.name == this:
            continue
        try:
            status = (thread / "status").read_text()
        except OSError:  # it has ended
            continue
        state = status.partition("State:\t")[2][0]
        threads[thread.name] = state, status.partition("\nvoluntary_ctxt_switches")[2]
    return threads
