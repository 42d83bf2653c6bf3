"""Changes the disk: all writes to a checkpoint or a staged output go through ``Disk``.

Each method of ``Disk`` that changes the disk is one *effect*: it happened or it did not, except
``write``, which a crash may cut to a prefix. ``tests/crashes.py`` replaces ``files.disk`` to crash
before or within any effect.

Errors of the operating system and of SQLite become ``StorageFailed``, which names the file.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import sqlite3
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from datatrove_ckpt.checkpoint.checksummed_lines import content_of, explained, size_of
from datatrove_ckpt.errors import StorageFailed

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# A chunk that waits for a slow document keeps its journal open, so open journals may be as many as
# documents in progress. 64 is far below every default limit on open files.
MAX_OPEN_FILES = 64

# Prompts, documents and answers are readable by their owner only; a later ``chmod`` stays. The
# output, ``last_chunk`` and parent folders follow the user's umask.
PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
PUBLIC_FILE = 0o666
PUBLIC_FOLDER = 0o777

# Errors of file systems without hard links, or with a limit on them.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
# Errors of file systems that sync no folder, such as CIFS and sshfs. Their server writes names.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS})


def free_name(path: Path, ending: str) -> Path:
    names = (path.with_name(f"{path.name}{ending}{number}") for number in count(1))
    return next(name for name in names if not name.exists())


class Disk:
    """Performs the effects. Paths are absolute.

    Nothing is buffered, so an effect that has returned survives kill -9.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._appending = threading.RLock()

    # effects -------------------------------------------------------------------------------------

    def make_dir(self, path: Path, mode: int = PRIVATE_FOLDER) -> None:
        with explained("make the folder", path):
            path.mkdir(mode, exist_ok=True)

    def create(self, path: Path, mode: int = PRIVATE_FILE) -> int:
        """Makes an empty file and returns its descriptor. An old file keeps its mode."""
        with explained("create", path):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)

    def write(self, fd: int, data: bytes | memoryview, path: Path) -> None:
        with explained("write to", path):
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]

    def sync(self, path: Path) -> None:
        with explained("sync", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def sync_dir(self, path: Path) -> None:
        """Makes names that were created, renamed or removed in the folder survive power loss, where
        the file system can.
        """
        try:
            self.sync(path)
        except StorageFailed as error:
            if getattr(error.__cause__, "errno", None) not in _NO_FOLDER_SYNC:
                raise

    def rename(self, source: Path, target: Path) -> None:
        """Renames atomically, over any old ``target``."""
        with explained(f"rename {source} to", target):
            source.replace(target)

    def link(self, source: Path, target: Path) -> bool:
        with explained(f"link {source} to", target):
            try:
                os.link(source, target)
            except FileExistsError:
                return False
        return True

    def truncate(self, path: Path, size: int) -> None:
        with explained("cut", path):
            os.truncate(path, size)

    def remove(self, path: Path) -> None:
        self.forget(path)
        with explained("remove", path):
            path.unlink(missing_ok=True)

    def remove_dir(self, path: Path) -> None:
        with suppress(OSError):
            path.rmdir()

    def remove_tree(self, path: Path) -> None:
        if path.exists():
            with explained("remove", path):
                shutil.rmtree(path)

    def commit(self, connection: sqlite3.Connection, path: Path) -> None:
        with explained("commit to", path):
            connection.commit()

    # made of effects -----------------------------------------------------------------------------

    def append(self, path: Path, data: bytes) -> int:
        """Appends ``data``, makes a missing file, and returns the offset of ``data``.

        The offset is read from the file: without locks, a fenced process may have appended since.
        """
        # Ranks in threads of one process share the descriptors: none may be closed during a write.
        with self._appending:
            fd = self._descriptor(path)
            self.write(fd, data, path)
            return os.lseek(fd, 0, os.SEEK_CUR) - len(data)

    def make_dirs(self, path: Path, mode: int = PUBLIC_FOLDER) -> None:
        for tries_left in reversed(range(100)):
            if path.is_dir():
                return
            self.make_dirs(path.parent)
            try:
                self.make_dir(path, mode)
                self.sync_dir(path.parent)
            except StorageFailed as error:
                # Ranks share parents, and a rank that ends removes an empty parent.
                vanished = isinstance(error.__cause__, FileNotFoundError)
                vanished |= isinstance(error.__cause__, FileExistsError) and (
                    path.is_dir() or not path.exists()
                )
                if not vanished or not tries_left:
                    raise
            else:
                return

    def detach(self, path: Path) -> None:
        """Replaces the file with a copy, so that a process with the old file open writes to no file
        of the rank.
        """
        data = content_of(path)
        if data is not None:
            self.replace(path, data)

    def write_new(
        self,
        path: Path,
        blocks: Iterable[bytes],
        mode: int = PRIVATE_FILE,
        like: Path | None = None,
    ) -> None:
        """Writes a new file, and syncs it. If the file ``like`` exists, its mode is used."""
        fd = self.create(path, mode)
        try:
            if like is not None:
                with suppress(OSError):
                    os.fchmod(fd, stat.S_IMODE(like.stat().st_mode))
            for block in blocks:
                self.write(fd, block, path)
        finally:
            os.close(fd)
        self.sync(path)

    def replace(self, path: Path, data: bytes | Iterable[bytes], mode: int = PRIVATE_FILE) -> None:
        """Replaces the file's content. A crash leaves the old content or the new, never a mixture.

        Args:
            mode: mode of a new file. A file that is replaced keeps its mode.
        """
        new = path.with_name(path.name + ".new")
        self.write_new(new, [data] if isinstance(data, bytes) else data, mode, like=path)
        self.rename(new, path)
        self.sync_dir(path.parent)

    def put_new(self, source: Path, target: Path) -> bool:
        """Gives a file its final name and returns True, unless the final name exists. The old name
        may stay.

        Without hard links, two processes may both succeed at the same moment.
        """
        try:
            return self.link(source, target)
        except StorageFailed as error:
            if getattr(error.__cause__, "errno", None) not in _NO_LINKS:
                raise
        if target.exists():
            return False
        self.rename(source, target)
        return True

    # bookkeeping ---------------------------------------------------------------------------------

    def _descriptor(self, path: Path) -> int:
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
            return fd
        if len(self._open) >= MAX_OPEN_FILES:
            _, oldest = self._open.popitem(last=False)
            os.close(oldest)
        with explained("open", path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE_FILE)
        self._open[path] = fd
        return fd

    def forget(self, path: Path) -> None:
        with self._appending:
            fd = self._open.pop(path, None)
            if fd is not None:
                os.close(fd)

    def close(self, below: Path = Path("/")) -> None:
        with self._appending:
            for path in list(self._open):
                if path.is_relative_to(below):
                    self.forget(path)


disk = Disk()
"""The disk that all rooms write to.

Always accessed as ``files.disk``, so that a test can replace it.
"""


def keep_first(path: Path, data: bytes, mode: int = PUBLIC_FILE) -> None:
    disk.make_dirs(path.parent)
    # Processes of two nodes may share a process id.
    staged = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    disk.write_new(staged, [data], mode)
    try:
        disk.put_new(staged, path)
    finally:
        disk.remove(staged)


class AppendFile:
    """A file that only grows, and knows whether all of it survives power loss.

    Args:
        whole: bytes before a torn line, which is cut off; None: no line is torn.
    """

    def __init__(self, path: Path, whole: int | None = None) -> None:
        self.path = path
        self.size = size_of(path)
        if whole is not None and self.size > whole:
            disk.truncate(path, whole)
            self.size = whole
        # Content and name from an earlier process may be in the page cache only: they survive kill
        # -9, not power loss.
        self._unsynced_name = True
        self.is_unsynced = self.size > 0

    def append(self, data: bytes) -> int:
        self.is_unsynced = True
        offset = disk.append(self.path, data)
        self.size = offset + len(data)
        return offset

    def sync(self) -> None:
        if not self.is_unsynced:
            return
        disk.sync(self.path)
        if self._unsynced_name:
            disk.sync_dir(self.path.parent)
            self._unsynced_name = False
        self.is_unsynced = False


class HashedFile(io.RawIOBase):
    """A new output file, written once from start to end, with its size and xxh128.

    The writer sets ``rows`` if it counts them. The file's mode follows the user's umask; until the
    file is published, its folder is private.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.rows = 0
        self._hash = xxhash.xxh3_128()
        self._fd = disk.create(path, PUBLIC_FILE)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data).cast("B")
        disk.write(self._fd, view, self.path)
        self._hash.update(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
