"""Seconds that a promise may take, counted only while the machine has time for it.

On a quiet machine they are seconds. While processes wait for a processor or a disk (Linux's
pressure stall information), they stand still: a promise that is broken fails its test, a machine
that does other work does not. The limit of a test (``timeout`` in pyproject.toml) ends one that
waits for ever.
"""

import asyncio
import re
import select
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

PRESSURE = Path("/proc/pressure")
LAG = 2.2  # seconds: the kernel brings its sums up to date every two seconds, when they are read


def stalled():
    """Seconds that some process of the machine has waited for a processor, memory or a disk; 0 if
    it is not told.
    """
    files = [PRESSURE / name for name in ("cpu", "memory", "io")]
    sums = [
        re.search(r"^some .*total=(\d+)", file.read_text(), re.M) for file in files if file.exists()
    ]
    return sum(int(found[1]) for found in sums if found) / 1e6


def until(condition, seconds=300.0, what=str):
    """Waits for what nothing tells of, and returns it.

    Args:
        what: says what is missing.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.005)
    return found


async def until_async(condition):
    """The same in an event loop."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.005)


def pass_for(seconds):
    """Moves the clock of the running event loop, which is one of asyncio's own."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + seconds


class HeldTime:
    """Sleeps of coroutines that end when a test says that time has passed."""

    def __init__(self):
        self._sleepers = []

    def in_place_of(self, module):
        """asyncio, with these sleeps, for a module of the package."""
        return SimpleNamespace(**vars(module) | {"sleep": self._sleep})

    async def _sleep(self, seconds):
        self._sleepers.append((seconds, asyncio.get_running_loop().create_future()))
        await self._sleepers[-1][1]

    def pass_for(self, seconds):
        """Ends the sleeps that are at most so long; what they begin then is another time's."""
        due = [sleeper for sleeper in self._sleepers if sleeper[0] <= seconds]
        self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[0] > seconds]
        for _, end in due:
            if not end.done():
                end.set_result(None)


class Patience:
    """``while not happened: assert not patience.over()``."""

    def __init__(self, seconds):
        self.seconds = seconds
        self._began, self._stalled = time.monotonic(), stalled()

    def over(self):
        """Whether the seconds have passed. Waits for the kernel's sums before it says so."""
        passed = time.monotonic() - self._began - self.seconds
        if passed <= stalled() - self._stalled:
            return False
        time.sleep(LAG)
        return passed > stalled() - self._stalled

    def ends(self, descriptor):
        """Whether the process of a pidfd ends in time."""
        while not (ended := bool(select.select([descriptor], [], [], 0.1)[0])) and not self.over():
            pass
        return ended or bool(select.select([descriptor], [], [], 0)[0])

    def output_of(self, process):
        """What it wrote until nobody held its standard output any more.

        Raises ``TimeoutExpired`` when time is over.
        """
        while True:
            try:
                return process.communicate(timeout=0.1)[0]
            except subprocess.TimeoutExpired:
                if self.over():
                    raise
