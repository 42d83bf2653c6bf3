"""What the user's runs have on this node: a folder, descriptors that no fork keeps, and records of their servers.

The records serve to end what is left of a server whose runner and guardian were killed together, before another server
needs its GPUs.

Each server that this process launches has a record in the user's runtime folder on the node: a nonce, which is also in
the environment of the server and so of all its descendants, and who its runner and its guardian were. The next start on
the node reads the records. Only if neither of the two is alive, it kills

- the processes with the nonce in their environment, and
- those of the guardian's session whose output is the server's log: engines that set their process title (vLLM) have
  overwritten their environment.

All of these must be the user's own and have started after the record was made. A number can be reused, so a process is
only itself together with its start time; between the check and the signal, a pidfd holds it. A record of another boot,
host or PID namespace (a container that shares the folder) says nothing about the processes here, and is left alone.
Without /proc, as on macOS, or without pidfds, nothing is recorded and nothing is killed.

What is not found: processes in a session of their own without the nonce, and servers that were started with another
TMPDIR.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from loguru import logger

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.inference.servers.guardian import process_table

VARIABLE = "DATATROVE_CKPT_SERVER"
_PROC = Path("/proc")
# Seconds. A process that hangs inside a driver cannot be killed, and waiting for it would never end.
_KILL_TIMEOUT = 10.0
_OLD = 30 * 86_400.0  # seconds after which a record from elsewhere is removed


@dataclass(frozen=True)
class ServerRecord:
    """One server of one runner. Processes are pairs of a process id and a start time (clock ticks since the boot).

    Attributes:
        boot, pid_namespace: where these process ids mean something.
        guardian: also the number of the server's session; None until it has started.
        log: device and inode of the server's log.
    """

    name: str
    nonce: str
    host: str
    boot: str
    pid_namespace: str
    runner: tuple[int, int]
    guardian: tuple[int, int] | None = None
    log: tuple[int, int] | None = None

    @classmethod
    def create(cls, name: str) -> Self | None:
        """The record of a server that this process is about to launch.

        None where processes cannot be identified, or the runtime folder cannot be written to: that is no reason to
        start no server.
        """
        started = _start_time(os.getpid())
        if started is None or not _has_pidfds():
            return None
        record = cls(name, secrets.token_hex(16), *_here(), (os.getpid(), started))
        try:
            record._write()
        except (OSError, ConfigError) as error:
            logger.warning(f"Should this process and the guardian be killed together, nobody will end {name}: {error}")
            return None
        return record

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None if the file holds no record."""
        try:
            found: dict[str, Any] = json.loads(path.read_bytes())  # ``Any``: JSON
            pairs = {key: tuple(found[key]) if found[key] else None for key in ("runner", "guardian", "log")}
            return cls(**{**found, **pairs})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def launched(self, guardian: int, log: int) -> Self:
        """The record of the server after its guardian has started. ``log`` is a file descriptor."""
        started, status = _start_time(guardian), os.fstat(log)
        if started is None:  # it has ended already
            return self
        record = replace(self, guardian=(guardian, started), log=(status.st_dev, status.st_ino))
        with suppress(OSError):  # a full disk: the record without the guardian still finds the nonce
            record._write()
        return record

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def kill_processes(self) -> list[str]:
        """Kill what is left of the server, and wait for it. Only once runner or guardian can no longer do that.

        Returns:
            The processes, each as "process 7 (name)".
        """
        killed: list[str] = []
        deadline = time.monotonic() + _KILL_TIMEOUT
        # Again until nothing is found: a dying process may still have forked.
        while time.monotonic() < deadline:
            with ExitStack() as stack:
                found = [stack.enter_context(_held(pid)) for pid in self._candidates()]
                ours = [(pid, fd) for pid, fd in found if fd is not None and self._owns(pid)]
                if not ours:
                    return killed
                for pid, fd in ours:
                    killed.append(f"process {pid} ({_name_of(pid)})")
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                for _, fd in ours:
                    select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        logger.warning(f"Some processes of {self.name} cannot be killed; they may still hold GPUs: {', '.join(killed)}")
        return list(dict.fromkeys(killed))

    @property
    def is_abandoned(self) -> bool:
        """Neither the runner nor the guardian is alive."""
        return not any(_is_alive(process) for process in (self.runner, self.guardian) if process is not None)

    def has_processes(self) -> bool:
        """Whether something is left of the server."""
        return any(self._owns(pid) for pid in self._candidates())

    def _candidates(self) -> list[int]:
        return [process.pid for process in process_table() if not process.zombie and process.pid != os.getpid()]

    def _owns(self, pid: int) -> bool:
        """Whether a process is provably one of this server's."""
        started = _start_time(pid)
        first = (self.guardian or self.runner)[1]
        if started is None or started < first or _owner(pid) != os.getuid() or pid in _ancestors():
            return False
        return self._has_nonce(pid) or (self._is_in_session(pid) and self._writes_log(pid))

    def _has_nonce(self, pid: int) -> bool:
        with suppress(OSError):
            return f"{VARIABLE}={self.nonce}".encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        return False

    def _is_in_session(self, pid: int) -> bool:
        with suppress(OSError):
            return self.guardian is not None and os.getsid(pid) == self.guardian[0]
        return False

    def _writes_log(self, pid: int) -> bool:
        for number in (1, 2):
            with suppress(OSError):
                status = (_PROC / str(pid) / "fd" / str(number)).stat()
                if (status.st_dev, status.st_ino) == self.log:
                    return True
        return False

    @property
    def _path(self) -> Path:
        return _folder() / f"{self.nonce}.json"

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(asdict(self)))
        new.replace(self._path)


def end_leftovers() -> None:
    """End the servers on this node whose runner and guardian are dead. Other servers are not touched."""
    if not _has_pidfds() or _start_time(os.getpid()) is None:
        return
    try:
        paths = sorted(_folder().glob("*.json"))
    except (OSError, ConfigError) as error:
        logger.warning(f"What killed runs may have left on this node is not looked for: {error}")
        return
    for path in paths:
        record = ServerRecord.read(path)
        if record is None or (record.host, record.boot, record.pid_namespace) != _here():
            _remove_if_old(path)
        elif record.is_abandoned:
            killed = record.kill_processes()
            if killed:
                logger.warning(
                    f"Ended what a killed run had left on this node: {', '.join(killed)} of the server of "
                    f"{record.name}, whose runner was process {record.runner[0]}."
                )
            if not record.has_processes():
                record.remove()


def _has_pidfds() -> bool:
    """Whether the kernel (Linux 5.3) and the sandbox allow them."""
    with suppress(OSError, AttributeError):
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False


def _folder() -> Path:
    folder = runtime_folder() / "servers"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _remove_if_old(path: Path) -> None:
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > _OLD:
            path.unlink()


def _here() -> tuple[str, str, str]:
    """Where process ids mean what they mean for us: host, boot, PID namespace."""
    boot, namespace = "", ""
    with suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = str((_PROC / "self/ns/pid").readlink())
    return socket.gethostname(), boot, namespace


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the name; none if there is no such process, or /proc does not show it."""
    with suppress(OSError, ValueError):
        stat = (_PROC / str(pid) / "stat").read_bytes()
        return stat[stat.rindex(b")") + 2 :].split()
    return []


def _start_time(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else None


def _is_alive(process: tuple[int, int]) -> bool:
    pid, started = process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's: whether the number was reused is decided below
    fields = _stat(pid)
    # A process that exists and is not shown may be the one: then it must be taken for alive.
    return not fields or (int(fields[19]) == started and fields[0] not in (b"Z", b"X"))


def _owner(pid: int) -> int | None:
    with suppress(OSError):
        return (_PROC / str(pid)).stat().st_uid
    return None


def _name_of(pid: int) -> str:
    with suppress(OSError):
        return (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
    return "ended"


def _ancestors() -> set[int]:
    """This process, its parent, and so on."""
    found, pid = set(), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = int((_stat(pid) or [b"", b"0"])[1])
    return found


@contextmanager
def _held(pid: int) -> Iterator[tuple[int, int | None]]:
    """The process id and a pidfd of it. While the pidfd is open, a signal to it reaches no other process."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        yield pid, None
        return
    try:
        yield pid, fd
    finally:
        os.close(fd)


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
