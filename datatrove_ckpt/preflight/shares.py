"""Checks how the work is divided: files among tasks, and tasks among workers.

datatrove deals out whole files in the order of their names: task r gets the files r, r + tasks, r + 2 * tasks, ...
The largest task decides when the run ends, and a task without a file takes a place in the queue for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from datatrove_ckpt.formatting import byte_size, plural
from datatrove_ckpt.preflight.checks import PreflightCheck

# How much larger compressed input is once it is read: web text in gzip, zstd or Parquet.
GROWTH = 4
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".parquet")
# How many times longer than with equal tasks a run may take because of its largest task.
_LONGER = 2.0
# Numbers of tasks right above the present one that are tried for a better division.
_TRIED = 10


def grown(name: str, size: int) -> int:
    """The size of a file once it is read, about."""
    return size * (GROWTH if name.endswith(COMPRESSED) else 1)


def workers_of(executor: Any) -> int:
    """How many tasks run at once, at most."""
    elements, workers = _elements(executor), getattr(executor, "workers", -1)
    return min(elements, workers) if workers > 0 else elements


def _elements(executor: Any) -> int:
    """How many pieces of work there are for the workers: tasks, or with ``tasks_per_job`` elements of a job array."""
    return math.ceil(int(executor.world_size) / getattr(executor, "tasks_per_job", 1))


def check_workers(subject: str, executor: Any) -> list[PreflightCheck]:
    """Whether ``tasks_per_job`` leaves workers without a task."""
    tasks, workers = int(executor.world_size), getattr(executor, "workers", -1)
    per_job, elements = getattr(executor, "tasks_per_job", 1), _elements(executor)
    if per_job == 1:
        return []
    text = f"{plural(tasks, 'task')} in {plural(elements, 'array element')} of up to {per_job}"
    busy = min(tasks, workers)
    if elements >= busy:
        return [PreflightCheck("ok", subject, "workers", f"{text}.")]
    text = (
        f"{text}: only {elements} of {workers} workers have work. Set tasks_per_job to {tasks // busy}, or add tasks."
    )
    return [PreflightCheck("warning", subject, "workers", text)]


def check_shares(
    subject: str, names: Sequence[str], sizes: Sequence[int] | None, tasks: int, workers: int
) -> PreflightCheck:
    """Whether each task has input, and no task has so much that the others wait for it.

    Args:
        names: the files of the input, in datatrove's order.
        sizes: their bytes; None if unknown, or if something else than the size decides how much of them is read.
        workers: how many tasks run at once.
    """
    text = f"{plural(len(names), 'file')} for {plural(tasks, 'task')}"
    bytes_read = [grown(name, size) for name, size in zip(names, sizes or [], strict=False)]
    shares = _shares(bytes_read, tasks) if any(bytes_read) else []
    idle = shares.count(0) if shares else max(0, tasks - len(names))
    if idle:
        return PreflightCheck("warning", subject, "shares", _say_idle(text, bytes_read, len(names), tasks, idle))
    if tasks == 1 or sizes is None or not shares:
        return PreflightCheck("ok", subject, "shares", f"{text}.")
    share, longer = f"holds {_largest(shares)} of the bytes", _times_longer(shares, workers)
    if longer < _LONGER:
        return PreflightCheck("ok", subject, "shares", f"{text}; the largest task {share}.")
    rank = shares.index(max(shares))
    number = _better_number(bytes_read, tasks, workers)
    text = (
        f"one task {share}: task {rank} ({text}). With {workers} tasks at once, the run takes about {longer:.2g} times "
        f"as long as with equal tasks. {number or _split(names, sizes, rank, tasks)} Do it before the first start."
    )
    return PreflightCheck("warning", subject, "shares", text)


def _shares(sizes: Sequence[int], tasks: int) -> list[int]:
    """The bytes of each task."""
    return [sum(sizes[rank::tasks]) for rank in range(tasks)]


def _times_longer(shares: Sequence[int], workers: int) -> float:
    """How many times longer the largest task takes than a run in which all workers are busy to the end."""
    return max(shares) * workers / sum(shares)


def _say_idle(text: str, sizes: Sequence[int], files: int, tasks: int, idle: int) -> str:
    """The tasks without input, and what to do."""
    said, empty = f"{idle} of {tasks} tasks have no input: {text}", sizes.count(0)
    if not empty:
        return f"{said}. Set tasks to {files}, or split the input into at least {tasks} files."
    said += f", of which {empty} {'is' if empty == 1 else 'are'} empty. Move the empty files away"
    return f"{said}, and set tasks to {files - empty}." if files - empty < tasks else f"{said}."


def _better_number(sizes: Sequence[int], tasks: int, workers: int) -> str:
    """A larger number of tasks, if one divides the input well."""
    for number in [*range(tasks + 1, tasks + 1 + _TRIED), 2 * tasks, 4 * tasks, len(sizes)]:
        if tasks < number <= len(sizes):
            shares = _shares(sizes, number)
            if all(shares) and _times_longer(shares, workers) < _LONGER:
                return f"Set tasks to {number}: then the largest holds {_largest(shares)} of the bytes."
    return ""


def _split(names: Sequence[str], sizes: Sequence[int], rank: int, tasks: int) -> str:
    """Advice for a file that is too large for any number of tasks."""
    size, name = max(zip(sizes[rank::tasks], names[rank::tasks], strict=True))
    return f"Split {name!r} ({byte_size(size)}) into files of about {byte_size(sum(sizes) / tasks)}."


def _largest(shares: Sequence[int]) -> str:
    share = 100 * max(shares) / sum(shares)
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"
