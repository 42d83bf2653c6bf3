"""The servers of a process, for all its ranks that run at once."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.inference.client.client import CompletionClient, ModelServers, Outage
from datatrove_ckpt.inference.client.routing import Sender
from datatrove_ckpt.inference.servers.connect import Watch, running
from datatrove_ckpt.inference.servers.warm import RankModels
from datatrove_ckpt.process.memory import ByteBudget, media_bytes
from datatrove_ckpt.process.shutdown import Shutdown, wait_until_cancelled


@dataclass
class _Running:
    """The servers of one model. ``ready``: gets what raises when none is left."""

    servers: ModelServers
    ready: asyncio.Future[Watch]
    serving: asyncio.Task[None] = field(init=False)


class ServerHost:
    """Starts the servers of a model when the first rank needs them, and stops all at its end.

    Args:
        shutdown: of the process.

    Attributes:
        media: how many bytes of media the documents in work may have, of all ranks together.
    """

    def __init__(self, shutdown: Shutdown) -> None:
        self.media = ByteBudget(media_bytes())
        self._shutdown = shutdown
        self._running: dict[str, _Running] = {}  # by the names of the models
        self._models: RankModels | None = None
        # Servers outlive the rank that starts them: their log lines belong to all ranks.
        self._context = contextvars.copy_context()

    @property
    def has_room(self) -> bool:
        """Whether the servers of each model could take more requests than there are."""
        routers = [one.servers.router for one in self._running.values()]
        return routers != [] and all(one.in_flight < one.capacity and not one.waiting for one in routers)

    @asynccontextmanager
    async def lend(
        self,
        config: InferenceConfig,
        configs: Sequence[InferenceConfig],
        rank: int,
        sender: Sender,
        on_outage: Callable[[Outage], None],
    ) -> AsyncIterator[tuple[CompletionClient, Watch]]:
        """A rank's client of the servers of one model: see ``connect``.

        Args:
            configs: of all models of the rank.
        """
        one = self._running.get(config.name)
        if one is None:
            model_servers = self._context.copy().run(ModelServers, config)
            one = _Running(model_servers, asyncio.get_running_loop().create_future())
            self._running[config.name] = one
            serve = self._serve(one, configs, rank, on_outage)  # begins once this rank has joined below
            one.serving = asyncio.create_task(serve, context=self._context.copy())
        was_ready = one.ready.done()
        client = CompletionClient(one.servers, sender)
        try:
            watch = await asyncio.shield(one.ready)
            if was_ready and sender.on_server is not None:  # others have seen the start
                if config.server_type == "endpoint":
                    what = "ready"
                else:
                    what = "reused"
                for index, target in enumerate(one.servers.router.targets):
                    if target.up:
                        sender.on_server(what, config.server_name(index), str(target.url), "")
            yield client, watch
        finally:
            client.leave()

    async def _serve(
        self, one: _Running, configs: Sequence[InferenceConfig], rank: int, on_outage: Callable[[Outage], None]
    ) -> None:
        if self._models is None:
            self._models = RankModels(configs, rank, keeps=False)
        try:
            async with running(one.servers, rank, self._shutdown, self._models, on_outage) as watch:
                one.ready.set_result(watch)
                await wait_until_cancelled()
        except Exception as error:
            if one.ready.done():
                raise
            one.ready.set_exception(error)  # for later ranks, too: what these servers had leased is gone

    async def close(self) -> None:
        """Stops all servers. Returns when they have ended."""
        tasks = [one.serving for one in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._models is not None:
            self._models.close()
