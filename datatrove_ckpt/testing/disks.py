"""Disks that crash, lose power, or refuse: subclasses of ``files.Disk`` that stand in for it during a test."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.mirror import object_store

EFFECTS = (
    "make_dir",
    "create",
    "write",
    "sync",
    "rename",
    "truncate",
    "remove",
    "remove_dir",
    "remove_tree",
    "commit",
)
"""The names of the effects: methods of ``files.Disk``."""
REMOTE_EFFECTS = ("put", "copy", "delete")
"""Those on a remote: methods of ``object_store.Effects``."""


class SimulatedCrash(BaseException):
    """The process is dead. A BaseException, so that no ``except Exception`` survives it."""


class WatchedDisk(files.Disk):
    """A disk whose effects happen one at a time, each told to ``before`` and ``after``."""

    def __init__(self) -> None:
        super().__init__()
        self.happened: list[str] = []
        self._lock = threading.RLock()

    def before(self, name: str, args: tuple[Any, ...], label: str) -> None:
        """May raise instead of letting the effect happen."""

    def after(self, name: str, args: tuple[Any, ...]) -> None:
        """The effect has happened."""

    def _effect(self, name: str, *args: Any) -> Any:
        with self._lock:
            label = f"{name} {_path(args).name}"
            self.before(name, args, label)
            result = getattr(files.Disk, name)(self, *args)
            self.happened.append(label)
            self.after(name, args)
            return result

    def remote_effect(self, name: str, fs: Any, *args: Any) -> None:
        """An effect on a remote, in one order with the disk's."""
        with self._lock:
            label = f"{name} {args[0].rpartition('/')[2]}"
            self.before(name, (fs, *args), label)
            getattr(object_store.Effects, name)(object_store.effects, fs, *args)
            self.happened.append(label)


class WatchedRemote(object_store.Effects):
    """Its effects happen in one order with those of a disk, and crash with it."""

    def __init__(self, disk: WatchedDisk) -> None:
        self._disk = disk

    def put(self, fs: Any, path: str, data: bytes) -> None:
        self._disk.remote_effect("put", fs, path, data)

    def copy(self, fs: Any, source: str, target: str) -> None:
        self._disk.remote_effect("copy", fs, source, target)

    def delete(self, fs: Any, path: str) -> None:
        self._disk.remote_effect("delete", fs, path)


def _path(args: tuple[Any, ...]) -> Path:
    """What an effect is about: its last path, which for a rename is the target."""
    return next(argument for argument in reversed(args) if isinstance(argument, Path))


def _watched(name: str) -> Callable[..., Any]:
    def effect(self: WatchedDisk, *args: Any) -> Any:
        return self._effect(name, *args)

    return effect


for _name in EFFECTS:
    setattr(WatchedDisk, _name, _watched(_name))


class CrashingDisk(WatchedDisk):
    """Lets ``crash_at`` effects happen, and crashes at the next one: from there on, every effect raises.

    The folder as it was at that moment is kept beside it, so that what a dying life still does on its way out (SQLite
    tidies up when it is closed) never helps the next one.

    Args:
        crash_at: number of effects that happen.
        folder: what is kept as it was at the crash.
        torn: the crash comes in the middle of the effect, if that is a write, or a put to a remote.
        counted: the effects that are counted, and crashed at.
    """

    def __init__(
        self,
        crash_at: int,
        folder: Path,
        torn: bool = False,
        counted: tuple[str, ...] = (*EFFECTS, *REMOTE_EFFECTS),
    ) -> None:
        super().__init__()
        self._counted = counted
        self._count = 0
        self.crashed_at: str | None = None
        self.snapshot = folder.with_name(folder.name + ".at-crash")
        self._crash_at = crash_at
        self._folder = folder
        self._torn = torn

    def before(self, name: str, args: tuple[Any, ...], label: str) -> None:
        if self.crashed_at is not None:
            raise SimulatedCrash(self.crashed_at)
        self._count += name in self._counted
        if self._count <= self._crash_at or name not in self._counted:
            return
        if name == "write" and self._torn:
            files.Disk.write(self, args[0], memoryview(args[1])[: len(args[1]) // 2], args[2])
        if name == "put" and self._torn:
            object_store.Effects().put(args[0], args[1], args[2][: len(args[2]) // 2])
        self.crashed_at = label
        copy_tree(self._folder, self.snapshot)
        raise SimulatedCrash(label)

    def survivors(self) -> Iterator[str]:
        """Puts each folder that a crash may leave behind in place, one after the other; gives their names."""
        copy_tree(self.snapshot, self._folder)
        yield "killed"


def copy_tree(source: Path, target: Path) -> None:
    """``target`` becomes a copy of ``source``."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


class _File:
    """A file's content, and what of it survives power loss."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable
        self.content = durable


Names = dict[Path, "_File | None"]
"""What lies where; None is a folder."""


class PowerLossDisk(CrashingDisk):
    """A disk that loses power: what was not synced may be gone, wholly or in part.

    Survivors are every combination of *contents* (of each file: only what was synced; all; synced and half of the
    rest; all, but the last block is zeros; and, so that files disagree, every other file all or nothing) and *names*
    (of each folder: as at its last sync; as now). Everything was synced when the disk was made. SQLite writes past
    this class, so its files are looked at whenever something else happens, and synced when their log is.
    """

    BLOCK = 64  # bytes; smaller than a real one, as everything in tests is

    def __init__(self, crash_at: int, folder: Path, torn: bool = False, counted: tuple[str, ...] = EFFECTS) -> None:
        super().__init__(crash_at, folder, torn, counted)
        self._now: Names = {}
        self._durable: Names = {}
        for path in folder.rglob("*"):
            self._now[path] = None if path.is_dir() else _File(path.read_bytes())
        self._durable.update(self._now)

    def before(self, name: str, args: tuple[Any, ...], label: str) -> None:
        if self.crashed_at is None and (name == "rename" or len(self.happened) == self._crash_at):
            self._look()
        super().before(name, args, label)

    def after(self, name: str, args: tuple[Any, ...]) -> None:
        path = _path(args)
        if name == "sync":
            self._look()
            self._synced(path)
        elif name == "rename":
            self._now[path] = self._now.pop(args[0])

    def _look(self) -> None:
        """Takes up what lies on the real disk now."""
        found = set(self._folder.rglob("*"))
        for path in self._now.keys() - found:
            del self._now[path]
        for path in found:
            if path.is_dir():
                self._now[path] = None
                continue
            known = self._now.get(path)
            file = known if known is not None else _File()
            file.content = path.read_bytes()
            self._now[path] = file

    def _synced(self, path: Path) -> None:
        if path.is_dir():
            for known in [known for known in self._durable if known.parent == path]:
                del self._durable[known]
            self._durable.update({known: file for known, file in self._now.items() if known.parent == path})
            return
        # SQLite syncs its database itself before it relies on it; what it wrote is at least as old as its log.
        also = path.with_name(path.name.removesuffix("-wal"))
        for synced in {path, also}:
            if (file := self._now.get(synced)) is not None:
                file.durable = file.content

    def survivors(self) -> Iterator[str]:
        for names, name in ((self._durable, "old names"), (self._now, "new names")):
            for content in ("synced", "all", "half", "torn", "odd", "even"):
                self._put(names, content)
                yield f"{content} content, {name}"

    def _put(self, names: Names, content: str) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        for index, path in enumerate(sorted(names)):
            # A folder whose own name is lost takes with it what lies in it.
            if not path.parent.is_dir():
                continue
            file = names[path]
            if file is None:
                path.mkdir()
            else:
                path.write_bytes(self._survives(path, file, content, index))

    def _survives(self, path: Path, file: _File, content: str, index: int) -> bytes:
        # SQLite syncs its log before it writes to its database, and that before it starts the log anew. So the
        # database is as it is now; and where it changed since our last sync, its log was synced by SQLite.
        database = self._now.get(path.with_name(path.name.removesuffix("-wal")))
        if path.suffix == ".sqlite3" or (
            path.name.endswith("-wal") and database is not None and database.content != database.durable
        ):
            return file.content
        if content == "synced" or (content in ("odd", "even") and index % 2 == (content == "even")):
            return file.durable
        grown = file.content.startswith(file.durable) and len(file.content) > len(file.durable)
        if content == "half" and grown:
            return file.content[: (len(file.durable) + len(file.content) + 1) // 2]
        if content == "torn" and grown:
            kept = max(len(file.durable), len(file.content) - self.BLOCK)
            return file.content[:kept] + bytes(len(file.content) - kept)
        return file.content


class FailingDisk(WatchedDisk):
    """A disk that refuses the effect number ``fail_at`` (from 0), and, if ``for_ever``, every one after it.

    Args:
        code: an ``errno``: ENOSPC, EIO, EROFS, ...
    """

    def __init__(self, fail_at: int, code: int = errno.ENOSPC, for_ever: bool = False) -> None:
        super().__init__()
        self.failed_at: str | None = None
        self.refused: list[Path] = []
        self._fail_at = fail_at
        self._code = code
        self._for_ever = for_ever
        self._asked = 0

    def before(self, name: str, args: tuple[Any, ...], label: str) -> None:
        due = self._asked >= self._fail_at if self._for_ever else self._asked == self._fail_at
        self._asked += 1
        if due and name != "remove_dir":  # which is tidying, and may fail
            self.failed_at = self.failed_at or label
            self.refused.append(_path(args))
            with files.explained(name, _path(args)):
                raise OSError(self._code, os.strerror(self._code))


@contextmanager
def disk_in_place(disk: files.Disk) -> Iterator[None]:
    """Everybody writes to ``disk`` meanwhile. A simulated crash ends the block, and is swallowed."""
    before, files.disk = files.disk, disk
    effects = object_store.effects
    if isinstance(disk, CrashingDisk):
        object_store.effects = WatchedRemote(disk)
    try:
        yield
    except SimulatedCrash:
        pass
    finally:
        files.disk, object_store.effects = before, effects
        disk.close()


@contextmanager
def crash_at(number: int, folder: Path, torn: bool = False) -> Iterator[CrashingDisk]:
    """Lets ``number`` effects happen, and crashes at the next; swallows the crash, and leaves ``folder`` as it was.

    ``crashed_at`` of what it gives is None if the code ended before there were that many effects.
    """
    disk = CrashingDisk(number, folder, torn)
    with disk_in_place(disk):
        yield disk
    if disk.crashed_at is not None:
        next(disk.survivors())
