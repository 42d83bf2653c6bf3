"""Records the servers on this node, and ends the servers that a killed run has left behind.

If a runner and its guardian are killed together, their server's record remains. The next start on
the node then kills the processes of the guardian's session whose output is the recorded log.

Process ids are reused, so a process is identified by id and start time. Each host or container has
its own records in a shared folder. Without /proc (macOS) nothing is recorded or killed.
"""

import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from loguru import logger

from datatrove_ckpt.common.pid_namespace import pid_namespace_id
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.inference.servers.guardian import (
    KILL_TIMEOUT,
    Process,
    kill_processes,
    process_table,
)


@dataclass(frozen=True)
class ServerRecord:
    """One server of one runner. Processes are pairs of a process id and a start time (clock ticks
    since the boot).

    Attributes:
        guardian: guardian process; its id is also the number of the server's session.
        log: device and inode of the server's log.
    """

    name: str
    runner: tuple[int, int]
    guardian: tuple[int, int]
    log: tuple[int, int]

    @classmethod
    def create(cls, name: str, guardian: int, log: int) -> None:
        """Records a server that this process has launched. ``log`` is a file descriptor.

        Records nothing without /proc or a runtime folder; the server starts anyway.
        """
        pid = os.getpid()
        started = {process.pid: process.started for process in process_table()}
        if not started.keys() >= {guardian, pid}:
            return
        status = os.fstat(log)
        log_file = (status.st_dev, status.st_ino)
        record = cls(name, (pid, started[pid]), (guardian, started[guardian]), log_file)
        try:
            (_folder() / f"{guardian}.json").write_text(json.dumps(asdict(record)))
        except (OSError, ConfigError) as error:
            logger.warning(
                f"If this process and the guardian are killed together, {name} will not end: "
                f"{error}"
            )

    @classmethod
    def read(cls, path: Path) -> Self | None:
        try:
            record = json.loads(path.read_bytes())
            for key in ("runner", "guardian", "log"):
                record[key] = tuple(record[key])
            return cls(**record)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def owns(self, process: Process) -> bool:
        """Returns whether a process provably belongs to this server."""
        if process.session != self.guardian[0]:
            return False
        for number in (1, 2):
            with suppress(OSError):
                status = Path(f"/proc/{process.pid}/fd/{number}").stat()
                if (status.st_dev, status.st_ino) == self.log:
                    return True
        return False


def kill_session(session: int, name: str) -> None:
    """Kills the remaining session of a guardian that was killed.

    The kernel does not reuse the number of a session that has processes.
    """
    _kill_all(lambda process: process.session == session and process.pid != os.getpid(), name)


def _kill_all(is_target: Callable[[Process], bool], name: str) -> list[str]:
    killed = {}
    deadline = time.monotonic() + KILL_TIMEOUT
    while targets := [
        process for process in process_table() if not process.zombie and is_target(process)
    ]:
        for process in targets:
            killed[process.pid] = f"process {process.pid} ({process.name})"
        kill_processes(targets)
        if time.monotonic() > deadline:
            logger.warning(
                f"Some processes of {name} cannot be killed; they may still hold GPUs: "
                f"{', '.join(killed[process.pid] for process in targets)}"
            )
            break
    return list(killed.values())


def end_leftovers() -> None:
    try:
        paths = sorted(_folder().glob("*.json"))
    except (OSError, ConfigError) as error:
        logger.warning(f"Servers of killed runs on this node are not searched for: {error}")
        return
    for record in filter(None, map(ServerRecord.read, paths)):
        alive = {
            (process.pid, process.started) for process in process_table() if not process.zombie
        }
        if alive.isdisjoint({record.runner, record.guardian}):
            if killed := _kill_all(record.owns, record.name):
                logger.warning(
                    f"Ended what a killed run had left on this node: {', '.join(killed)} of the "
                    f"server of {record.name} (runner: process {record.runner[0]})."
                )
            remove_record(record.guardian[0])


def remove_record(guardian: int) -> None:
    with suppress(OSError, ConfigError):
        (_folder() / f"{guardian}.json").unlink(missing_ok=True)


def _folder() -> Path:
    # Containers and machines may share this folder, and a host name.
    folder = runtime_folder() / "servers" / (pid_namespace_id() or "unknown")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def runtime_folder(part: str = "") -> Path:
    """Returns a private folder of this user, one for each ``part``.

    Raises:
        ConfigError: the folder belongs to another user.
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
