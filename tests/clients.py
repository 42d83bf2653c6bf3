"""Clients: of the servers of a model, or of servers that run already, without the check that they
answer.
"""

import asyncio
import time
from contextlib import asynccontextmanager

from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.endpoints import EndpointConfig
from datatrove_ckpt.inference.client.client import CompletionClient, EndpointAccess, ModelServers
from datatrove_ckpt.inference.client.routing import Sender
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.inference.servers.host import ServerHost
from datatrove_ckpt.process.shutdown import Shutdown


def config(server_type="vllm", model_name_or_path="m", **settings):
    return InferenceConfig(server_type, model_name_or_path, **settings)


async def turns(number):
    """What was sent until now is read by then."""
    for _ in range(number):
        await asyncio.sleep(0)


class Sleeps(list[float]):
    """Replaces asyncio.sleep and the clock: records the seconds, and lets other tasks run."""

    now = 0.0

    async def __call__(self, seconds):
        self.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def clock(self):
        return self.now


@asynccontextmanager
async def client_of(config, urls=(), api_key=None, *, sleep=asyncio.sleep, clock=time.monotonic):
    servers = ModelServers(config, clock)
    key = Secret(api_key) if isinstance(api_key, str) else api_key
    shared = EndpointConfig("http://of.a.test", weight=1)
    servers.add_endpoints(
        [
            EndpointAccess("", shared, HiddenUrl(url) if isinstance(url, str) else url, key)
            for url in urls
        ]
    )
    try:
        yield CompletionClient(servers, Sender(), sleep=sleep)
    finally:
        await servers.close()


@asynccontextmanager
async def lent_client(config):
    servers = ServerHost(Shutdown(), [config])
    try:
        async with servers.lend(config, 0, Sender()) as (client, ready):
            await ready
            yield client
    finally:
        await servers.close()
