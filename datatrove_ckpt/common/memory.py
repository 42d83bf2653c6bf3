"""The memory that this process may use, and budgets for media."""

import asyncio
import os
import re
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

WORKERS_VARIABLE = "DATATROVE_CKPT_WORKERS"
"""The environment variable with the number of worker processes that share this machine's memory."""


@cache
def media_bytes() -> int:
    # Another quarter is for what is made of the data.
    return usable_memory() // 4 // max(1, int(os.environ.get(WORKERS_VARIABLE) or 1))


def usable_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of the machine, or what the cgroups of this process (a container, a Slurm
    job) leave of it.
    """
    return min([_whole_machine(), *(limit for limit, _ in _limits(root))])


def free_memory(root: Path = Path("/")) -> int:
    free = [_whole_machine()]
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(1024 * int(line.split()[1]))
    for limit, group in _limits(root):
        used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
        cached = re.search(r"^(?:total_)?inactive_file (\d+)", _text(group / "memory.stat"), re.M)
        if used.strip().isdecimal():
            free.append(limit - int(used) + (int(cached[1]) if cached else 0))
    return max(0, min(free))


def _whole_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(root: Path) -> Iterator[tuple[int, Path]]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):  # a group limits the groups below it
                for name in ("memory.max", "memory.limit_in_bytes"):
                    text = _text(folder / name).strip()
                    if text.isdecimal():
                        yield int(text), folder
                if folder == top:
                    break


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


class ByteBudget:
    """Limits the bytes that the tasks of an event loop hold together. A larger task goes alone.

    Each task acquires once, and they wait in order, so none waits forever.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, size: int) -> None:
        if not self._waiting and self._has_room(size):
            self.held += size
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(size)
            raise

    def release(self, size: int) -> None:
        self.held -= size
        while self._waiting and (self._waiting[0][1].done() or self._has_room(self._waiting[0][0])):
            size, future = self._waiting.popleft()
            if not future.done():  # else it was cancelled
                self.held += size
                future.set_result(None)

    def _has_room(self, size: int) -> bool:
        return self.held + size <= self.limit or not self.held
