"""The servers of one rank: ``async with connect(config, rank) as (client, watch)``.

What launches servers is imported where servers are launched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.client.client import CompletionClient, OnServer
from datatrove_ckpt.inference.servers.endpoint import ExternalServers
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.redaction import Key

Watch = Callable[[], Awaitable[None]]


def check_servers(config: InferenceConfig) -> None:
    """Checks that the model file, the packages and the key that the servers need are here. Starts and sends nothing.

    Raises:
        ConfigError, ServerStartFailed: what is missing, and what to do.
    """
    if config.server_type == "endpoint":
        ExternalServers(config)
    else:
        from datatrove_ckpt.inference.servers.engines import engine_command

        engine_command(config, 1, Key("unused"))


@asynccontextmanager
async def connect(
    config: InferenceConfig, rank: int, shutdown: Shutdown | None = None, on_server: OnServer | None = None
) -> AsyncIterator[tuple[CompletionClient, Watch]]:
    """The client of a rank's servers, ready for requests, and a coroutine function that raises when none is left.

    If the block ends without an exception, the servers may stay for the next rank.

    Args:
        shutdown: of the rank; None: of nobody.
        on_server: gets what happens to servers; None: nobody does.

    Raises:
        ServerStartFailed, ServerRefused, ConfigError: see ``Server.start``.
    """
    shutdown = shutdown or Shutdown()
    if config.server_type == "endpoint":
        async with (
            ExternalServers(config) as servers,
            CompletionClient(config, servers.urls, servers.api_key, shutdown=shutdown) as client,
        ):
            client.on_server = on_server or client.on_server
            for index, url in enumerate(servers.urls):
                client.on_server("ready", str(index), str(url), "")
            yield client, servers.watch
    else:
        from datatrove_ckpt.inference.servers.pool import ServerPool

        async with CompletionClient(config, [], None, shutdown=shutdown) as client:
            client.on_server = on_server or client.on_server
            async with ServerPool(config, rank, client, shutdown) as pool:
                yield client, pool.watch
