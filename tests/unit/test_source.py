"""The documents of a rank, as the event loop gets them from the reader's thread."""

import asyncio
import threading

import pytest

from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.generation.prefetch import DocumentSource


@pytest.mark.parametrize("steps", range(6))
async def test_no_moment_of_an_arrival_swallows_a_cancellation(steps):
    """``asyncio.wait_for`` did, in Python 3.11: a rank whose disk failed then waited without
    end.
    """
    blocked = threading.Event()

    def documents():
        blocked.wait()
        yield from ()

    async def read(source):
        async for _ in source.batches(ResumePoint()):
            pass

    source = DocumentSource(documents())
    reading = asyncio.create_task(read(source))
    await asyncio.sleep(0)  # it waits now
    source._arrived.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    reading.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    blocked.set()
    await asyncio.wait([reading])
    assert reading.cancelled()
