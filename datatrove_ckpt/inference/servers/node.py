"""What the user's runs have on this node: a folder, descriptors that no fork keeps, records of
servers, GPUs.

If a runner and its guardian are killed together, their server's record remains. The next start on
the node then kills the processes of the guardian's session whose output is the recorded log.

Process ids are reused, so a process is identified by id and start time. Each host or container has
its own records in a shared folder. Without /proc (macOS) nothing is recorded or killed.
"""

import asyncio
import fcntl
import json
import os
import re
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Self

from loguru import logger

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.places import process_place
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import VISIBLE_GPUS, visible_gpus
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.inference.servers.guarded import close_descriptor, own_descriptor
from datatrove_ckpt.inference.servers.guardian import Process, process_table
from datatrove_ckpt.process.event_loop import in_own_thread

# Seconds. A process that hangs inside a driver cannot be killed.
_KILL_TIMEOUT = 10.0


@dataclass(frozen=True)
class ServerRecord:
    """One server of one runner. Processes are pairs of a process id and a start time (clock ticks
    since the boot).

    Attributes:
        guardian: also the number of the server's session.
        log: device and inode of the server's log.
    """

    name: str
    runner: tuple[int, int]
    guardian: tuple[int, int]
    log: tuple[int, int]

    @classmethod
    def create(cls, name: str, guardian: int, log: int) -> Self | None:
        """Records a server that this process has launched. ``log`` is a file descriptor.

        Returns None without /proc or a runtime folder; the server starts anyway.
        """
        started = {process.pid: process.started for process in process_table()}
        if guardian not in started or os.getpid() not in started:
            return None
        status = os.fstat(log)
        pid = os.getpid()
        log_file = (status.st_dev, status.st_ino)
        record = cls(name, (pid, started[pid]), (guardian, started[guardian]), log_file)
        try:
            record._path.write_text(json.dumps(asdict(record)))
        except (OSError, ConfigError) as error:
            logger.warning(
                f"Should this process and the guardian be killed together, nobody will end {name}: "
                f"{error}"
            )
            return None
        return record

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Reads a record; None if the file holds none."""
        try:
            found: JsonObject = json.loads(path.read_bytes())
            return cls(
                **{**found, **{key: tuple(found[key]) for key in ("runner", "guardian", "log")}}
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def owns(self, process: Process) -> bool:
        """Whether a process is provably one of this server's."""
        if process.session != self.guardian[0]:
            return False
        for number in (1, 2):
            with suppress(OSError):
                status = Path(f"/proc/{process.pid}/fd/{number}").stat()
                if (status.st_dev, status.st_ino) == self.log:
                    return True
        return False

    @property
    def _path(self) -> Path:
        return _folder() / f"{self.guardian[0]}.json"


def kill_session(session: int, name: str) -> None:
    """Kills a killed guardian's session, whose number the kernel does not reuse meanwhile."""
    _kill_all(lambda process: process.session == session and process.pid != os.getpid(), name)


def _kill_all(is_one: Callable[[Process], bool], name: str) -> list[str]:
    """Kills a server's processes until none is found: a dying process may fork.

    Returns each as "process 7 (name)".
    """
    killed: dict[int, str] = {}
    deadline = time.monotonic() + _KILL_TIMEOUT
    while ours := [
        process for process in process_table() if not process.zombie and is_one(process)
    ]:
        for process in ours:
            killed[process.pid] = f"process {process.pid} ({process.name})"
            # It has ended, or belongs to another user.
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            logger.warning(
                f"Some processes of {name} cannot be killed; they may still hold GPUs: "
                f"{', '.join(killed[process.pid] for process in ours)}"
            )
            break
        time.sleep(0.005)
    return list(killed.values())


def end_leftovers() -> None:
    try:
        paths = sorted(_folder().glob("*.json"))
    except (OSError, ConfigError) as error:
        logger.warning(f"What killed runs may have left on this node is not looked for: {error}")
        return
    for record in filter(None, map(ServerRecord.read, paths)):
        alive = {
            (process.pid, process.started) for process in process_table() if not process.zombie
        }
        if alive.isdisjoint({record.runner, record.guardian}):
            if killed := _kill_all(record.owns, record.name):
                logger.warning(
                    f"Ended what a killed run had left on this node: {', '.join(killed)} of the "
                    f"server of {record.name}, whose runner was process {record.runner[0]}."
                )
            remove_record(record.guardian[0])


def remove_record(guardian: int) -> None:
    with suppress(OSError, ConfigError):
        (_folder() / f"{guardian}.json").unlink(missing_ok=True)


def _folder() -> Path:
    # Containers and machines may share this folder, and a host name.
    folder = runtime_folder() / "servers" / (process_place() or "unknown")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


# The folder on this node for locks on GPUs and records of servers.


def runtime_folder(part: str = "") -> Path:
    """Returns a private folder per user and ``part``. Raises: ConfigError: another user has made
    it.
    """
    folder = Path(tempfile.gettempdir()) / (
        f"datatrove-ckpt-{os.getuid()}" + (f"-{part}" if part else "")
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"TMPDIR: {folder} belongs to another user; point TMPDIR at a folder of your own."
        )
    return folder


# Leases a server its share of the node. With ``replicas`` or several models the GPUs that this
# process sees are divided. Slurm and Ray give each task its own GPUs, but LocalPipelineExecutor
# starts several ranks that all see all of them. There, each server holds a file lock per GPU. Its
# processes inherit the lock, which becomes free when the last of them has ended and freed its
# memory.


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
    """Returns a lease for each server of a rank's models. First ends what killed runs have left
    here.

    Args:
        configs: of all models whose servers the rank launches, in their order.
        without: the models that already have servers, and so leases.

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
    """Gives each server GPUs: the next in order, or free ones with locks if ranks share them."""
    visible = visible_gpus()
    is_local = os.environ.get("DATATROVE_EXECUTOR", "LOCAL") == "LOCAL"
    ranks_share_them = is_local and any(config.engine.leases_gpus for config in configs)
    divided = sum(config.replicas for config in configs) > 1
    given = any(config.gpus is not None for config in configs)
    if not visible or not leases or not (ranks_share_them or divided or given):
        return
    needed = sum(config.gpus_each * config.replicas for config in configs)
    if needed > len(visible):
        raise ConfigError(
            f"gpus: the servers of a task need {needed} GPUs (gpus, or tp * dp * pp for each of "
            f"replicas), and this task sees {len(visible)} ({VISIBLE_GPUS}={','.join(visible)})."
        )
    left = iter([(name, -1) for name in visible])
    if ranks_share_them:
        configs = [one for one in configs if one.name in leases]
        left = iter(await _lock_gpus(visible, sum(one.gpus_each * one.replicas for one in configs)))
    for config in configs:
        servers = [list(islice(left, config.gpus_each)) for _ in range(config.replicas)]
        for lease, share in zip(leases.get(config.name, ()), servers, strict=False):
            lease.env[VISIBLE_GPUS] = ",".join(name for name, _ in share)
            for _, lock in share:
                if lock >= 0:
                    lease.locks.append(own_descriptor(lock))


async def _lock_gpus(visible: list[str], needed: int) -> list[tuple[str, int]]:
    """Waits for ``needed`` free GPUs. Returns their names and lock descriptors.

    Raises:
        ConfigError: other processes hold too many for a minute.
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

    One rank at a time: otherwise both may find too few.
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
