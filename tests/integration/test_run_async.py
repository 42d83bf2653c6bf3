"""``run_async``: a rank inside an event loop that runs already."""

import asyncio
import os
import signal
import threading

import pytest

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.testing import FakeServer, outputs
from tests.jobs import ask, documents, rows, runner
from tests.patience import until_async


async def test_rollouts_run_on_the_callers_loop_beside_its_other_tasks(tmp_path, server):
    here, seen = asyncio.get_running_loop(), asyncio.Queue()
    others = asyncio.Event()

    async def rollout(document, generate):
        assert asyncio.get_running_loop() is here
        assert threading.current_thread() is threading.main_thread()
        await seen.put(document.id)
        await others.wait()
        return await ask(document, generate)

    async def other():
        found = [await seen.get() for _ in range(4)]
        others.set()
        return found

    step = runner(tmp_path, server, rollout)
    _, found = await asyncio.gather(step.run_async(documents(4)), other())
    assert sorted(found) == [f"id {index}" for index in range(4)]
    assert step.stats.stats["documents_processed"].total == 4
    assert len(outputs(tmp_path / "output")) == 2


async def test_several_ranks_run_on_one_loop_at_once(tmp_path, server):
    both = asyncio.Barrier(2)

    async def rollout(document, generate):
        await both.wait()
        return await ask(document, generate)

    step = runner(tmp_path, server, rollout)
    other = runner(tmp_path, server, rollout)
    await asyncio.gather(
        step.run_async(data_gen=iter(documents(2)), rank=0, world_size=2),  # as datatrove does
        other.run_async(documents(2), 1, world_size=2),
    )
    assert sorted(outputs(tmp_path / "output")) == [
        "00000_chunk_00000.jsonl",
        "00001_chunk_00000.jsonl",
    ]


SECOND = "a further signal, or cancellation, ends the wait"


async def test_a_cancellation_drains_and_no_request_is_paid_twice(tmp_path, log):
    with FakeServer(hold_after=2) as server:
        step = runner(
            tmp_path, server, config={"max_concurrent_generations": 3}, drain_seconds=3600
        )
        running = asyncio.create_task(step.run_async(documents(9)))
        await until_async(lambda: len(server.payloads) >= 5)
        running.cancel()
        await until_async(lambda: any(SECOND in line for line in log))
        assert not running.done()
        server.release()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(server.payloads) == 5
        await runner(tmp_path, server).run_async(documents(9))
        assert set(server.asked.values()) == {1}
    assert len(rows(tmp_path)) == 9


async def test_a_second_cancellation_ends_the_drain_and_the_same_call_resumes(tmp_path, log):
    with FakeServer(hold_after=4) as server:
        step = runner(tmp_path, server, config={"max_concurrent_documents": 1}, drain_seconds=3600)
        running = asyncio.create_task(step.run_async(documents(5)))
        await until_async(
            lambda: len(outputs(tmp_path / "output")) == 2 and len(server.payloads) == 5
        )
        running.cancel()
        await until_async(lambda: any(SECOND in line for line in log))
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for thread in threading.enumerate():
            if thread.name == "task 0":
                thread.join(300)
                assert not thread.is_alive()
    with FakeServer() as server:
        await runner(tmp_path, server).run_async(documents(5))
        assert dict(server.asked) == {"text 4": 1}
    assert len(rows(tmp_path)) == 5


def test_a_run_works_inside_a_running_loop(tmp_path, server, over):
    """As in a notebook's cell, whose loop stands still meanwhile."""
    step = runner(tmp_path / "step", server)
    pipeline = [documents(2), runner(tmp_path / "executor", server)]
    executor = LocalPipelineExecutor(pipeline, logging_dir=str(tmp_path / "logs"))

    async def cell():
        ours = asyncio.current_task()
        step.run(documents(2))
        executor.run()
        await asyncio.sleep(0)
        assert asyncio.current_task() is ours

    over(cell())
    for name in ("step", "executor"):
        assert len(rows(tmp_path / name)) == 2


async def test_a_signal_drains_a_run_inside_a_running_loop(tmp_path):
    """A cell that is interrupted raises KeyboardInterrupt; run again, it does the rest."""

    async def rollout(document, generate):
        answer = await ask(document, generate)
        if server.asked.total() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return answer

    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Jupyter's kernel does
    with FakeServer() as server:
        step = runner(tmp_path, server, rollout, config={"max_concurrent_documents": 1})
        with pytest.raises(KeyboardInterrupt):
            step.run(documents(3))
        assert server.asked.total() == 1
        step.run(documents(3))
        assert set(server.asked.values()) == {1}
    assert len(rows(tmp_path)) == 3
