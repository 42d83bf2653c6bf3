"""One object says whether a rank stops, and how quickly; one function stops it, in order."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.errors import Preempted
from datatrove_ckpt.generation.document_tasks import DocumentTasks
from datatrove_ckpt.generation.drain import Drain
from datatrove_ckpt.generation.stop import stop_when_requested
from datatrove_ckpt.inference.client.client import CompletionClient
from datatrove_ckpt.inference.client.routing import Request
from datatrove_ckpt.process.shutdown import Shutdown, StopState


def test_the_states_of_a_stop() -> None:
    shutdown, states = Shutdown(20), []
    shutdown.call(lambda: states.append(shutdown.state))
    shutdown.check()
    assert shutdown.state is StopState.RUNNING
    before = time.monotonic()
    shutdown.request("SIGTERM")
    shutdown.request("SIGUSR1")
    assert shutdown.cause == "SIGTERM"
    assert before + 20 <= shutdown.deadline <= time.monotonic() + 20
    assert not shutdown.kills_servers
    shutdown.fast_stop()
    assert shutdown.deadline <= time.monotonic()
    assert shutdown.kills_servers
    shutdown.abort()
    assert states == [StopState.DRAINING, StopState.FAST_STOP, StopState.ABORTED]
    with pytest.raises(Preempted, match="Stopped by SIGTERM"):
        shutdown.check()


async def test_a_failure_aborts_and_the_first_one_counts() -> None:
    shutdown = Shutdown()
    failed = asyncio.create_task(shutdown.failed())
    await asyncio.sleep(0)
    shutdown.abort()
    shutdown.abort(ValueError("first"))
    shutdown.abort(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        await failed
    assert shutdown.state is StopState.ABORTED
    assert not shutdown.is_requested


@pytest.mark.parametrize(
    ("change", "in_time"), [(lambda shutdown: None, True), (Shutdown.fast_stop, False)], ids=["in time", "fast stop"]
)
async def test_the_event_loop_is_woken_from_any_thread(change: Callable[[Shutdown], None], in_time: bool) -> None:
    shutdown = Shutdown(600)
    threading.Timer(0.01, shutdown.request, ["SIGTERM"]).start()
    await shutdown.requested()
    threading.Timer(0.01, change, [shutdown]).start()
    assert await shutdown.wait_for(asyncio.sleep(0.05 if in_time else 600)) == in_time


async def test_a_request_that_a_blocked_event_loop_has_not_seen_is_unnoticed() -> None:
    shutdown = Shutdown(600)
    stopping = asyncio.create_task(shutdown.requested())
    await asyncio.sleep(0)
    assert not shutdown.is_unnoticed
    shutdown.request("SIGTERM")
    assert shutdown.is_unnoticed
    await stopping
    assert not shutdown.is_unnoticed


@pytest.mark.parametrize(
    ("changes", "running", "draining"),
    [
        ((), 0.0, 600.0),
        ((lambda shutdown: shutdown.request("SIGTERM"),), None, 0.05),
        ((lambda shutdown: shutdown.request("SIGTERM"), Shutdown.fast_stop), None, 600.0),
    ],
    ids=["running", "draining", "fast stop"],
)
@pytest.mark.parametrize("already", [True, False])
def test_a_thread_is_waited_for_no_longer_than_the_state_allows(
    changes: Any, running: float | None, draining: float, already: bool
) -> None:
    shutdown = Shutdown(600)

    def change() -> None:
        for one in changes:
            one(shutdown)

    change() if already else threading.Timer(0.02, change).start()
    began = time.monotonic()
    assert not shutdown.join(queue.SimpleQueue(), running, draining)
    assert time.monotonic() - began < 200


def test_a_thread_that_ends_is_seen_at_once() -> None:
    ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Timer(0.02, ended.put, [True]).start()
    assert Shutdown().join(ended, None, 0.0)


class Rank:
    """Notes what its stop does, in which order. Its one request is answered only if its drain has time."""

    def __init__(self, drain_seconds: float) -> None:
        self.steps: list[str] = []
        self.answer = asyncio.Event()
        if drain_seconds:
            asyncio.get_running_loop().call_later(0.05, self.answer.set)
        self.shutdown = Shutdown(drain_seconds)
        self.checkpoint = self
        self.publishing = 0
        self.on_change: Callable[[], None] = lambda: None
        self.client: asyncio.Future[CompletionClient] = asyncio.get_running_loop().create_future()
        config = InferenceConfig("endpoint", "m", endpoint_url="http://localhost")
        self.router_of = CompletionClient(config, [], None, shutdown=self.shutdown)
        self.router = self.router_of.router
        self.target = self.router_of.add()
        self.target.up = True
        self.drain = Drain()
        self.documents = DocumentTasks()

    def hurry(self) -> None:
        self.steps.append("hurried")

    async def next_change(self) -> None:
        raise AssertionError

    def close(self, completed: bool = False) -> None:
        self.steps.append(f"closed, {threading.current_thread() is not threading.main_thread()}")

    async def serve(self) -> None:
        self.client.set_result(self.router_of)
        try:
            await asyncio.Event().wait()
        finally:
            self.steps.append("servers killed" if self.shutdown.kills_servers else "servers stopped")

    async def document(self) -> None:
        self.drain.document_started()
        try:
            self.drain.request_started()
            target = await self.router.acquire(Request())
            await self.answer.wait()
            self.steps.append("answered")
            self.router.release(target)
            self.drain.request_finished()
            await asyncio.Event().wait()
        finally:
            self.steps.append(f"document cut off, {self.shutdown.state.name}")


@pytest.mark.parametrize(
    ("seconds", "before"),
    [
        (600.0, ["hurried", "answered", "document cut off, ABORTED", "servers stopped"]),
        (0.0, ["hurried", "document cut off, ABORTED", "servers killed"]),
    ],
    ids=["in time", "late"],
)
async def test_a_stop_goes_in_order(seconds: float, before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datatrove_ckpt.generation.drain._GRACE_SECONDS", 0.0)

    rank = Rank(seconds)
    serving = asyncio.create_task(rank.serve())
    rank.documents.start(0, rank.document())
    stopping = asyncio.create_task(stop_when_requested(rank, serving))
    while not rank.router.in_flight:
        await asyncio.sleep(0)
    rank.shutdown.request("SIGTERM")
    waiting = asyncio.create_task(rank.router.acquire(Request()))
    with pytest.raises(Preempted):
        await stopping
    assert not waiting.done(), "the router sends nothing"
    waiting.cancel()
    assert sorted(rank.steps[:-1]) == sorted(before)
    assert rank.steps[-1] == "closed, True"
