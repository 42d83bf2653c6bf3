"""Warns of a rollout that blocks the event loop, where an agent would wait for itself."""

import asyncio
import threading
from collections import defaultdict

from loguru import logger

from datatrove_ckpt.common.threads import in_thread
from datatrove_ckpt.generation.user_frames import runs_at

_BLOCKED_SECONDS = 10.0
_watching: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
"""A lock for each loop's thread: one of the ranks on that loop watches at a time."""
_named = {""}


async def warn_when_blocked() -> None:
    """Warns of each place that blocks the running loop, once in a process."""
    beat = threading.Event()
    has_ended = threading.Event()
    loop_thread = threading.get_ident()

    def watch() -> None:
        with _watching[loop_thread]:
            while not has_ended.is_set():
                if beat.wait(_BLOCKED_SECONDS):
                    beat.clear()
                    continue
                line = runs_at(loop_thread)
                if line not in _named:
                    _named.add(line)
                    logger.warning(
                        f"For {_BLOCKED_SECONDS:g} s, the rollout has blocked the event "
                        f"loop{line}: no other request is sent or answered until this returns. "
                        "Move the blocking call into a thread: "
                        "`await asyncio.to_thread(function, ...)`."
                    )
                beat.wait()
                beat.clear()

    in_thread(watch, "datatrove-ckpt loop watch")
    try:
        while True:
            beat.set()
            await asyncio.sleep(1.0)
    finally:
        has_ended.set()
        beat.set()
