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
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False
        self._loop = asyncio.get_running_loop()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """The coroutine handles its errors itself: nobody looks at the result of its task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=seconds)
        if self._tasks:
            logger.error(
                f"{len(self._tasks)} rollouts ignored their cancellation for {sum(patience):g} s and are left behind. "
                "A rollout must let asyncio.CancelledError out: write `except Exception`, not `except BaseException`."
            )
