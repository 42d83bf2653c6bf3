"""Lends the servers of a process, launched or external, to one rank or to several ranks.

A rank calls ``ServerHost.lend``. Its servers may come from the rank before (``warm.py``). Rollouts
do not notice a server that is down: its requests go to the other servers, or wait. External servers
are only checked: they must answer before the first request.
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from loguru import logger

from datatrove_ckpt.common.memory import ByteBudget, media_bytes
from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import CkptError, named
from datatrove_ckpt.inference.client import routing
from datatrove_ckpt.inference.client.client import CompletionClient, ModelServers
from datatrove_ckpt.inference.servers.admission import follow_endpoint
from datatrove_ckpt.inference.servers.endpoint_probe import endpoints_of, ready_endpoints
from datatrove_ckpt.inference.servers.supervision import launched_servers
from datatrove_ckpt.inference.servers.warm import RankModels
from datatrove_ckpt.process.shutdown import Shutdown, end_tasks, wait_until_cancelled

Watch = Callable[[], Awaitable[None]]
"""A function that raises when no server remains."""


def check_servers(config: InferenceConfig) -> None:
    """Checks that the model file, the packages and the key are here. Starts and sends nothing.

    Raises:
        ConfigError, ServerStartFailed: something is missing; the message names it.
    """
    try:
        # Both calls are only made for their exceptions.
        if config.server_type == "endpoint":
            endpoints_of(config)
        else:
            config.engine.launch(config, 1, Secret(""))
    except CkptError as error:
        named(error, config.name)
        raise


@asynccontextmanager
async def _connected(servers: ModelServers, is_new: bool) -> AsyncIterator[Watch]:
    """Sends requests to the config's endpoints in this block."""
    config = servers.config
    endpoints = await ready_endpoints(config, servers.outage, is_new)
    servers.add_endpoints(endpoints)
    if config.endpoints is not None:
        open_ones = {endpoint.name for endpoint in endpoints}
        for name in config.endpoints_by_name.keys() - open_ones:
            servers.router.senders[0].count_error("left out at the start", name)
    for index, endpoint in enumerate(endpoints):
        servers.report_event("ready", config.server_name(index), str(endpoint.url), "")
    following: list[asyncio.Task[None]] = []
    if config.max_concurrent_generations == "auto":
        for target in servers.router.targets:
            following.append(asyncio.create_task(follow_endpoint(target, servers.router)))
    try:
        yield wait_until_cancelled  # a failure of these servers shows in their answers
    finally:
        await end_tasks(*following)


@dataclass
class _Running:
    """The servers of a model, which start until ``ready``, and serve while ``serving`` runs."""

    servers: ModelServers
    ready: asyncio.Future[Watch]
    serving: asyncio.Task[None]


class ServerHost:
    """Starts the servers of a model when the first rank needs them, and stops all at its end.

    Args:
        shutdown: the ranks' shutdown.
        configs: configs of all models of a rank.
        keeps: whether the servers of its single rank may stay for the next rank (``warm.py``).

    Attributes:
        media: limit on the bytes of media of all documents in work.
    """

    def __init__(
        self, shutdown: Shutdown, configs: Iterable[InferenceConfig], keeps: bool = False
    ) -> None:
        self.media = ByteBudget(media_bytes())
        self._shutdown = shutdown
        self._models = RankModels(configs, keeps)
        self._ends_well = asyncio.Event()
        self._running: dict[str, _Running] = {}
        # Servers outlive the rank that starts them: their log lines belong to all ranks.
        self._context = contextvars.copy_context()

    @property
    def has_room(self) -> bool:
        routers = [running.servers.router for running in self._running.values()]
        return routers != [] and all(
            router.in_flight < router.capacity and not router.waiting for router in routers
        )

    @asynccontextmanager
    async def lend(
        self,
        config: InferenceConfig,
        rank: int,
        sender: routing.Sender,
        is_new: bool = False,
    ) -> AsyncIterator[tuple[CompletionClient, Awaitable[Watch]]]:
        """Yields a client of one model's servers, and an awaitable that returns their watch once
        they are ready.

        Args:
            is_new: whether no request of the run has been answered yet.

        Raises:
            ServerStartFailed, ServerRefused, ConfigError: the servers cannot start, or no endpoint
                answers.
        """
        running = self._running.get(config.name)
        if running is None:
            servers = self._context.copy().run(ModelServers, config)
            ready = asyncio.get_running_loop().create_future()
            # The servers start after this rank has joined below.
            serve = self._serve(servers, ready, rank, is_new)
            serving = asyncio.create_task(serve, context=self._context.copy())
            running = self._running[config.name] = _Running(servers, ready, serving)
        client = CompletionClient(running.servers, sender)
        try:
            if running.ready.done() and sender.on_server is not None:  # others have seen the start
                event = "reused"
                if config.server_type == "endpoint":
                    event = "ready"
                for index, target in enumerate(running.servers.router.targets):
                    if target.up:
                        sender.on_server(event, config.server_name(index), str(target.url), "")
            yield client, asyncio.shield(running.ready)
        finally:
            client.leave()

    async def _serve(
        self, servers: ModelServers, ready: asyncio.Future[Watch], rank: int, is_new: bool
    ) -> None:
        """Runs the servers until ``close``. All ranks receive the error of a failed start."""
        config = servers.config
        logger.info(f"{config.log_prefix}Requests: {config.places} (max_concurrent_generations).")
        if config.server_type == "endpoint":
            running = _connected(servers, is_new)
        else:
            running = launched_servers(rank, servers, self._shutdown, self._models)
        try:
            async with running as watch:
                ready.set_result(watch)
                await self._ends_well.wait()
        except Exception as error:
            if ready.done():
                raise
            # Later ranks also fail: the leases of these servers are gone.
            ready.set_exception(error)
        finally:
            await servers.close()

    async def close(self, ends_well: bool = False) -> None:
        if ends_well:
            self._ends_well.set()
        for running in self._running.values():
            if not ends_well or not running.ready.done():
                running.serving.cancel()
        await asyncio.gather(
            *(running.serving for running in self._running.values()), return_exceptions=True
        )
        self._models.close()
