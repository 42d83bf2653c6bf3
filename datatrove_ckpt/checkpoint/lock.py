"""Locks a rank's folder: one process per rank, on file systems that have locks."""

import fcntl
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint.checksummed_lines import Json, explained
from datatrove_ckpt.checkpoint.files import PRIVATE_FILE
from datatrove_ckpt.common.pid_namespace import pid_namespace_id
from datatrove_ckpt.errors import CheckpointLocked, StorageFailed
from datatrove_ckpt.process.open_files import close_descriptor, own_descriptor


def lock_holder(path: Path | str) -> Json | None:
    """Returns the holder of a lock, as ``this_process`` describes it; None without a holder or
    without locks.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Shared, so that two commands at the same time do not see each other.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _holder(os.pread(fd, 1000, 0))
    except OSError:
        return None
    finally:
        os.close(fd)


def _holder(data: bytes) -> Json:
    try:
        holder = orjson.loads(data)
    except orjson.JSONDecodeError:  # the process has the lock and is about to write its name
        holder = None
    if isinstance(holder, dict):
        return holder
    return {"host": "unknown", "pid": None}


def _held_by(holder: bytes, path: Path, locked: str) -> str:
    process = _holder(holder)
    if process == this_process():
        return (
            f"Another call of run or run_async in this process works on this {locked}: it holds "
            f"{path}. Wait for it, or cancel it, and call again."
        )
    return (
        f"Another process works on this {locked}: {name_holder(process)} holds {path}. Wait for "
        "it, or stop it, and run again."
    )


def name_holder(holder: dict[str, object]) -> str:
    return f"pid {holder.get('command', holder.get('pid'))} on {holder.get('host')}"


def this_process() -> dict[str, object]:
    """Returns host and pid, and where the pid is valid (``pid_namespace_id``); for a worker also
    the pid of the ``command`` that started it.
    """
    module = sys.modules.get("multiprocess")  # it takes long to import
    parent = module.parent_process() if module is not None else None
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "place": pid_namespace_id(),
        **({"command": parent.pid} if parent else {}),
    }


def check_sqlite_locks(path: Path) -> None:
    """Raises StorageFailed if the file system lacks the locks of SQLite, which calls the file
    locked then.
    """
    try:
        with path.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return
    except OSError as error:
        raise StorageFailed(
            f"{path} cannot be locked: {error.strerror}. Mount it with locks (NFS 4 has them, "
            "NFS 3 needs lockd), or choose a folder on another disk."
        ) from error


class Lock:
    """An exclusive lock on a rank's folder, held until ``release`` or the end of the process.

    ``works`` is False on a file system without locks; there the fence (``fence``) alone
    separates two processes.

    Args:
        locked: what the lock is on, as messages name it.
    """

    def __init__(self, path: Path, locked: str = "task") -> None:
        self.path = path
        self._locked = locked
        self.works = True
        self._fd = own_descriptor(self._acquire())
        holder = orjson.dumps(this_process())
        with suppress(OSError):  # on a full disk the lock has no name; its owner may free space
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, holder, 0)

    def _acquire(self) -> int:
        deadline = time.monotonic() + 10.0
        while True:
            with explained("open", self.path):
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_held = True
                with suppress(
                    OSError
                ):  # another process's ``lock_holder`` may hold the lock for an instant
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    is_held = False
                holder = os.pread(fd, 1000, 0)
                os.close(fd)
                if is_held or time.monotonic() > deadline:
                    raise CheckpointLocked(_held_by(holder, self.path, self._locked)) from None
                time.sleep(0.005)
                continue
            except OSError:
                self.works = False
            # A finished rank's holder removes the file, and a lock on a removed file excludes no
            # process.
            if self._is_current(fd):
                return fd
            os.close(fd)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.fstat(fd).st_ino == self.path.stat().st_ino
        except FileNotFoundError:
            return False

    def release(self, remove: bool = False) -> None:
        if remove and self._is_current(self._fd):
            with suppress(OSError):
                self.path.unlink()
        close_descriptor(self._fd)
        self._fd = -1
