"""What a server may use of its node: its GPUs, and a cache folder of its own.

**GPUs.** With ``replicas`` the GPUs that this process sees are divided, tp * dp * pp for each server. Slurm and Ray
give each task GPUs of its own, but LocalPipelineExecutor starts several ranks that all see all of them. There, each
server claims its GPUs by a file lock (flock) per GPU. Why a lock: neither the environment nor the rank says which
ranks run at this moment (with 8 ranks and 2 workers, ranks 3 and 5 may), while a lock is free again exactly when its
holder is gone, killed or not. The server's processes inherit it, so GPUs count as taken until the last of them has
freed its memory. A process without visible GPUs (a CPU machine) claims and divides none.

**Cores.** The ``replicas`` of llama.cpp have as many threads together as this process may use cores, and at least one
each. Nothing is pinned.

**vLLM's cache.** vLLM keeps what torch.compile made in ~/.cache/vllm, and servers that start together write the same
files there. datatrove lets the first one compile and the others wait. Here every server that runs at this moment on
this node has a cache folder of its own (the first one that is free, locked likewise), which the next run finds again:
nobody waits, and no two servers ever write to one folder. It costs disk, and one compilation per folder.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loguru import logger

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.redaction import HiddenDict

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU_DEVICE = re.compile(r"nvidia\d+")
_DEV = Path("/dev")
# Seconds to wait for GPUs that others hold: the server of a rank that was killed takes up to ten to be gone.
_CLAIM_TIMEOUT = 30.0
_CLAIM_POLL = 0.2
_MAX_CACHES = 256


@dataclass
class GpuLease:
    """One server's share of the node.

    Attributes:
        env: additions to the server's environment.
        locks: file descriptors that hold it; the server inherits them.
        gpus: the GPUs in it, as CUDA_VISIBLE_DEVICES names them; empty when they were not divided.
    """

    env: HiddenDict = field(default_factory=HiddenDict)
    locks: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    def add(self, lock: int) -> None:
        self.locks = (*self.locks, lock)

    def close(self) -> None:
        while self.locks:
            os.close(self.locks[0])
            self.locks = self.locks[1:]


@asynccontextmanager
async def slots(config: InferenceConfig) -> AsyncIterator[list[GpuLease]]:
    """One slot per replica.

    Raises:
        ConfigError: there are GPUs, but too few.
    """
    taken = [GpuLease() for _ in range(config.replicas)]
    try:
        await _share_gpus(config, taken)
        if config.server_type == "vllm":
            for slot in taken:
                await asyncio.to_thread(_take_cache, slot)
        yield taken
    finally:
        for slot in taken:
            slot.close()


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; empty where there are none."""
    listed = os.environ.get(_VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    return [str(index) for index in range(sum(1 for path in _DEV.iterdir() if _GPU_DEVICE.fullmatch(path.name)))]


def usable_cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))  # a Slurm task is bound to its share of the node
    return os.cpu_count() or 1


def gpus_per_server(config: InferenceConfig) -> int:
    """How many GPUs one server needs: tp * dp * pp, unless model_kwargs says otherwise."""
    given = {name.replace("_", "-"): value for name, value in (config.model_kwargs or {}).items()}

    def size(default: int, *names: str) -> int:
        values: list[Any] = [given[name] for name in names if name in given]
        return int(values[0]) if values else default

    within = bool(given.get("enable-dp-attention"))  # SGLang's: data parallel inside the tensor parallel group
    tp = size(config.tp, "tensor-parallel-size", "tp-size", "tp")
    pp = size(config.pp, "pipeline-parallel-size", "pp-size")
    return tp * pp * (1 if within else size(config.dp, "data-parallel-size", "dp-size", "dp"))


async def _share_gpus(config: InferenceConfig, taken: list[GpuLease]) -> None:
    visible = visible_gpus()
    ranks_share_them = config.server_type in ("vllm", "sglang") and _executor() == "LOCAL"
    if not visible or not (config.replicas > 1 or ranks_share_them):
        return
    each = gpus_per_server(config)
    needed = each * config.replicas
    if needed > len(visible):
        raise ConfigError(
            f"replicas: {config.replicas} servers with tp * dp * pp = {each} need {needed} GPUs, and this task sees "
            f"{len(visible)} ({_VISIBLE}={','.join(visible)})."
        )
    chosen = [(name, -1) for name in visible]
    if ranks_share_them:
        chosen = await _claim(visible, needed)
    for index, slot in enumerate(taken):
        mine = chosen[index * each : (index + 1) * each]
        slot.gpus = tuple(name for name, _ in mine)
        slot.env[_VISIBLE] = ",".join(slot.gpus)
        for _, lock in mine:
            if lock >= 0:
                slot.add(lock)


def _executor() -> str:
    return os.environ.get("DATATROVE_EXECUTOR", "LOCAL")


async def _claim(visible: list[str], needed: int) -> list[tuple[str, int]]:
    """GPUs with the locks that hold them.

    Raises:
        ConfigError: others hold too many of them.
    """
    folder = _lock_folder()
    deadline = time.monotonic() + _CLAIM_TIMEOUT
    while True:
        claimed = _try_claim(folder, visible, needed)
        if claimed is not None:
            return claimed
        if time.monotonic() > deadline:
            raise ConfigError(
                f"workers: this rank needs {needed} of the GPUs {','.join(visible)}, and other ranks on this node "
                f"hold too many of them (locks in {folder}). Run fewer workers at once."
            )
        await asyncio.sleep(_CLAIM_POLL)


def _try_claim(folder: Path, visible: list[str], needed: int) -> list[tuple[str, int]] | None:
    """All or nothing: who kept a part while waiting for the rest could wait for ever.

    One rank at a time: two that claim at once would take every other GPU each, and leave a third rank none where two
    would have been left. GPUs that stand side by side are often the ones that are linked.
    """
    gate = _try_lock(folder / "claim.lock")
    if gate is None:
        return None
    try:
        return _try_claim_alone(folder, visible, needed)
    finally:
        os.close(gate)


def _try_claim_alone(folder: Path, visible: list[str], needed: int) -> list[tuple[str, int]] | None:
    claimed: list[tuple[str, int]] = []
    for name in visible:
        lock = _try_lock(folder / f"gpu_{re.sub(r'[^0-9A-Za-z-]', '_', name)}.lock")
        if lock is not None:
            claimed.append((name, lock))
        if len(claimed) == needed:
            return claimed
    for _, lock in claimed:
        os.close(lock)
    return None


def _lock_folder() -> Path:
    """Of this user and, in a Slurm job, this job: another job's GPU 0 may be another GPU."""
    job = os.environ.get("SLURM_JOB_ID")
    folder = Path(tempfile.gettempdir()) / (f"datatrove-ckpt-{os.getuid()}" + (f"-{job}" if job else ""))
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"TMPDIR: {folder} belongs to another user; point TMPDIR at a folder of your own.")
    return folder


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _take_cache(slot: GpuLease) -> None:
    """A vLLM cache folder that no other living server uses."""
    try:
        for folder in _cache_folders():
            folder.mkdir(parents=True, exist_ok=True)
            lock = _try_lock(folder / "lock")
            if lock is not None:
                slot.add(lock)
                slot.env["VLLM_CACHE_ROOT"] = str(folder)
                return
    except OSError as error:  # a home that cannot be written, or a file system without locks
        logger.warning(f"vLLM uses its common cache folder: {error}. Servers that start together may disturb another.")


def _cache_folders() -> Iterator[Path]:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm"
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or default)
    for index in range(_MAX_CACHES):
        yield root / "datatrove-ckpt" / f"{socket.gethostname()}_{index}"
