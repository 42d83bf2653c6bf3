"""Whatever servers, ranks and rollouts do: no place is lost, no server stands idle while requests
wait, and every request ends.
"""

import asyncio
import json
import random

import pytest

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.inference.client import client
from datatrove_ckpt.inference.client.answers import RetryableError
from datatrove_ckpt.inference.client.attempts import Request, Sender
from datatrove_ckpt.inference.client.client import CompletionClient, ModelServers
from datatrove_ckpt.inference.client.plain import Response
from datatrove_ckpt.inference.client.urls import HiddenUrl
from tests.clients import Sleeps

CHOICE = {"message": {"content": "yes"}, "finish_reason": "stop"}
ANSWER = Response(200, json.dumps({"choices": [CHOICE], "usage": {}}).encode())
DOCUMENTS = 60  # of each rank
URL = HiddenUrl("http://127.0.0.1:1")


class History:
    """Two ranks that share servers. ``in_flight``: requests that no step has ended."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        urls = [str(URL)] * self.chance.choice([1, 2, 4])
        config = InferenceConfig("endpoint", "m", endpoint_url=urls, max_concurrent_generations=30)
        sleeps = Sleeps()
        self.servers = ModelServers(config, sleeps.clock)
        self.servers.add_endpoints([URL] * len(urls), None)
        self.router = self.servers.router
        self.in_flight = []
        self.senders = [Sender(order=order) for order in range(2)]
        self.tasks = [
            [asyncio.create_task(self._document(rank, order)) for order in range(DOCUMENTS)]
            for rank in (CompletionClient(self.servers, one, sleep=sleeps) for one in self.senders)
        ]

    async def _document(self, rank, order):
        text = f"{order // 8} " * 200
        for number in range(2):
            text += f"question {number} of {order} "
            body = b'{"messages":[{"role":"user","content":"%s"}]}' % text.encode()
            await rank.complete(body, None, Request(rank.sender, order=order, body=body))

    async def post(self, transport, body, model, extras):
        future = asyncio.get_running_loop().create_future()
        self.in_flight.append(future)
        try:
            return await future
        finally:
            self.in_flight.remove(future)

    def answer(self):
        if self.in_flight:
            self.chance.choice(self.in_flight).set_result(ANSWER)

    def lose_connection(self):
        if self.in_flight:
            failure = RetryableError("reset", unreachable=True)
            self.chance.choice(self.in_flight).set_exception(failure)

    def die(self):
        self.router.mark_dead(self.chance.choice(self.router.targets), "bang")

    def restart(self):
        for target in self.router.targets:
            if not target.up:
                self.servers.mark_up(target, URL, None)

    def show_metrics(self):
        target = self.chance.choice(self.router.targets)
        target.limit = self.chance.choice([1, 8, 30])
        target.usage_each = self.chance.choice([0.0, 0.01, 0.3, 5.0])
        target.others = self.chance.choice([0.0, 1.0, 500.0])
        self.router.admit(resized=True)

    def cancel(self):
        self.chance.choice(self.tasks[0]).cancel()

    def stop_a_rank(self):
        if self.chance.random() < 0.1:
            self.senders[1].shutdown.request("SIGTERM")
            for task in self.tasks[1]:
                task.cancel()

    @property
    def is_over(self):
        return all(task.done() for rank in self.tasks for task in rank)

    async def step(self, take):
        take()
        for _ in range(30):
            await asyncio.sleep(0)
        targets = self.router.targets
        assert self.router.in_flight == sum(target.in_flight for target in targets)
        assert self.router.in_flight == len(self.in_flight)
        assert self.router.in_flight == sum(sender.in_flight for sender in self.senders)
        if any(target.up and not target.reserved and not target.in_flight for target in targets):
            waiting = [
                request
                for request, place in self.router._waiting.all()
                if not place.done() and not request.may_not_be_sent
            ]
            assert not waiting


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 60))]
)
async def test_no_request_is_forgotten_and_no_server_stands_idle(monkeypatch, seed):
    monkeypatch.setattr(client, "_COOLDOWN", 0.0)
    history = History(seed)
    monkeypatch.setattr(client, "post", history.post)
    rare = [history.lose_connection, history.die, history.cancel, history.stop_a_rank]
    steps = [history.answer] * 6 + [history.restart, history.show_metrics] * 2
    steps += history.chance.sample(rare, history.chance.randrange(5))
    for _ in range(200):
        await history.step(history.chance.choice(steps))
    while not history.is_over:
        await history.step(history.restart)
        assert history.in_flight, "nothing will happen any more"
        await history.step(history.answer)
    for rank in history.tasks:
        for result in await asyncio.gather(*rank, return_exceptions=True):
            assert result is None or isinstance(result, CkptError | asyncio.CancelledError)
