"""Warm servers: the servers of a rank that ended well, kept for the next rank of this process (``reuse_servers``).

A model is then loaded once per process, however many ranks the process works through. There is at most one warm set
for each model of a rank, and only between two ranks:

    a rank's end                    its servers become the warm set (``keep``), if the rank succeeds (``one_rank``)
    the next rank needs a server    it gets the warm set (``take``) if its servers would have the same settings, and
                                    no file that they were started with has changed (``stamp``), and asks
                                    each server for its health; otherwise the warm set is stopped first
    no rank within IDLE_SECONDS     the warm set is stopped, because somebody else may need the GPUs
    an error, a stop request        the warm set is stopped
    the process ends                it stops the warm set and waits for it; if it is killed, the guardians do the rest

Servers that serve one model on several nodes are not kept: their other parts belong to processes that end with the
rank.

A fork of this process has no warm set: it would stop servers of its parent.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import stat
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import xxhash
from loguru import logger

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import LINK_KEY_VARIABLE, Nodes
from datatrove_ckpt.inference.servers.node import GpuLease, lease_gpus
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.redaction import MIRROR_KEY_VARIABLE, HiddenDict, Key

if TYPE_CHECKING:
    from datatrove_ckpt.inference.servers.server import InferenceServer


IDLE_SECONDS = 30.0
"""How long servers wait for a rank of this process."""
_PORT = 1  # any: only the same one for all
_NOT_FOR_SERVERS = {LINK_KEY_VARIABLE, MIRROR_KEY_VARIABLE}
_SHOWN = 3  # differences in a log line

Settings = dict[str, str]
"""What makes a server what it is: from names to hashes, because some values are secrets."""


@dataclass
class ServerSet:
    """The servers of one rank, with what they hold. ``model``: its name, if the rank has several."""

    settings: Settings
    rank: int
    servers: list[InferenceServer]
    model: str = ""

    def __str__(self) -> str:
        of_model = f" of {self.model}" if self.model else ""
        return f"the {'servers' if len(self.servers) > 1 else 'server'}{of_model} of rank {self.rank}"


class _State:
    """What this process keeps."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may close the servers while its thread holds the lock
        self.warm: dict[str, ServerSet] = {}  # by the names of the models
        self.ranks = 0  # that are running; several, if a program runs them in threads
        self.timer: threading.Timer | None = None
        self.ends_with_process = False


_state = _State()
_of_parents: list[_State] = []  # kept, because a process object that is collected complains that its process runs


def _forget() -> None:
    global _state
    _of_parents.append(_state)
    _state = _State()


os.register_at_fork(after_in_child=_forget)


def server_settings(config: InferenceConfig, gpus: Sequence[int] = ()) -> Settings:
    """Everything that the servers of a rank depend on: their command, files, environment and place.

    Args:
        gpus: how many each model before this one needs; they are divided in this order.

    Raises:
        ConfigError, ServerStartFailed: see ``Engine.launch``.
    """
    command = config.engine.launch(config, _PORT, Key(""))
    model = config.model_name_or_path
    script = str((config.model_kwargs or {})["server_script"]) if config.server_type == "custom" else ""
    parts: dict[str, object] = {
        "command line": command.argv,
        "server_script": script and stamp(script),
        "model": stamp(model),
        **{f"files of {flag}": part for flag, part in stamps_of_arguments(command.argv, [model, script]).items()},
        "replicas": config.replicas,
        "server_stop_timeout_sec": config.server_stop_timeout_sec,
        "server_log_folder": config.server_log_folder,
        "working directory": str(Path.cwd()),
        "gpus": [config.gpus, *gpus],
    }
    environment = HiddenDict({**os.environ, **command.env})
    return {
        **{name: _hash(part) for name, part in parts.items()},
        **{f"environment variable {name}": _hash(environment[name]) for name in environment.keys() - _NOT_FOR_SERVERS},
    }


def _hash(part: object) -> str:
    return xxhash.xxh3_128_hexdigest(repr(part).encode())


def take(wanted: Mapping[str, Settings | None], rank: int) -> tuple[dict[str, ServerSet], dict[str, ServerSet]]:
    """The warm servers of these models, and those that no model can have. Both belong to the caller from now on.

    Args:
        wanted: the settings of each model's servers; None if they must be its own.
        rank: the caller's.
    """
    warm = _take_all()
    found = {name: one for name, one in warm.items() if one.settings == wanted.get(name)}
    others = {name: warm[name] for name in warm.keys() - found.keys()}
    for name, one in others.items():
        why = _difference(one.settings, wanted[name]) if name in wanted else "it has no such model"
        logger.info(f"Rank {rank} does not take over {one}, which is stopped: {why}.")
    return found, others


def _difference(before: Settings, now: Settings | None) -> str:
    if now is None:
        return "it takes over none (reuse_servers is off, or several nodes serve its model)"
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"what it needs differs in {', '.join(names[:_SHOWN])}{more}"


def keep(servers: ServerSet) -> bool:
    """Make these servers the warm set. False if that cannot be: then the caller must stop them."""
    with _state.lock:
        # Outside of ``one_rank`` nobody knows whether the rank succeeds.
        if servers.model in _state.warm or not _state.ranks or not any(server.is_running for server in servers.servers):
            return False
        _state.warm[servers.model] = servers
        if not _state.ends_with_process:
            _state.ends_with_process = True
            atexit.register(close_warm_servers)
            # Processes that multiprocessing starts end without atexit, and run its own finalizers.
            for name in ("multiprocessing", "multiprocess"):
                module, util = sys.modules.get(name), sys.modules.get(f"{name}.util")
                if module is not None and util is not None and module.parent_process() is not None:
                    util.Finalize(None, close_warm_servers, exitpriority=0)
    return True


@contextmanager
def one_rank(shutdown: Shutdown) -> Iterator[None]:
    """Around the whole run of a rank. Then warm servers are stopped if it failed or was asked to stop; else the idle
    time begins.
    """
    state = _state  # a fork has another one, and must not count this rank
    with state.lock:
        state.ranks += 1
        _cancel_timer()
    succeeded = False
    try:
        yield
        succeeded = not shutdown.is_requested
    finally:
        with state.lock:
            state.ranks -= 1
            if succeeded and state is _state and state.warm and not state.ranks:
                state.timer = threading.Timer(IDLE_SECONDS, _stop_idle)
                state.timer.daemon = True
                state.timer.start()
        if not succeeded:
            close_warm_servers()


def close_warm_servers() -> None:
    """Stop the servers that this process keeps for its next rank. Returns when they have ended.

    A process that ends by ``os._exit`` should call it first, and one that has other work to do once its ranks are done.
    May be called at any time, and by any thread.
    """
    timer, warm = _state.timer, _take_all()
    stop(warm.values())
    if timer is not None and timer is not threading.current_thread():
        timer.join()  # it may be stopping servers


def stop(sets: Collection[ServerSet]) -> None:
    """Stop all of these servers at once. Returns when they have ended."""
    servers = [server for one in sets for server in one.servers]
    for server in servers:
        server.request_stop()
    for server in servers:
        server.stop_blocking()
        server.lease.close()


def _take_all() -> dict[str, ServerSet]:
    with _state.lock:
        warm, _state.warm = _state.warm, {}
        _cancel_timer()
        return warm


def _cancel_timer() -> None:
    if _state.timer is not None:
        _state.timer.cancel()
        _state.timer = None


def _stop_idle() -> None:
    with _state.lock:
        if threading.current_thread() is not _state.timer:
            return  # a rank came at the last moment
        warm, _state.warm = _state.warm, {}
    for servers in warm.values():
        seconds = f"{IDLE_SECONDS:g} s"
        logger.info(f"Stopping {servers}: this process has had no other rank for {seconds} (reuse_servers).")
    stop(warm.values())


# Stamps of the files that a server is started with: equal as long as nobody changes the files.
#
# A stamp is made of what ``stat`` says: no file is read. Of a folder it covers the files in it and those one level
# down, at most ``_MOST_FILES`` of each. Nothing here raises for a path that does not exist or cannot be read.


_MOST_FILES = 1000  # per level of a folder: one may hold millions
_BETWEEN = re.compile(r"[\s,=]+")
Stamp: TypeAlias = list[tuple[str, int, int, int]]
"""Files with their modification time in nanoseconds, size in bytes, and inode."""


def stamp(path: str) -> Stamp:
    """Changes when the file, or a file in the folder, changes. Empty for what is no path, such as a model's name."""
    root = Path(os.path.expandvars(path))
    with suppress(RuntimeError):  # there is no such user
        root = root.expanduser()
    found = _files([root])
    for level in ("*", "*/*"):
        with suppress(OSError, ValueError):
            found += _files(sorted(islice(root.glob(level), _MOST_FILES)))
    return found


def _files(paths: Iterable[Path]) -> Stamp:
    found = []
    for path in paths:
        with suppress(OSError, ValueError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):  # the times of devices and pipes change with their use
                found.append((str(path), status.st_mtime_ns, status.st_size, status.st_ino))
    return found


def stamps_of_arguments(argv: Sequence[str], known: Collection[str]) -> dict[str, dict[str, Stamp]]:
    """From the names of flags to the stamps of the files and folders that their values name.

    A value may be a path, NAME=PATH, several of them with commas or blanks between, or JSON that contains some.

    Args:
        argv: the command line.
        known: paths that need no stamp.
    """
    stamps: dict[str, dict[str, Stamp]] = {}
    flag = "the command"
    for argument in argv:
        value = argument
        if argument.startswith("-"):
            flag, _, value = argument.partition("=")
        texts = {value, *re.split(r'\\*"', value)}
        texts |= {text.partition("=")[2] for text in texts} | {part for text in texts for part in _BETWEEN.split(text)}
        for path in sorted(texts - {*known, ""}):
            if found := stamp(path):
                stamps.setdefault(flag, {})[path] = found
    return stamps


# What the models of a rank get of the node: the servers of the rank before, or a lease for new ones.
#
# It is found for all models at once, by the one that comes first. Two ranks that each lease GPUs for one model while
# they wait for the other's could wait for each other.


Share: TypeAlias = "tuple[Settings | None, list[InferenceServer], list[GpuLease]]"
"""What one model gets: settings with which the next rank may have the servers (None: it may not); servers of the rank
before (empty: new ones are to be started); and leases for those, one each."""


class RankModels:
    """The models of one rank whose servers are launched.

    Args:
        configs: of all models of the rank, in their order.
        keeps: the servers may be those of the rank before, and go on to the next one.
    """

    def __init__(self, configs: Sequence[InferenceConfig], rank: int, keeps: bool = True) -> None:
        self._keeps = keeps
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
        return self._settings[config.name], warm.servers if warm else [], self._leases.pop(config.name, [])

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
        if Nodes.from_environment().count > 1 or not config.reuse_servers or not self._keeps:
            return None
        # Without locks each model has its place among the GPUs, which the models before it decide.
        before = takewhile(lambda one: one is not config, self._configs)
        return server_settings(config, [one.gpus_each * one.replicas for one in before])
