"""What the models of a rank get of the node: the servers of the rank before, or a lease for new ones.

It is found for all models at once, by the one that comes first. Two ranks that each lease GPUs for one model while they
wait for the other's could wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, NamedTuple

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import Nodes
from datatrove_ckpt.inference.servers.node import GpuLease, lease_gpus
from datatrove_ckpt.inference.servers.warm import ServerSet, Settings, keep, server_settings, stop, take

if TYPE_CHECKING:
    from datatrove_ckpt.inference.servers.server import InferenceServer


class Share(NamedTuple):
    """What one model gets.

    Attributes:
        settings: with which the next rank may have the servers; None: it may not.
        servers: of the rank before; empty: new ones are to be started.
        leases: for those, one each.
    """

    settings: Settings | None
    servers: list[InferenceServer]
    leases: list[GpuLease]


class RankModels:
    """The models of one rank whose servers are launched.

    Args:
        configs: of all models of the rank, in their order.
    """

    def __init__(self, configs: Sequence[InferenceConfig], rank: int) -> None:
        self._configs = [config for config in configs if config.server_type != "endpoint"]
        self._rank = rank
        self._lock = asyncio.Lock()
        self._settings: dict[str, Settings | None] = {}
        self._warm: dict[str, ServerSet] = {}
        self._leases: dict[str, list[GpuLease]] | None = None

    async def get(self, config: InferenceConfig) -> Share:
        """The share of one of the models, which belongs to the caller from now on.

        Raises:
            ConfigError, ServerStartFailed: see ``lease_gpus`` and ``Engine.launch``.
        """
        async with self._lock:
            if self._leases is None:
                self._leases = await self._find()
        warm = self._warm.pop(config.name, None)
        return Share(self._settings[config.name], warm.servers if warm else [], self._leases.pop(config.name, []))

    def close(self) -> None:
        """Gives back what no model came for. Servers of an earlier rank are stopped with the warm ones."""
        for servers in self._warm.values():
            if not keep(servers):
                stop([servers])
        for lease in chain(*(self._leases or {}).values()):
            lease.close()

    async def _find(self) -> dict[str, list[GpuLease]]:
        for config in self._configs:
            self._settings[config.name] = await asyncio.to_thread(self._settings_of, config)
        found, others = take(self._settings, self._rank)
        self._warm |= found
        await asyncio.to_thread(stop, others.values())  # they may hold GPUs
        return await lease_gpus(self._configs, self._warm)

    def _settings_of(self, config: InferenceConfig) -> Settings | None:
        if Nodes.from_environment().count > 1 or not config.reuse_servers:
            return None
        # Without locks each model has its place among the GPUs, which the models before it decide.
        before = takewhile(lambda one: one is not config, self._configs)
        return server_settings(config, [one.gpus_each * one.replicas for one in before])
