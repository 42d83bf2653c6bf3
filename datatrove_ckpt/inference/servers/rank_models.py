"""What the models of a rank get of the node: the servers of the rank before, or a lease for new ones.

It is found for all models at once, by the one that comes first. Two ranks that each lease GPUs for one model while they
wait for the other's could wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import Nodes
from datatrove_ckpt.inference.servers.gpu_slots import GpuLease, lease_gpus
from datatrove_ckpt.inference.servers.warm import ServerSet, Settings, keep, server_settings, take

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
        self._shares: dict[str, Share] | None = None

    async def get(self, config: InferenceConfig) -> Share:
        """The share of one of the models, which belongs to the caller from now on.

        Raises:
            ConfigError, ServerStartFailed: see ``lease_gpus`` and ``Engine.launch``.
        """
        async with self._lock:
            if self._shares is None:
                self._shares = await self._find()
            return self._shares.pop(config.name)

    def close(self) -> None:
        """Gives back what no model came for."""
        for name, (settings, servers, leases) in (self._shares or {}).items():
            self._give_back(name, settings, servers)
            for lease in leases:
                lease.close()
        self._shares = None

    async def _find(self) -> dict[str, Share]:
        wanted = {config.name: await asyncio.to_thread(self._settings, config) for config in self._configs}
        warm = await take(wanted, self._rank)  # first: the others may hold GPUs
        try:
            leases = await lease_gpus(self._configs, warm)
        except BaseException:
            for name, servers in warm.items():
                self._give_back(name, wanted[name], servers)
            raise
        return {name: Share(wanted[name], warm.get(name, []), leases.get(name, [])) for name in wanted}

    def _settings(self, config: InferenceConfig) -> Settings | None:
        if Nodes.from_environment().count > 1 or not config.reuse_servers:
            return None
        # Without locks each model has its place among the GPUs, which the models before it decide.
        return server_settings(config, [one.gpus_each * one.replicas for one in self._configs])

    def _give_back(self, name: str, settings: Settings | None, servers: list[InferenceServer]) -> None:
        """Servers of an earlier rank that this one has not used are stopped with the warm ones."""
        if servers and settings is not None:
            found = ServerSet(settings, self._rank, servers, name)
            if not keep(found):
                found.stop()
