"""A server that loads its model for minutes says so: silence looks like a hang, and its log shows what it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loguru import logger

from datatrove_ckpt.inference.servers.diagnosis import last_line, read_log
from datatrove_ckpt.redaction import Redactor

_SAY_EVERY = 30.0  # seconds


async def wait_for_first(
    tasks: tuple[asyncio.Task[Any], ...], window: float, line: Callable[[float], str], every: float | None = None
) -> None:
    """Returns when a task is done, or after ``window`` seconds. Until then it logs a line at each interval.

    Args:
        line: makes it from the seconds so far. Called in a thread.
        every: seconds; None: 30.
    """
    started = time.monotonic()
    every = every or _SAY_EVERY
    while True:
        waited = time.monotonic() - started
        done, _ = await asyncio.wait(
            tasks, timeout=max(0.0, min(every, window - waited)), return_when=asyncio.FIRST_COMPLETED
        )
        waited = time.monotonic() - started
        if done or waited >= window:
            return
        logger.info(await asyncio.to_thread(line, waited))


def starting_line(name: str, waited: float, window: float, log: Path, log_start: int, redact: Redactor) -> str:
    """What a server says while it starts.

    Args:
        name: of the engine.
        log: what the server writes; ``log_start``: since this byte.
    """
    last = last_line(redact(read_log(log, log_start)))
    said = f"The last line of its log ({log}): {last}" if last else f"Its log is empty so far ({log})."
    return f"The {name} server is starting, {waited:.0f} s of at most {window:.0f} s. {said}"
