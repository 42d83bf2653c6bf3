"""The servers that one rank launches. ``connect.py`` is the way in.

With ``reuse_servers`` they may come from the rank before, and go on to the next one: see ``warm.py``.

Rollouts do not notice what happens to servers: while one is down, its requests go to the others, or wait. See
``supervisor.py`` for what counts as dead and how often a server is restarted, and ``routing.py`` for which requests
wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from loguru import logger

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ServerDied
from datatrove_ckpt.inference.client.client import CompletionClient
from datatrove_ckpt.inference.servers.gpu_slots import lease_gpus
from datatrove_ckpt.inference.servers.multi_node import HeadNode
from datatrove_ckpt.inference.servers.nodes import Nodes
from datatrove_ckpt.inference.servers.server import InferenceServer
from datatrove_ckpt.inference.servers.supervisor import ServerSupervisor
from datatrove_ckpt.inference.servers.warm import ServerSet, Settings, keep, server_settings, take
from datatrove_ckpt.process.shutdown import Shutdown


class ServerPool:
    """All servers that one rank launches or takes over.

    Args:
        client: each server becomes a target of it.
        shutdown: of the rank; None: of nobody.

    Attributes:
        restarts: how often servers were restarted.
    """

    def __init__(
        self, config: InferenceConfig, rank: int, client: CompletionClient, shutdown: Shutdown | None = None
    ) -> None:
        self.config = config
        self.shutdown = shutdown or Shutdown()
        self.rank = rank
        self.client = client
        self.supervisors: list[ServerSupervisor] = []
        self._head: HeadNode | None = None
        self._exit = AsyncExitStack()
        self._supervision: asyncio.Task[None] | None = None
        self._settings: Settings | None = None  # None: this rank shares its servers with no other one
        self._keep = False

    @property
    def restarts(self) -> int:
        return sum(supervisor.restarts for supervisor in self.supervisors)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            nodes = Nodes.from_environment()
            if nodes.count > 1:
                self._head = await stack.enter_async_context(HeadNode(self.config, nodes))
            elif self.config.reuse_servers:
                self._settings = await asyncio.to_thread(server_settings, self.config)
            servers = await take(self._settings, self.rank) or await self._new_servers()
            stack.push_async_callback(self._end, servers)
            for index, server in enumerate(servers):
                supervisor = ServerSupervisor(self.config, self.rank, index, server, self.client, self.shutdown)
                self.supervisors.append(supervisor)
            if self._head is not None:
                self._head.on_worker_death = self.supervisors[0].mark_dead
            await self._run_unless_a_node_is_lost(supervisor.start() for supervisor in self.supervisors)
            self._supervision = asyncio.create_task(self._supervise())
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        self._keep = kind is None
        await self._exit.__aexit__(kind, error, trace)
        if self.restarts:
            resent = self.client.stats.resent
            logger.info(f"Servers were restarted {self.restarts} times, and {resent} requests were sent again.")

    async def watch(self) -> None:
        """Wait until no server is left.

        Raises:
            ServerDied: none is left, and none may be restarted.
        """
        assert self._supervision is not None
        await asyncio.shield(self._supervision)

    async def _supervise(self) -> None:
        left = len(self.supervisors)

        async def supervise(supervisor: ServerSupervisor) -> None:
            nonlocal left
            try:
                await supervisor.supervise()
            except ServerDied as error:
                left -= 1
                if not left:
                    raise
                logger.error(f"{error}\nThe run goes on without this server, with {left} of {len(self.supervisors)}.")

        try:
            await self._run_unless_a_node_is_lost(supervise(supervisor) for supervisor in self.supervisors)
        except ServerDied as error:
            self.client.router.fail(str(error))
            raise

    async def _run_unless_a_node_is_lost(self, work: Iterable[Awaitable[None]]) -> None:
        if self._head is None:
            return await _run_all(work)
        watch = asyncio.create_task(self._head.watch())
        running = asyncio.create_task(_run_all(work))
        try:
            await asyncio.wait([watch, running], return_when=asyncio.FIRST_COMPLETED)
            await (running if running.done() else watch)
        finally:
            watch.cancel()
            running.cancel()
            await asyncio.gather(watch, running, return_exceptions=True)

    async def _new_servers(self) -> list[InferenceServer]:
        """Servers that are not started yet, each with its lease."""
        leases = await lease_gpus(self.config)
        if (head := self._head) is not None:
            nodes, launch = head.nodes, head.start_workers
            return [InferenceServer(self.config, self.rank, 0, leases[0], nodes=nodes, on_launch=launch)]
        return [InferenceServer(self.config, self.rank, index, lease) for index, lease in enumerate(leases)]

    async def _end(self, servers: list[InferenceServer]) -> None:
        for supervisor in self.supervisors:
            self.client.mark_dead(supervisor.target, "the run ends")
        if self._keep and self._settings is not None and keep(ServerSet(self._settings, self.rank, servers)):
            await asyncio.gather(*(self.client.disconnect(supervisor.target) for supervisor in self.supervisors))
            return
        try:
            await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors))
        finally:
            for server in servers:
                server.lease.close()


async def _run_all(work: Iterable[Awaitable[None]]) -> None:
    """Run all at once. The first error cancels the others, and is raised as it is, not in an exception group."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
