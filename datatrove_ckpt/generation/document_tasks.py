"""The tasks of the documents in work, which a rank can leave behind.

``asyncio.TaskGroup`` waits without a limit for a task that swallows its cancellation, as ``while True: try: ... except
BaseException: pass`` does. A rank must end all the same: when it fails, when it is preempted, before Slurm kills it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from loguru import logger

# Seconds between two cancellations. Their sum is what a rollout has for its clean-up.
_PATIENCE = (0.2, 0.8, 2.0, 2.0)
_PATIENCE_FAST = (0.2, 0.8)


class DocumentTasks:
    """Starts a task for each document, and ends those that are left."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended = False
        self._loop = asyncio.get_running_loop()

    def start(self, ordinal: int, work: Coroutine[Any, Any, None]) -> None:
        """The coroutine handles its errors itself: nobody looks at its result. It calls ``done`` when it ends."""
        self._tasks[ordinal] = self._loop.create_task(work)

    def done(self, ordinal: int) -> None:
        # A callback of the task would take a turn of the event loop of its own.
        self._tasks.pop(ordinal, None)

    async def end(self, fast: bool) -> None:
        """Cancels the tasks that are left, several times if need be, and leaves behind those that ignore that.

        Args:
            fast: wait a second instead of five.
        """
        if self._ended:
            return
        self._ended = True
        patience = _PATIENCE_FAST if fast else _PATIENCE
        for seconds in patience:
            for task in self._left():
                task.cancel()
            if left := self._left():
                await asyncio.wait(left, timeout=seconds)
        if left := self._left():
            logger.error(
                f"{len(left)} rollouts ignored their cancellation for {sum(patience):g} s and are left behind. "
                "A rollout must let asyncio.CancelledError out: write `except Exception`, not `except BaseException`."
            )

    def _left(self) -> list[asyncio.Task[None]]:
        return [task for task in self._tasks.values() if not task.done()]
