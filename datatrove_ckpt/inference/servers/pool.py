"""The servers of one rank: ``async with connect(config, rank) as (client, watch)``.

Rollouts notice nothing of what happens to servers: while one is away its work goes to the others, or waits. See
``replica.py`` for what counts as dead and how often a server is started again, and ``routing.py`` for who waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from loguru import logger

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ServerDied
from datatrove_ckpt.inference.client.client import CompletionClient
from datatrove_ckpt.inference.servers.endpoint import ExternalServers
from datatrove_ckpt.inference.servers.gpu_slots import slots
from datatrove_ckpt.inference.servers.multi_node import Leader
from datatrove_ckpt.inference.servers.nodes import Nodes
from datatrove_ckpt.inference.servers.supervisor import Replica

Watch = Callable[[], Awaitable[None]]


@asynccontextmanager
async def connect(config: InferenceConfig, rank: int) -> AsyncIterator[tuple[CompletionClient, Watch]]:
    """The client of a rank's servers, ready, and a coroutine function that ends, with an error, when they are gone.

    Raises:
        ServerStartFailed, ServerRefused, ConfigError: see ``Server.start``.
    """
    if config.server_type == "endpoint":
        async with (
            ExternalServers(config) as servers,
            CompletionClient(config, servers.urls, servers.api_key) as client,
        ):
            yield client, servers.watch
    else:
        async with CompletionClient(config, [], None) as client, ServerPool(config, rank, client) as pool:
            yield client, pool.watch


class ServerPool:
    """All servers that one rank launches.

    Args:
        client: is told who is up and who died.

    Attributes:
        restarts: how often servers were started again.
    """

    def __init__(self, config: InferenceConfig, rank: int, client: CompletionClient) -> None:
        self.config = config
        self.rank = rank
        self.client = client
        self.replicas: list[Replica] = []
        self._leader: Leader | None = None
        self._exit = AsyncExitStack()
        self._supervision: asyncio.Task[None] | None = None

    @property
    def restarts(self) -> int:
        return sum(replica.restarts for replica in self.replicas)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            nodes = Nodes.from_environment()
            if nodes.count > 1:
                self._leader = await stack.enter_async_context(Leader(self.config, nodes))
            for index, slot in enumerate(await stack.enter_async_context(slots(self.config))):
                self.replicas.append(Replica(self.config, self.rank, index, slot, self.client, self._leader))
            stack.push_async_callback(self._stop_all)
            await self._unless_a_node_goes([replica.start() for replica in self.replicas])
            self._supervision = asyncio.create_task(self._supervise())
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        await self._exit.__aexit__(kind, error, trace)
        if self.restarts:
            resent = self.client.stats.resent
            logger.info(f"Servers were started again {self.restarts} times, and {resent} requests were sent again.")

    async def watch(self) -> None:
        """Wait for as long as there are servers.

        Raises:
            ServerDied: none is left, and none may be started again.
        """
        assert self._supervision is not None
        await asyncio.shield(self._supervision)

    async def _supervise(self) -> None:
        left = len(self.replicas)

        async def supervise(replica: Replica) -> None:
            nonlocal left
            try:
                await replica.keep_alive()
            except ServerDied as error:
                left -= 1
                if not left:
                    raise
                logger.error(f"{error}\nThe run goes on without this server, with {left} of {len(self.replicas)}.")

        try:
            await self._unless_a_node_goes([supervise(replica) for replica in self.replicas])
        except ServerDied as error:
            self.client.router.fail(str(error))
            raise

    async def _unless_a_node_goes(self, coroutines: list[Coroutine[Any, Any, None]]) -> None:
        if self._leader is None:
            return await _together(coroutines)
        watch = asyncio.create_task(self._leader.watch())
        work = asyncio.create_task(_together(coroutines))
        try:
            await asyncio.wait([watch, work], return_when=asyncio.FIRST_COMPLETED)
            await (work if work.done() else watch)
        finally:
            watch.cancel()
            work.cancel()
            await asyncio.gather(watch, work, return_exceptions=True)

    async def _stop_all(self) -> None:
        for replica in self.replicas:
            self.client.died(replica.target, "the run ends")
        await asyncio.gather(*(replica.stop() for replica in self.replicas))


async def _together(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """All at once; the first error ends the others, and is raised as it is."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
