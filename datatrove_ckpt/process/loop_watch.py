"""Ends a process that was asked to stop and whose event loop does not end.

A rollout that computes without end, or that sleeps in ``time.sleep`` and swallows KeyboardInterrupt, holds the main
thread: no drain can end, and no signal is handed on. Then a thread of ours waits until everything that was handed over
is on the disk, calls the old handlers (they may requeue the job), and ends the process with ``os._exit``. A run
survives that like ``kill -9``: locks go with the process, servers end with their runner, nothing is marked complete.

The same happens where the loop runs and does not come to its end, for example because an async generator of a rollout
does not. While servers stop and the checkpoint is closed, only a blocked loop counts: they limit their time themselves,
and a disk may be slow (``Shutdown.closing``).

A loop that is only left behind by rollouts that ignore their cancellation is not blocked: see ``event_loop.py``.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from loguru import logger

from datatrove_ckpt.process.event_loop import call_soon
from datatrove_ckpt.process.manager_watch import end_managers
from datatrove_ckpt.process.screen import leave_terminal
from datatrove_ckpt.process.shutdown import Shutdown

# All times are seconds.
_GRACE = 10.0  # after the drain's end
_GRACE_FAST = 2.0  # after a second signal
_PONG = 5.0  # the loop of a loaded machine may be late
_SAVE = 30.0
_AGAIN = 0.2


class LoopWatch:
    """Watches one rank's event loop from the moment a stop is requested until ``close``.

    Args:
        shutdown: what was asked for, and on which event loop.
        save: returns when everything that was handed over is on the disk.
        hand_on: calls the signal's old handlers; returns the exit code.
    """

    def __init__(self, shutdown: Shutdown, save: Callable[[], None], hand_on: Callable[[], int]) -> None:
        self._shutdown = shutdown
        self._save = save
        self._hand_on = hand_on
        self._started = False
        self._closed = False

    def start(self) -> None:
        """Starts the thread if a stop is requested. Takes no lock, as ``threading.Thread.start`` would."""
        if self._shutdown.is_requested and not self._started:
            self._started = True
            _thread.start_new_thread(self._watch, ())

    def close(self) -> None:
        """The event loop has ended."""
        self._closed = True

    def _watch(self) -> None:
        while not self._closed:
            time.sleep(_AGAIN)
            if (self._is_late() or self._is_blocked()) and not self._closed:
                self._end()

    def _is_late(self) -> bool:
        """The loop has had its time, whether it is blocked or not."""
        if self._shutdown.is_closing:
            return False
        grace = _GRACE_FAST + _PONG if self._shutdown.is_fast else _GRACE
        return time.monotonic() >= max(self._shutdown.deadline, self._shutdown.closed_at) + grace

    def _is_blocked(self) -> bool:
        grace = _GRACE_FAST if self._shutdown.is_fast else _GRACE
        return time.monotonic() >= self._shutdown.deadline + grace and not self._answers()

    def _answers(self) -> bool:
        pong = threading.Event()
        if self._shutdown.loop is not None:
            call_soon(self._shutdown.loop, pong.set)
        return pong.wait(_PONG)

    def _end(self) -> None:
        code = [1]

        def finish() -> None:
            with suppress(BaseException):
                self._save()
            logger.error(
                "This rank was asked to stop, and a rollout keeps its event loop from ending: it computes without end, "
                "calls time.sleep, or has an async generator or a thread that does not end. Everything that is "
                "finished is saved, and the process ends now. Run the same command again to resume."
            )
            code[0] = self._hand_on()

        # In a thread, because the main thread may hold a lock, of the log for example.
        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(_SAVE)
        end_managers()
        leave_terminal()
        os._exit(code[0])
