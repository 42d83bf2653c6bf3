"""Leases a server its share of the node's GPUs.

With ``replicas`` or several models the GPUs that this process sees are divided. Slurm and Ray give
each task its own GPUs, but LocalPipelineExecutor starts several ranks that all see all GPUs. With
it, each server holds a file lock per GPU. Its processes inherit the lock, which becomes free when
the last process has ended and freed its memory.
"""

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import VISIBLE_GPUS, visible_gpus
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.inference.servers.guarded import close_descriptor, own_descriptor
from datatrove_ckpt.inference.servers.leftovers import end_leftovers, runtime_folder
from datatrove_ckpt.process.event_loop import in_own_thread

# Seconds. The server of a rank that was killed takes up to ten to end.
_LEASE_TIMEOUT = 60.0


@dataclass
class GpuLease:
    """One server's share of the node.

    Attributes:
        env: additions to the server's environment.
        locks: descriptors of the locks that hold the lease; the server inherits them.
    """

    env: dict[str, str] = field(default_factory=dict)
    locks: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.locks:
            close_descriptor(self.locks.pop())


async def lease_gpus(
    configs: Sequence[InferenceConfig], without: Collection[str] = ()
) -> dict[str, list[GpuLease]]:
    """Returns a lease for each server of a rank's models. First ends the servers that killed runs
    have left on this node.

    Args:
        configs: configs of all models whose servers the rank launches, in their order.
        without: names of the models that already have servers, and so leases.

    Raises:
        ConfigError: there are GPUs, but too few.
    """
    await in_own_thread(end_leftovers)
    leases: dict[str, list[GpuLease]] = {}
    for config in configs:
        if config.name not in without:
            leases[config.name] = [GpuLease() for _ in range(config.replicas)]
    try:
        await _share_gpus(configs, leases)
    except BaseException:
        for lease in chain(*leases.values()):
            lease.close()
        raise
    return leases


async def _share_gpus(
    configs: Sequence[InferenceConfig], leases: Mapping[str, list[GpuLease]]
) -> None:
    """Assigns GPUs to each server: the next in order, or free and locked GPUs if ranks share."""
    visible = visible_gpus()
    is_local = os.environ.get("DATATROVE_EXECUTOR", "LOCAL") == "LOCAL"
    ranks_share_them = is_local and any(config.engine.leases_gpus for config in configs)
    divided = sum(config.replicas for config in configs) > 1
    is_set = any(config.gpus is not None for config in configs)
    if not visible or not leases or not (ranks_share_them or divided or is_set):
        return
    needed = sum(config.gpus_each * config.replicas for config in configs)
    if needed > len(visible):
        raise ConfigError(
            f"gpus: the servers of a task need {needed} GPUs (gpus, or tp * dp * pp for each of "
            f"replicas), and this task sees {len(visible)} ({VISIBLE_GPUS}={','.join(visible)})."
        )
    free = iter([(name, -1) for name in visible])
    if ranks_share_them:
        configs = [one for one in configs if one.name in leases]
        free = iter(await _lock_gpus(visible, sum(one.gpus_each * one.replicas for one in configs)))
    for config in configs:
        servers = [list(islice(free, config.gpus_each)) for _ in range(config.replicas)]
        for lease, share in zip(leases.get(config.name, ()), servers, strict=False):
            lease.env[VISIBLE_GPUS] = ",".join(name for name, _ in share)
            for _, lock in share:
                if lock >= 0:
                    lease.locks.append(own_descriptor(lock))


async def _lock_gpus(visible: list[str], needed: int) -> list[tuple[str, int]]:
    """Waits for ``needed`` free GPUs. Returns their names and lock descriptors.

    Raises:
        ConfigError: other processes held too many GPUs for a minute.
    """
    # In Slurm a folder per job: another job's GPU 0 may be another GPU.
    folder = runtime_folder(os.environ.get("SLURM_JOB_ID", ""))
    began = time.monotonic()
    while True:
        locked = _try_lock_gpus(folder, visible, needed)
        if locked is not None:
            return locked
        if time.monotonic() - began > _LEASE_TIMEOUT:
            raise ConfigError(
                f"workers: this task needs {needed} of the GPUs {','.join(visible)}, and other "
                f"tasks on this node hold too many of them (locks in {folder}). Run fewer workers "
                "at once."
            )
        await asyncio.sleep(0.2)


def _try_lock_gpus(folder: Path, visible: list[str], needed: int) -> list[tuple[str, int]] | None:
    """Locks all needed GPUs or none: two ranks with a part each could wait forever.

    Only one rank tries at a time: otherwise both may find too few.
    """
    gate = _try_lock(folder / "claim.lock")
    if gate is None:
        return None
    locked: list[tuple[str, int]] = []
    try:
        for name in visible:
            lock = _try_lock(folder / f"gpu_{re.sub(r'[^0-9A-Za-z-]', '_', name)}.lock")
            if lock is not None:
                locked.append((name, lock))
            if len(locked) == needed:
                return locked
    finally:
        os.close(gate)
    for _, lock in locked:
        os.close(lock)
    return None


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor
