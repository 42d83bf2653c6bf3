"""Endpoints under ``max_concurrent_generations: auto``, in virtual time: providers are not asked for
more than they allow, and servers that show metrics are followed, by several clients, too.
"""

import asyncio
import random
import resource
import types
from itertools import count

import pytest

from datatrove_ckpt.common.retrying import quotas, retry_after
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.client import client as client_module
from datatrove_ckpt.inference.client import routing
from datatrove_ckpt.inference.client.routing import Request
from datatrove_ckpt.process.open_files import files_needed, requests_at_once
from tests import golden
from tests.clients import lent_client
from tests.simulated_servers import SimulatedProvider, SimulatedServer
from tests.virtual_time import VirtualTimeLoop


@pytest.fixture
def in_virtual_time(monkeypatch):
    """Runs a coroutine function on a loop whose clock is the clients', too."""

    def run(work, *arguments):
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            clock = types.SimpleNamespace(monotonic=runner.get_loop().time)
            for module in (client_module, routing):
                monkeypatch.setattr(module, "time", clock)
            return runner.run(work(*arguments))

    return run


def client_for(urls, number="auto"):
    return lent_client(
        InferenceConfig("endpoint", "m", endpoint_url=urls, max_concurrent_generations=number)
    )


def body(text="x", tokens=5):
    prompt = text.encode()
    return b'{"messages":[{"role":"user","content":"%s"}],"max_tokens":%d}' % (prompt, tokens)


def seconds(mean):
    chance = random.Random(1)
    return lambda: mean * chance.lognormvariate(-0.125, 0.5)


# Providers ---------------------------------------------------------------------------------------


async def ask_for(minutes, provider, number="auto", workers=500):
    """Raises if a request ends the run."""
    async with client_for(await provider.start(), number) as client:
        orders = count()

        async def work():
            for order in orders:
                await client.complete(body(), request=Request(client.sender, order=order))

        tasks = [asyncio.create_task(work()) for _ in range(workers)]
        done, _ = await asyncio.wait(tasks, timeout=minutes * 60)
        for task in done:
            task.result()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    provider.close()
    return provider.answered / provider.offered


ALL = ("quotas", "wait")


@pytest.mark.matrix(
    "made, minutes, share, refused",
    golden.values("simulated_providers", globals()),
)
def test_a_providers_rate_is_used_and_few_requests_are_refused(
    in_virtual_time, made, minutes, share, refused
):
    provider = SimulatedProvider(seconds(3), **made)
    assert in_virtual_time(ask_for, minutes, provider) >= share
    assert provider.refused <= refused * provider.answered


def test_the_requests_in_flight_double_with_each_round_of_answers(in_virtual_time):
    provider = SimulatedProvider(lambda: 1.0)
    times = []
    ask = provider.ask

    def noted(payload, answer):
        times.append(provider._loop.time())
        return ask(payload, answer)

    provider.ask = noted
    in_virtual_time(ask_for, 3.5 / 60, provider)
    by_second = [sum(second <= at < second + 1 for at in times) for second in range(3)]
    assert by_second == [16, 32, 64]


async def seconds_for(documents, providers, number):
    urls = [await provider.start() for provider in providers]
    loop = asyncio.get_running_loop()
    async with client_for(urls, number) as client:
        async with asyncio.TaskGroup() as group:
            for order in range(documents):
                request = Request(client.sender, order=order)
                group.create_task(client.complete(body(), request=request))
        taken = loop.time()
    for provider in providers:
        provider.close()
    return taken


@pytest.mark.parametrize("number", ["auto", 8])
@pytest.mark.parametrize("status", [429, 500])
def test_a_server_that_fails_at_everything_takes_little_of_another_ones_time(
    in_virtual_time, status, number, log
):
    alone = in_virtual_time(seconds_for, 300, [SimulatedProvider(lambda: 1.0)], number)
    failing = SimulatedProvider(lambda: 1.0, requests=0, status=status)
    both = [failing, SimulatedProvider(lambda: 1.0)]
    assert in_virtual_time(seconds_for, 300, both, number) < 1.2 * alone + 3
    assert failing.refused < 60
    if number != "auto":  # longer
        assert sum("It gets few requests from now on" in line for line in log) == 1


@golden.rows("quotas")
def test_quotas_of_providers_are_read(code):
    def shown(fields):
        return list(quotas(fields)), retry_after(fields)

    golden.show("quotas", code, {"shown": shown})


# Servers that show metrics -----------------------------------------------------------------------

SMALL = {"places": 64, "blocks": 2_000, "base": 0.02, "per_decode": 2e-4, "per_prompt_token": 1e-4}


async def job(clients, documents=240):
    """How long a server takes for calls in pairs, of which the second has the first's prompt."""
    server = SimulatedServer(**SMALL)
    url = await server.start()
    orders = iter(range(documents))

    async def work(client):
        for order in orders:
            for number in range(2):
                text = f"{order:08d} " * 100 + f"again {number}"
                request = Request(client.sender, order=order)
                await client.complete(body(text, 60), request=request)

    async def run():
        async with client_for(f"{url}/v1") as client:
            await asyncio.gather(*(work(client) for _ in range(100 // clients)))
            return client.servers.router.targets[0].limit

    limits = await asyncio.gather(*(run() for _ in range(clients)))
    server.close()
    assert server.answered == 2 * documents
    return server.last - server.first, server.engine.preemptions, limits


def test_two_clients_of_an_endpoint_that_shows_metrics_take_no_longer_than_one(in_virtual_time):
    one, _, (limit,) = in_virtual_time(job, 1)
    two, preemptions, _ = in_virtual_time(job, 2)
    assert 16 < limit < 100
    assert two <= 1.05 * one
    assert preemptions <= 10


# What is said, and open files --------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 8, 40])
def test_auto_fits_a_hard_limit_of_1024_open_files(monkeypatch, servers):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    requests = requests_at_once("auto", servers)
    assert files_needed(requests, servers) <= 1024
    assert requests >= 64
