"""Keeps the servers of a successful rank warm for the next rank of this process
(``reuse_servers``).

Datatrove's executors, Jobs, and pipelines with several runners run ranks in turn, each with its own
event loop and ``ServerHost``.

    a rank's end                    its servers become warm (``RankModels.keep``), if the rank
                                    succeeds (``one_rank``)
    the next rank needs a server    it gets the warm servers (``RankModels.get``) if its settings
                                    are equal and each server is healthy; else these are stopped
                                    first
    an error, a stop request        warm servers are stopped
    the process ends                it stops warm servers and waits; if it is killed, the
                                    guardians stop them

Servers that serve a model on several nodes are not kept: their other parts belong to processes that
end with the rank. A fork of this process has no warm servers: it would stop its parent's.
"""

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, takewhile
from pathlib import Path

import xxhash

from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import NodeGroup
from datatrove_ckpt.inference.servers.gpus import GpuLease, lease_gpus
from datatrove_ckpt.inference.servers.server import InferenceServer
from datatrove_ckpt.process.event_loop import in_own_thread
from datatrove_ckpt.process.shutdown import Shutdown


@dataclass
class ServerSet:
    """The servers of one model. ``settings``: hash of ``server_settings``."""

    settings: str
    servers: list[InferenceServer]


# A signal handler may close the servers while its thread holds the lock.
_lock = threading.RLock()
_warm: dict[str, ServerSet] = {}
_of_parents: list[ServerSet] = []  # Python warns of a collected object of a running process


def _forget() -> None:
    global _lock
    _lock = threading.RLock()
    _of_parents.extend(_warm.values())
    _warm.clear()


os.register_at_fork(after_in_child=_forget)


@cache
def _end_with_process(pid: int) -> None:
    atexit.register(close_warm_servers)
    # Processes of multiprocessing end without atexit.
    for name in ("multiprocessing", "multiprocess"):
        module = sys.modules.get(name)
        util = sys.modules.get(f"{name}.util")
        if module is not None and util is not None and module.parent_process() is not None:
            util.Finalize(None, close_warm_servers, exitpriority=0)


def server_settings(config: InferenceConfig, gpus: Sequence[int]) -> str:
    """Hashes everything that the servers of a rank depend on, except the content of files.

    Args:
        gpus: number of GPUs of each earlier model; the GPUs are divided in this order.

    Raises:
        ConfigError, ServerStartFailed: ``Engine.launch`` fails.
    """
    # Any port, but always the same.
    command = config.engine.launch(config, 1, Secret(""))
    parts = (
        command.argv,
        config.replicas,
        config.server_stop_timeout_sec,
        config.server_log_folder,
        str(Path.cwd()),
        [config.gpus, *gpus],
        sorted(command.environment(os.environ).items()),
    )
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())


def _keep(servers: ServerSet) -> bool:
    """Keeps servers for the next rank. Returns False if the caller must stop them."""
    model = servers.servers[0].config.name
    with _lock:
        if model in _warm or not any(server.is_running for server in servers.servers):
            return False
        _warm[model] = servers
        _end_with_process(os.getpid())
    return True


@contextmanager
def one_rank(shutdown: Shutdown) -> Iterator[None]:
    try:
        yield
    except BaseException:
        close_warm_servers()
        raise
    if shutdown.is_requested:
        close_warm_servers()


def close_warm_servers() -> None:
    """Stops the servers that this process keeps for its next rank, and waits for their end.

    Call this before ``os._exit``, or before other work after the last rank. Any thread may call it
    at any time.
    """
    _stop(_take_all().values())


def _stop(sets: Collection[ServerSet]) -> None:
    servers = [server for server_set in sets for server in server_set.servers]
    for server in servers:
        server.request_stop()
    for server in servers:
        server.stop_blocking()
        server.lease.close()


def _take_all() -> dict[str, ServerSet]:
    with _lock:
        warm = dict(_warm)
        _warm.clear()
        return warm


class RankModels:
    """Provides a rank's models with the servers of the rank before, or leases for new servers.

    All models are served together: two ranks that each hold the GPUs of one model would wait for
    each other.

    Args:
        configs: configs of all models of the rank, in their order.
        keeps: whether servers may come from the rank before, and stay for the next rank.
    """

    def __init__(self, configs: Iterable[InferenceConfig], keeps: bool) -> None:
        self._keeps = keeps
        self._configs = [config for config in configs if config.server_type != "endpoint"]
        self._lock = asyncio.Lock()
        self._settings: dict[str, str | None] = {}
        self._warm: dict[str, ServerSet] = {}
        self._leases: dict[str, list[GpuLease]] | None = None

    async def get(self, config: InferenceConfig) -> tuple[list[InferenceServer], list[GpuLease]]:
        """Returns servers of the rank before, or leases for new servers. The caller must close
        them.

        Raises:
            ConfigError, ServerStartFailed: ``lease_gpus`` or ``Engine.launch`` fails.
        """
        async with self._lock:
            if self._leases is None:
                self._leases = await self._find()
        warm = self._warm.pop(config.name, None)
        return warm.servers if warm else [], self._leases.pop(config.name, [])

    def keep(self, servers: list[InferenceServer]) -> bool:
        settings = self._settings[servers[0].config.name]
        return settings is not None and _keep(ServerSet(settings, servers))

    def close(self) -> None:
        """Keeps or stops unused servers, and releases unused leases."""
        for servers in self._warm.values():
            if not _keep(servers):
                _stop([servers])
        for lease in chain(*(self._leases or {}).values()):
            lease.close()

    async def _find(self) -> dict[str, list[GpuLease]]:
        for config in self._configs:
            self._settings[config.name] = await in_own_thread(self._settings_of, config)
        unfit = []
        for name, warm in _take_all().items():
            if warm.settings == self._settings.get(name):
                self._warm[name] = warm
                continue
            unfit.append(warm)
        await in_own_thread(_stop, unfit)
        return await lease_gpus(self._configs, self._warm)

    def _settings_of(self, config: InferenceConfig) -> str | None:
        if NodeGroup.from_environment().count > 1 or not config.reuse_servers or not self._keeps:
            return None
        # Without locks a model's GPUs depend on the models before it.
        before = takewhile(lambda model: model is not config, self._configs)
        return server_settings(config, [model.gpus_each * model.replicas for model in before])
