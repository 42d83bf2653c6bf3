"""The event loop of a run, and the watch that ends a process whose loop does not end."""

import asyncio
import gc
import threading
import time
from types import SimpleNamespace

import pytest

from datatrove_ckpt.process import event_loop, preemption
from datatrove_ckpt.process.preemption import LoopWatchdog
from datatrove_ckpt.process.shutdown import Shutdown
from tests.patience import until_async


def test_a_signal_that_is_raised_in_the_loop_leaves_nothing_to_complain_about_later(
    caplog,
):
    async def signalled():
        raise KeyboardInterrupt

    async def main():
        async with asyncio.TaskGroup() as group:
            group.create_task(signalled())

    caplog.clear()
    gc.freeze()  # what other tests have left is none of this one's
    with pytest.raises(KeyboardInterrupt):
        event_loop.run(main())
    gc.collect()
    gc.unfreeze()
    assert "never retrieved" not in caplog.text


# The watch ends a process that was asked to stop and whose event loop does not end, and only then


class Watch(LoopWatchdog):
    def __init__(self, shutdown):
        super().__init__(shutdown, lambda: None, lambda: 1)
        self.ended = threading.Event()
        self.left = threading.Event()

    def _watch(self):
        super()._watch()
        self.left.set()

    def _end(self):
        self.ended_at = time.monotonic()
        self.ended.set()
        self.close()


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    for name, seconds in (("_GRACE", 0.2), ("_GRACE_FAST", 0.2), ("_AGAIN", 0.01)):
        monkeypatch.setattr(preemption, name, seconds)


async def stopping(shutdown, fast=False):
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
async def test_a_loop_that_answers_and_does_not_end_is_ended_too(fast):
    watch = await stopping(Shutdown(600 if fast else 0), fast)
    assert await asyncio.to_thread(watch.ended.wait, 300)


async def test_servers_and_storage_may_take_longer_and_the_time_counts_from_their_end(monkeypatch):
    looks = []

    def sleep(seconds):
        looks.append(time.monotonic())
        time.sleep(seconds)

    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    shutdown = Shutdown(0)
    with shutdown.closing():
        watch = await stopping(shutdown)
        with shutdown.closing():
            pass
        over = time.monotonic() + 0.2
        await until_async(lambda: len([look for look in looks if look > over]) > 2)
        assert not watch.ended.is_set()
    assert await asyncio.to_thread(watch.ended.wait, 300)
    assert watch.ended_at >= shutdown.closed_at + 0.2


async def test_a_loop_that_ends_in_time_is_left_alone(monkeypatch):
    began, late = time.monotonic(), threading.Event()
    clock = lambda: began + 600 * late.is_set()  # noqa: E731 (it stands until the loop has ended)
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))

    watch = await stopping(Shutdown(0))
    watch.close()
    late.set()
    assert await asyncio.to_thread(watch.left.wait, 300)
    assert not watch.ended.is_set()
