"""Where a process gets its tasks, and reports their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Tasks(Protocol):
    def next(self) -> int | None:
        """Waits for a task. Returns None if this process gets no more."""

    async def wait_for_next(self) -> int | None:
        """``next`` on an event loop. It may be cancelled."""

    def done(self, task: int, value: object) -> None:
        """Reports the result of a task."""

    def failed(self, task: int | None, error: BaseException) -> None:
        """Reports the failure of a task, or (None) of the runner of all tasks.

        The error is raised once all tasks have ended.
        """


class TaskList:
    """Tasks from an iterator, which may block.

    Args:
        done: called with each task and its result, unless that is None: another process has the
            task.
    """

    def __init__(self, tasks: Iterable[int], done: Callable[[int, Any], None]) -> None:
        self._tasks = iter(tasks)
        self._done = done

    def next(self) -> int | None:
        return next(self._tasks, None)

    async def wait_for_next(self) -> int | None:
        return await asyncio.to_thread(self.next)

    def done(self, task: int, result: Any) -> None:
        if result is not None:
            self._done(task, result)

    def failed(self, task: int | None, error: BaseException) -> None:
        pass


def in_turn(run: Callable[[int], object], tasks: Tasks) -> None:
    for task in iter(tasks.next, None):
        try:
            result = run(task)
        except BaseException as error:
            tasks.failed(task, error)
            raise
        tasks.done(task, result)
