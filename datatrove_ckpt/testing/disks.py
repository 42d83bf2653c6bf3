"""Disks that crash or lose power: subclasses of ``files.Disk`` that stand in for it during a test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.layout import CACHE
from datatrove_ckpt.mirror import object_store

EFFECTS = (
    "make_dir",
    "create",
    "write",
    "sync",
    "rename",
    "link",
    "truncate",
    "remove",
    "remove_dir",
    "remove_tree",
    "commit",
)
"""The names of the effects on disk: methods of ``files.Disk``."""
REMOTE_EFFECTS = ("put", "put_file", "copy", "delete")
"""The names of the effects on a remote: methods of ``object_store.Effects``."""

Arguments: TypeAlias = tuple[Any, ...]
"""The arguments of an effect. ``Any``, because each effect has its own and all go through one method here."""


class SimulatedCrash(BaseException):
    """The process is dead. A BaseException, so that no ``except Exception`` survives it."""


class WatchedDisk(files.Disk):
    """A disk whose effects happen one at a time, with a call of ``before`` and ``after`` for each."""

    def __init__(self) -> None:
        super().__init__()
        self.happened: list[str] = []
        self._lock = self._appending  # a thread that appends holds it when its write comes here

    def before(self, name: str, args: Arguments, label: str) -> None:
        """Called before an effect, which does not happen if this raises."""

    def after(self, name: str, args: Arguments) -> None:
        """Called after an effect."""

    def happen(self, name: str, args: Arguments, path: Path | str, effect: Callable[[], int | None]) -> int | None:
        """Does an effect on the disk or on a remote: all of them have one order."""
        with self._lock:
            label = f"{name} {Path(path).name}"
            self.before(name, args, label)
            result = effect()
            self.happened.append(label)
            self.after(name, args)
            return result


class WatchedRemote(object_store.Effects):
    """A remote whose effects happen in one order with those of a disk, and crash with it."""

    def __init__(self, disk: WatchedDisk) -> None:
        self.disk = disk


def path_of(args: Arguments) -> Path:
    """Returns the path that an effect changes: its last path, which for a rename is the target."""
    return next(argument for argument in reversed(args) if isinstance(argument, Path))


def _on_disk(name: str) -> Callable[..., int | None]:
    return lambda self, *args: self.happen(name, args, path_of(args), lambda: getattr(files.Disk, name)(self, *args))


def _on_remote(name: str) -> Callable[..., None]:
    do = getattr(object_store.Effects, name)
    return lambda self, *args: self.disk.happen(name, args, args[1], lambda: do(self, *args))


for _name in EFFECTS:
    setattr(WatchedDisk, _name, _on_disk(_name))
for _name in REMOTE_EFFECTS:
    setattr(WatchedRemote, _name, _on_remote(_name))


class CrashingDisk(WatchedDisk):
    """A disk on which ``crash_at`` effects happen. The next effect crashes, and from then on every effect raises.

    A copy of the folder as it was at the crash is kept beside it. So what a crashed attempt still does while it ends
    (SQLite cleans up when it is closed) never helps the next attempt.

    Args:
        crash_at: number of effects that happen.
        folder: the folder to copy at the crash.
        torn: the crash comes in the middle of the effect, if that is a write, or a put to a remote.
        counted: names of the effects that count, and at which the disk may crash.
    """

    def __init__(
        self, crash_at: int, folder: Path, torn: bool = False, counted: tuple[str, ...] = (*EFFECTS, *REMOTE_EFFECTS)
    ) -> None:
        super().__init__()
        self._counted = counted
        self._count = 0
        self.crashed_at: str | None = None
        self.snapshot = folder.with_name(folder.name + ".at-crash")
        self._crash_at = crash_at
        self._folder = folder
        self._torn = torn

    def before(self, name: str, args: Arguments, label: str) -> None:
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
        """Puts each folder that the crash may leave behind in place, one after the other, and yields its name."""
        copy_tree(self.snapshot, self._folder)
        yield "killed"


def copy_tree(source: Path, target: Path) -> None:
    """Replaces ``target`` with a copy of ``source``."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


class _File:
    """A file's content, and the part of it that survives power loss."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable
        self.content = durable


Names = dict[Path, "_File | None"]
"""Files by path; None stands for a folder."""


class PowerLossDisk(CrashingDisk):
    """A disk that loses power: data that was not synced may be lost, all or in part.

    The survivors are every combination of *contents* (of each file: only what was synced; all; synced and half of the
    rest; all, but the last block is zeros; and, so that files disagree, alternate files all or nothing) and *names*
    (of each folder: as at its last sync; as now). Everything counts as synced when the disk is made. SQLite does not
    write through this class, so its files are read whenever another effect happens, and count as synced when their
    log is.
    """

    BLOCK = 64  # bytes; smaller than a real one, as everything in tests is

    def __init__(self, crash_at: int, folder: Path, torn: bool = False, counted: tuple[str, ...] = EFFECTS) -> None:
        super().__init__(crash_at, folder, torn, counted)
        found = folder.rglob("*")
        self._now: Names = {path: None if path.is_dir() else _File(path.read_bytes()) for path in found}
        self._durable = dict(self._now)

    def before(self, name: str, args: Arguments, label: str) -> None:
        if self.crashed_at is None and (name == "rename" or len(self.happened) == self._crash_at):
            self._look()
        super().before(name, args, label)

    def after(self, name: str, args: Arguments) -> None:
        if name == "sync":
            self._look()
            self._synced(path_of(args))
        elif name == "rename":
            self._now[path_of(args)] = self._now.pop(args[0])
        elif name == "link":
            self._look()
            self._now[path_of(args)] = self._now[args[0]]

    def _look(self) -> None:
        """Records what is on the real disk now."""
        found = set(self._folder.rglob("*"))
        for path in self._now.keys() - found:
            del self._now[path]
        for path in found:
            if path.is_dir():
                self._now[path] = None
                continue
            file = self._now.get(path) or _File()
            file.content = path.read_bytes()
            self._now[path] = file

    def _synced(self, path: Path) -> None:
        if path.is_dir():
            for known in [known for known in self._durable if known.parent == path]:
                del self._durable[known]
            self._durable.update({known: file for known, file in self._now.items() if known.parent == path})
            return
        # SQLite syncs its database before it relies on it, and what it wrote there is at least as old as its log.
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
            # A folder whose name is lost takes its content with it.
            if not path.parent.is_dir():
                continue
            file = names[path]
            if file is None:
                path.mkdir()
            else:
                path.write_bytes(self._survives(path, file, content, index))

    def _survives(self, path: Path, file: _File, content: str, index: int) -> bytes:
        # SQLite syncs its log before it writes to the database, and the database before it restarts the log. So the
        # database survives as it is now. If it changed since our last sync, SQLite has synced the log.
        database = self._now.get(path.with_name(path.name.removesuffix("-wal")))
        if path.name == CACHE or (
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


@contextmanager
def disk_in_place(disk: files.Disk) -> Iterator[None]:
    """Makes all rooms write to ``disk`` inside the block. A simulated crash ends the block and is swallowed."""
    before, files.disk = files.disk, disk
    effects = object_store.effects
    if isinstance(disk, CrashingDisk):
        object_store.effects = WatchedRemote(disk)
    try:
        with suppress(SimulatedCrash):
            yield
    finally:
        files.disk, object_store.effects = before, effects
        disk.close()


@contextmanager
def crash_at(number: int, folder: Path, torn: bool = False) -> Iterator[CrashingDisk]:
    """Lets ``number`` effects happen and crashes at the next. Swallows the crash; leaves ``folder`` as it was then.

    The disk's ``crashed_at`` is None if the block ended before that effect.
    """
    disk = CrashingDisk(number, folder, torn)
    with disk_in_place(disk):
        yield disk
    if disk.crashed_at is not None:
        next(disk.survivors())
