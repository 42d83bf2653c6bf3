"""Deals parts of an input out to tasks by their bytes. Pure: only ``cut`` reads anything.

Files that cannot be entered in the middle come first, the largest first, each to the task that has the least. All
others are laid end to end, and cut where a task is full. So every task has the same, as far as one file allows, and
there are no more cuts than tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from datatrove_ckpt.checkpoint.shares import Part

Cut = Callable[[Part, Sequence[int]], list[Part]]
"""Divides a part after about so many bytes of it each, in ascending order. Fewer pieces than asked for are fine."""

SMALLEST_CUT = 0.05
"""A file is not cut for less than this part of a task's share."""


def deal(
    parts: Sequence[Part], loads: Sequence[float], cut: Cut, is_divisible: Callable[[Part], bool]
) -> list[list[Part]]:
    """The parts for each task.

    Args:
        loads: bytes that each task has to do already.
    """
    full = list(map(float, loads))
    dealt: list[list[tuple[int, Part]]] = [[] for _ in loads]
    line = []
    for place, part in sorted(enumerate(parts), key=lambda one: -one[1].bytes):
        if is_divisible(part):
            line.append((place, part))
        else:
            task = min(range(len(full)), key=full.__getitem__)
            dealt[task].append((place, part))
            full[task] += part.bytes
    _lay_out(sorted(line), full, dealt, cut)
    return [[part for _, part in sorted(mine, key=lambda one: one[0])] for mine in dealt]


def _lay_out(line: list[tuple[int, Part]], full: list[float], dealt: list[list[tuple[int, Part]]], cut: Cut) -> None:
    level = fill_level(full, sum(part.bytes for _, part in line))
    room = {task: level - load for task, load in enumerate(full) if load < level}
    tasks = iter(sorted(room))
    task = next(tasks, 0)
    left = room.get(task, 0.0)
    for place, part in line:
        ends: list[int] = []
        owners = [task]
        start = 0.0
        while part.bytes - start > left + SMALLEST_CUT * level and (following := next(tasks, None)) is not None:
            if left > SMALLEST_CUT * level:
                start += left
                ends.append(int(start))
                owners.append(following)
            else:
                owners[-1] = following
            task, left = following, room[following]
        pieces = cut(part, ends) if ends else [part]
        for owner, piece in zip(owners, pieces, strict=False):
            dealt[owner].append((place, piece))
        left -= part.bytes - start


def fill_level(loads: Sequence[float], amount: float) -> float:
    """How high the loads are once the amount is poured over them, the lowest first."""
    ordered = sorted(loads)
    for number, (load, below) in enumerate(zip(ordered, accumulate(ordered), strict=True), start=1):
        level = (below + amount) / number
        if number == len(ordered) or level <= ordered[number]:
            return max(level, load)
    return 0.0
