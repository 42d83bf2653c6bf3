"""One object says whether a rank stops, and how quickly; one function stops it, in order."""

import asyncio
import queue
import threading
import time

import pytest

from datatrove_ckpt.errors import GoalReached, Preempted
from datatrove_ckpt.process.shutdown import Shutdown


def test_the_states_of_a_stop():
    shutdown, states = Shutdown(20), []
    shutdown.call(
        lambda: states.append((shutdown.is_requested, shutdown.is_fast, shutdown.aborted))
    )
    shutdown.check()
    assert not shutdown.is_requested
    before = time.monotonic()
    shutdown.request("SIGTERM")
    shutdown.request("SIGUSR1")
    assert shutdown.cause == "SIGTERM"
    assert before + 20 <= shutdown.deadline <= time.monotonic() + 20
    assert not shutdown.is_fast
    shutdown.fast_stop()
    assert shutdown.deadline <= time.monotonic()
    assert shutdown.is_fast
    shutdown.abort()
    assert states == [(True, False, False), (True, True, False), (True, True, True)]
    with pytest.raises(Preempted, match="Stopped by SIGTERM"):
        shutdown.check()


def test_a_failure_aborts_and_the_first_one_counts():
    shutdown = Shutdown()
    shutdown.abort()
    shutdown.abort(ValueError("first"))
    shutdown.abort(ValueError("second"))
    assert str(shutdown.failure) == "first"
    assert shutdown.aborted
    assert not shutdown.is_requested


async def test_what_finishes_takes_its_time_until_a_signal_comes():
    shutdown = Shutdown(0.01)
    shutdown.finish(GoalReached())
    assert shutdown.is_stopping
    assert shutdown.is_finishing
    assert await shutdown.wait_for(asyncio.sleep(0.05))
    threading.Timer(0.01, shutdown.request, ["SIGTERM"]).start()
    assert not await shutdown.wait_for(asyncio.sleep(600))
    assert not shutdown.is_finishing
    assert isinstance(shutdown.failure, GoalReached)


@pytest.mark.parametrize(
    "change, in_time",
    [(lambda shutdown: None, True), (Shutdown.fast_stop, False)],
    ids=["in time", "fast stop"],
)
async def test_the_event_loop_is_woken_from_any_thread(change, in_time):
    shutdown = Shutdown(600)
    threading.Timer(0.01, shutdown.request, ["SIGTERM"]).start()
    await shutdown.requested()
    threading.Timer(0.01, change, [shutdown]).start()
    assert await shutdown.wait_for(asyncio.sleep(0.05 if in_time else 600)) == in_time


async def test_a_request_that_a_blocked_event_loop_has_not_seen_is_unnoticed():
    shutdown = Shutdown(600)
    stopping = asyncio.create_task(shutdown.requested())
    await asyncio.sleep(0)
    assert not shutdown.is_unnoticed
    shutdown.request("SIGTERM")
    assert shutdown.is_unnoticed
    await stopping
    assert not shutdown.is_unnoticed


LONG = 3600.0  # longer than a test may take


@pytest.mark.parametrize(
    "changes, running, draining",
    [
        ((), 0.0, LONG),
        ((lambda shutdown: shutdown.request("SIGTERM"),), None, 0.05),
        ((lambda shutdown: shutdown.request("SIGTERM"), Shutdown.fast_stop), None, LONG),
    ],
    ids=["running", "draining", "fast stop"],
)
def test_a_thread_is_waited_for_no_longer_than_the_state_allows(changes, running, draining):
    shutdown = Shutdown(600)

    def change():
        for one in changes:
            one(shutdown)

    threading.Timer(0.02, change).start()
    assert not shutdown.join(queue.SimpleQueue(), running, draining)


def test_a_thread_that_ends_is_seen_at_once():
    ended = queue.SimpleQueue()
    threading.Timer(0.02, ended.put, [True]).start()
    assert Shutdown().join(ended, None, 0.0)
