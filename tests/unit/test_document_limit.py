"""Documents in work under ``max_concurrent_generations: auto``: enough for the requests in flight, and few more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.generation.document_limit import DocumentLimit, most_documents
from datatrove_ckpt.inference.client.routing import Request, Router, Target

Ask = Callable[[], Awaitable[None]]
Rollout = Callable[[Ask], Awaitable[None]]


def config(**settings: Any) -> InferenceConfig:
    return InferenceConfig(**{"server_type": "vllm", "model_name_or_path": "m", **settings})


class Work:
    """Documents without end, whose requests take one turn of the event loop or a few.

    Attributes:
        documents: in work.
        requests: in flight, at their most.
    """

    def __init__(self, settings: InferenceConfig, rollout: Rollout) -> None:
        self.router = Router(most_documents(settings) * settings.rollouts_per_document)
        self.target = Target()
        self.target.limit = 16
        self.router.targets.append(self.target)
        self.documents = 0
        self.most = 0
        self.limit = DocumentLimit(settings)
        self._rollout = rollout

    async def run(self, turns: int) -> None:
        self._admitting = asyncio.create_task(self._admit())
        await _turns(3)  # the server starts
        self.target.up = True
        self.router.admit()
        self.limit.follow(self.router)
        await self.go_on(turns)

    async def go_on(self, turns: int) -> None:
        self.most = 0
        for _ in range(turns):
            self.most = max(self.most, self.router.in_flight)
            await asyncio.sleep(0)

    async def _admit(self) -> None:
        tasks = set()
        while True:
            await self.limit.acquire()
            self.documents += 1
            tasks.add(asyncio.create_task(self._process()))

    async def _process(self) -> None:
        await self._rollout(self._ask)
        self.documents -= 1
        self.limit.release()

    async def _ask(self) -> None:
        target = await self.router.acquire(Request())
        await _turns(4)
        self.router.release(target)


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def plain(ask: Ask) -> None:
    await ask()


async def with_other_work(ask: Ask) -> None:
    await _turns(10)
    await ask()
    await _turns(10)


async def four_at_once(ask: Ask) -> None:
    await asyncio.gather(*(ask() for _ in range(4)))


@pytest.mark.parametrize(("rollout", "fewest", "most"), [(plain, 16, 32), (with_other_work, 60, 170)])
async def test_documents_keep_the_requests_in_flight_and_are_not_many_more(
    rollout: Rollout, fewest: int, most: int
) -> None:
    work = Work(config(max_concurrent_generations="auto"), rollout)
    await work.run(500)
    assert work.most == 16
    assert fewest <= work.documents <= most
    work.target.limit = 40
    work.router.admit()
    await work.go_on(500)
    assert work.most == 40
    assert work.documents <= 40 * most / 16


async def test_documents_with_several_requests_are_fewer() -> None:
    work = Work(config(max_concurrent_generations="auto", rollouts_per_document=4), four_at_once)
    await work.run(500)
    assert work.most == 16
    assert work.documents <= 20


async def test_a_server_that_runs_nothing_more_gets_no_more_documents() -> None:
    work = Work(config(max_concurrent_generations="auto"), lambda ask: asyncio.sleep(3600))
    await work.run(500)
    assert work.documents <= 17  # only an answer shows that a document more would help


@pytest.mark.parametrize(
    ("settings", "documents"),
    [
        ({"max_concurrent_generations": 7, "rollouts_per_document": 2}, 3),
        ({"max_concurrent_generations": 7, "max_concurrent_documents": 9}, 9),
        ({"max_concurrent_generations": "auto", "max_concurrent_documents": 9}, 9),
    ],
)
async def test_a_number_is_kept(settings: dict[str, Any], documents: int) -> None:
    work = Work(config(**settings), with_other_work)
    await work.run(500)
    assert most_documents(config(**settings)) == work.documents == documents
