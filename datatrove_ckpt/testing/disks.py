"""Disks that crash: subclasses of ``files.Disk`` that stand in for it during a test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
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

Arguments = tuple[Any, ...]
"""The arguments of an effect.

``Any``, because each effect has its own and all go through one method here.
"""


class SimulatedCrash(BaseException):
    """The process is dead. A BaseException, so that no ``except Exception`` survives it."""


class WatchedDisk(files.Disk):
    def __init__(self) -> None:
        super().__init__()
        self.happened: list[str] = []
        self._lock = self._appending  # held by a thread that appends when its write comes here

    def before(self, name: str, args: Arguments, label: str) -> None:
        """Raises to prevent the effect."""

    def after(self, name: str, args: Arguments) -> None:
        """Called after an effect."""

    def happen(
        self, name: str, args: Arguments, path: Path | str, effect: Callable[[], int | None]
    ) -> int | None:
        """Does an effect on the disk or on a remote, in one order."""
        with self._lock:
            label = f"{name} {Path(path).name}"
            self.before(name, args, label)
            result = effect()
            self.happened.append(label)
            self.after(name, args)
            return result


class WatchedRemote(object_store.Effects):
    """A remote whose effects have one order with those of a disk, and crash with it."""

    def __init__(self, disk: WatchedDisk) -> None:
        self.disk = disk


def path_of(args: Arguments) -> Path:
    """Returns the path that an effect changes: its last path, which for a rename is the target."""
    return next(argument for argument in reversed(args) if isinstance(argument, Path))


def _on_disk(name: str) -> Callable[..., int | None]:
    return lambda self, *args: self.happen(
        name, args, path_of(args), partial(getattr(files.Disk, name), self, *args)
    )


def _on_remote(name: str) -> Callable[..., None]:
    effect = getattr(object_store.Effects, name)
    return lambda self, *args: self.disk.happen(name, args, args[1], partial(effect, self, *args))


for _name in EFFECTS:
    setattr(WatchedDisk, _name, _on_disk(_name))
for _name in REMOTE_EFFECTS:
    setattr(WatchedRemote, _name, _on_remote(_name))


class CrashingDisk(WatchedDisk):
    """A disk on which ``crash_at`` effects happen. The next effect crashes, and from then on every
    effect raises.

    A copy of the folder as it was at the crash is kept beside it: what a crashed attempt still does
    while it ends never helps the next attempt.

    Args:
        crash_at: number of effects that happen.
        folder: the folder to copy at the crash.
        torn: a write, or a put to a remote, crashes in the middle.
        counted: names of the effects that count, and at which the disk may crash.
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
        """Puts each folder that the crash may leave behind in place, one after the other, and
        yields its name.
        """
        copy_tree(self.snapshot, self._folder)
        yield "killed"


def copy_tree(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


@contextmanager
def disk_in_place(disk: files.Disk) -> Iterator[None]:
    """Makes all rooms write to ``disk`` inside the block.

    A simulated crash ends the block and is swallowed.
    """
    before = files.disk
    files.disk = disk
    effects = object_store.effects
    if isinstance(disk, CrashingDisk):
        object_store.effects = WatchedRemote(disk)
    try:
        with suppress(SimulatedCrash):
            yield
    finally:
        files.disk = before
        object_store.effects = effects
        disk.close()


@contextmanager
def crash_at(number: int, folder: Path, torn: bool = False) -> Iterator[CrashingDisk]:
    """Lets ``number`` effects happen and crashes at the next. Swallows the crash; leaves ``folder``
    as it was then.

    The disk's ``crashed_at`` is None if the block ended before that effect.
    """
    disk = CrashingDisk(number, folder, torn)
    with disk_in_place(disk):
        yield disk
    if disk.crashed_at is not None:
        next(disk.survivors())
