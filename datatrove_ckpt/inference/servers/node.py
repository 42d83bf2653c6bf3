"""What the user's runs have on this node: a folder, descriptors that no fork keeps, and records of their servers.

The records serve to end what is left of a server whose runner and guardian were killed together, before another server
needs its GPUs. The record of a server says who its runner and its guardian are, and which file is its log. The next
start on the node reads the records. If neither of the two is alive, it kills the processes of the guardian's session
whose output is the server's log. The environment would be no proof: engines that set their process title (vLLM) have
overwritten it.

A process id can be reused, so a process is only itself together with its start time. Process ids mean nothing to
another host or container that shares the folder, so each host name has its own records. Without /proc, as on macOS,
nothing is recorded and nothing is killed.

What is not found: processes in a session of their own, those with another output, and servers that were started with
another TMPDIR.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from loguru import logger

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.inference.servers.guardian import Process, process_table

# Seconds. A process that hangs inside a driver cannot be killed, and waiting for it would never end.
_KILL_TIMEOUT = 10.0


@dataclass(frozen=True)
class ServerRecord:
    """One server of one runner. Processes are pairs of a process id and a start time (clock ticks since the boot).

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
        """The record of a server that this process has launched. ``log`` is a file descriptor.

        None where there is no /proc, or the runtime folder cannot be written to: that is no reason to start no server.
        """
        started = {process.pid: process.started for process in process_table()}
        if guardian not in started or os.getpid() not in started:
            return None
        status, pid = os.fstat(log), os.getpid()
        log_file = (status.st_dev, status.st_ino)
        record = cls(name, (pid, started[pid]), (guardian, started[guardian]), log_file)
        try:
            record._path.write_text(json.dumps(asdict(record)))
        except (OSError, ConfigError) as error:
            logger.warning(f"Should this process and the guardian be killed together, nobody will end {name}: {error}")
            return None
        return record

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None if the file holds no record."""
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())  # ``Any``: JSON
            return cls(**{**found, **{key: tuple(found[key]) for key in ("runner", "guardian", "log")}})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

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
    """Kill what a killed guardian left behind, and wait for it: all of the session that it led.

    The kernel does not reuse the number of a session that has a process, so no other process is hit.
    """
    _kill_all(lambda process: process.session == session and process.pid != os.getpid(), name)


def _kill_all(is_one: Callable[[Process], bool], name: str) -> list[str]:
    """Kill the processes of a server, and wait for them. Returns each as "process 7 (name)"."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + _KILL_TIMEOUT
    # Again until nothing is found: a dying process may still have forked.
    while ours := [process for process in process_table() if not process.zombie and is_one(process)]:
        for process in ours:
            killed[process.pid] = f"process {process.pid} ({process.name})"
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or belongs to another user
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
    """End the servers on this node whose runner and guardian are dead. Other servers are not touched."""
    try:
        paths = sorted(_folder().glob("*.json"))
    except (OSError, ConfigError) as error:
        logger.warning(f"What killed runs may have left on this node is not looked for: {error}")
        return
    for record in filter(None, map(ServerRecord.read, paths)):
        alive = {(process.pid, process.started) for process in process_table() if not process.zombie}
        if alive.isdisjoint({record.runner, record.guardian}):
            if killed := _kill_all(record.owns, record.name):
                logger.warning(
                    f"Ended what a killed run had left on this node: {', '.join(killed)} of the server of "
                    f"{record.name}, whose runner was process {record.runner[0]}."
                )
            record.remove()


def _folder() -> Path:
    namespace = 0  # of process ids: containers may share a host name and this folder
    with suppress(OSError):
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    folder = runtime_folder() / "servers" / f"{socket.gethostname()}-{namespace}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


# File descriptors that belong to this process alone: a fork of it closes its copies.
#
# The copy of a lifeline pipe would keep a server running that its runner stops, and the copy of a lock would keep a GPU
# taken. Programs that this process starts get no copy in the first place, unless it is passed on (``pass_fds``).


_ours: set[int] = set()


def own(descriptor: int) -> int:
    """The descriptor, which forks of this process close from now on. Close it with ``close``."""
    _ours.add(descriptor)
    return descriptor


def close(descriptor: int) -> None:
    """Close a descriptor that this process owns. In a fork of this process: nothing, since it is closed already."""
    if descriptor in _ours:
        _ours.discard(descriptor)
        os.close(descriptor)


def _close_all() -> None:
    while _ours:
        os.close(_ours.pop())


os.register_at_fork(after_in_child=_close_all)


# The folder on this node for what the user's runs tell each other: locks on GPUs, records of servers.


def runtime_folder(part: str = "") -> Path:
    """One folder per user, and per ``part``. Nobody else can look into it.

    Raises:
        ConfigError: somebody else has made it.
    """
    folder = Path(tempfile.gettempdir()) / (f"datatrove-ckpt-{os.getuid()}" + (f"-{part}" if part else ""))
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"TMPDIR: {folder} belongs to another user; point TMPDIR at a folder of your own.")
    return folder
