"""An event loop whose clock moves only when there is nothing to do.

Where a program would wait for a timer, its clock jumps to it. So a simulation of hours takes
seconds, and how fast the machine is, or what else runs on it, changes no result.
"""

import asyncio
import os
import selectors
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

    def select(self, timeout=None):
        events = super().select(0)
        while not events and timeout != 0:
            # Only what comes from a socket, or from another thread, gives threads something to do.
            if not self._is_settled:
                # This also gives threads that wait for the GIL the chance to take it.
                time.sleep(_LOOK_AGAIN)  # ``select`` would wait for a whole millisecond
                events = super().select(0)
                self._is_settled = not events and not _other_threads_work()
                continue
            if timeout is None:
                return super().select(1.0)
            self._loop.now += timeout
            return []
        if events:
            self._is_settled = False
        return events


def _other_threads_work():
    """Whether a thread of this process runs, waits for a processor or for a disk."""
    this = str(os.getpid())  # the main thread's number is that of the process
    for thread in Path("/proc/self/task").iterdir():
        if thread.name == this:
            continue
        try:
            state = (thread / "stat").read_bytes().rpartition(b") ")[2][:1]
        except OSError:  # it has ended
            continue
        if state in b"RD":
            return True
    return False
