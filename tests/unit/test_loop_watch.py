"""The watch ends a process that was asked to stop and whose event loop does not end, and only then."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from datatrove_ckpt.process import loop_watch
from datatrove_ckpt.process.loop_watch import LoopWatch
from datatrove_ckpt.process.shutdown import Shutdown


class Watch(LoopWatch):
    def __init__(self, shutdown: Shutdown) -> None:
        super().__init__(shutdown, lambda: None, lambda: 1)
        self.ended = threading.Event()

    def _end(self) -> None:
        self.ended.set()
        self.close()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_GRACE", 0.2), ("_GRACE_FAST", 0.2), ("_AGAIN", 0.01), ("_PONG", 0.2)):
        monkeypatch.setattr(loop_watch, name, seconds)


async def stopping(shutdown: Shutdown, fast: bool = False) -> Watch:
    """As ``Preemption.watched`` does it, on a loop that answers."""
    watch = Watch(shutdown)
    stop = asyncio.create_task(shutdown.requested())
    await asyncio.sleep(0)
    shutdown.request("SIGTERM")
    if fast:
        shutdown.fast_stop()
    watch.start()
    await stop
    return watch


@pytest.mark.parametrize("fast", [False, True])
async def test_a_loop_that_answers_and_does_not_end_is_ended_too(fast: bool) -> None:
    watch = await stopping(Shutdown(600 if fast else 0), fast)
    assert await asyncio.to_thread(watch.ended.wait, 300)


async def test_servers_and_storage_may_take_longer_and_the_time_counts_from_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_watch, "_PONG", 600.0)  # a loop that answers late is not blocked

    shutdown = Shutdown(0)
    watch = await stopping(shutdown)
    with shutdown.closing():
        with shutdown.closing():
            pass
        assert not await asyncio.to_thread(watch.ended.wait, 0.6)
    assert not watch.ended.is_set()
    assert await asyncio.to_thread(watch.ended.wait, 300)


async def test_a_loop_that_ends_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    began, late = time.monotonic(), threading.Event()
    clock = lambda: began + 600 * late.is_set()  # noqa: E731 (it stands until the loop has ended)
    monkeypatch.setattr(loop_watch, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))

    watch = await stopping(Shutdown(0))
    watch.close()
    late.set()
    assert not await asyncio.to_thread(watch.ended.wait, 0.5)
