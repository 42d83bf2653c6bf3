"""Where claims lie, and which of their owners are alive.

    a disk          claims/00007-000003, with the owner in it: a hard link gives the name once
                    claims/workers/OWNER: the owner is alive if it holds the lock of this file; or,
                    where locks do not work between machines, if the file changed shortly before our
                    own file
    object stores   claims/00007-000003-OWNER: two processes may write the same number, and look
                    again after a while
                    claims/workers/OWNER: the owner is alive if its object was written shortly
                    before our own object, unless it was a process of this boot and PID namespace,
                    and has ended

So times are compared only with each other, as the file server or the store has stamped them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import orjson
from fsspec.utils import get_protocol

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common.places import process_place
from datatrove_ckpt.common.retrying import STORAGE
from datatrove_ckpt.mirror.object_store import ObjectStore, is_in_repository, refuse_repository

_POLICY = replace(STORAGE, patience=20.0)  # claims are hints: nothing waits long for them
_OWNER = re.compile("[0-9a-f]{40}(-run)?")
_NAME = re.compile(r"(\d+)-(\d+)(?:-([0-9a-z-]+))?")
_BEATS = 5  # so many beats that did not come are a death
# Seconds until a listing has what was written before.
_SETTLES = 1.0
_HUB_SETTLES = 5.0
_WORKERS = "workers"
# Names of processes are hexadecimal, and sorted before.
FREE = "free"
GIVEN_UP = "given-up"
_RUN = "-run"  # the end of the name of an owner that runs all ranks
open_here: set[str] = set()


class Mark(NamedTuple):
    rank: int
    number: int
    owner: str


class Look(NamedTuple):
    """All marks of a store, and the owners that are alive, or whose last beat is old."""

    marks: list[Mark]
    alive: set[str]
    dead: set[str]

    def current(self) -> dict[int, Mark]:
        """Returns the mark of each rank that counts."""
        found: dict[int, Mark] = {}
        for mark in sorted(self.marks, key=lambda mark: (-mark.number, mark.owner)):
            found.setdefault(mark.rank, mark)
        return found


def may_hold_claims(folder: str) -> bool:
    return not is_in_repository(folder)


def refuse_for_claims(setting: str, folder: str) -> None:
    """Raises ConfigError if the folder is in a repository."""
    if not may_hold_claims(folder):
        refuse_repository(setting, folder, "each claim of a worker")


def open_store(url: str, owner: str, options: Mapping[str, object]) -> DiskClaims | ObjectClaims:
    protocol = get_protocol(url)
    if protocol in ("file", "local"):
        return DiskClaims(Path(url), owner)
    return ObjectClaims(url, owner, _HUB_SETTLES if protocol == "hf" else _SETTLES, options)


def open_reader(url: str) -> DiskReader | ObjectClaims:
    if get_protocol(url) in ("file", "local"):
        return DiskReader(Path(url))
    return ObjectClaims(url, "", _SETTLES)


class DiskReader:
    """See ``DiskClaims``, which writes, too."""

    beat_seconds = 30.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def look(self) -> Look:
        marks: list[Mark] = []
        for path in self._folder.glob("*-*"):
            name = _NAME.fullmatch(path.name)
            if name is not None:
                marks.append(Mark(int(name[1]), int(name[2]), self._owner_in(path)))
        workers = {
            path.name: path
            for path in (self._folder / _WORKERS).glob("*")
            if _OWNER.fullmatch(path.name)
        }
        alive = {name for name, path in workers.items() if self._is_alive(path)}
        return Look(marks, alive, workers.keys() - alive)

    def read(self, mark: Mark) -> bytes:
        return orjson.dumps(_parsed(self._path(mark))[1])

    def name(self, owner: str) -> str:
        """Returns process id and host of an owner."""
        try:
            return _named((self._folder / _WORKERS / owner).read_bytes())
        except FileNotFoundError:
            return _named(b"")

    def _path(self, mark: Mark) -> Path:
        return self._folder / f"{mark.rank:05d}-{mark.number:06d}"

    def _owner_in(self, path: Path) -> str:
        return str(_parsed(path)[0])

    def _is_alive(self, path: Path) -> bool:
        if files.lock_holder(path) is not None:
            return True
        now = self._now()
        if now is None:
            return True
        try:
            changed = path.stat().st_mtime
        except FileNotFoundError:
            return False
        return now - changed < _BEATS * self.beat_seconds and not self._has_ended(path.name)

    def _now(self) -> float | None:
        """Returns the time of the clock that stamps beats; None until the next beat."""
        return time.time()

    def _has_ended(self, owner: str) -> bool:
        return has_ended(owner)


class DiskClaims(DiskReader):
    """Stores marks and beats.

    Attributes:
        beat_seconds: an owner without a beat for five times as long is dead.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        super().__init__(folder)
        self._owner = owner
        files.disk.make_dirs(folder / _WORKERS)
        self._own = files.Lock(folder / _WORKERS / owner)

    def put(self, mark: Mark, content: bytes) -> bool:
        """Writes a mark. Returns False if another process has written a mark of this number
        first.
        """
        new = self._folder / f"{self._owner}.new"
        fd = files.disk.create(new)
        try:
            files.disk.write(fd, orjson.dumps([mark.owner, orjson.Fragment(content)]), new)
        finally:
            os.close(fd)
        path = self._path(mark)
        is_ours = files.disk.put_new(new, path) or self._owner_in(path) == mark.owner
        files.disk.remove(new)
        return is_ours

    def remove(self, mark: Mark) -> None:
        files.disk.remove(self._path(mark))

    def beat(self) -> None:
        if not self._own.path.exists():  # another process took it for dead
            removed = self._own
            self._own = files.Lock(removed.path)
            removed.release()
        os.utime(self._own.path)  # a file server sets the time of its own clock

    def forget(self, owner: str) -> None:
        """Removes the beat of an owner."""
        files.disk.remove(self._folder / _WORKERS / owner)

    def close(self) -> None:
        self._own.release(remove=True)

    def _is_alive(self, path: Path) -> bool:
        return path.name == self._owner or super()._is_alive(path)

    def _now(self) -> float | None:
        try:
            return self._own.path.stat().st_mtime
        except FileNotFoundError:  # another process took it for dead
            return None

    def _has_ended(self, owner: str) -> bool:
        """Whether the lock, which is not held, would be seen: locks hold within a kernel."""
        return self._own.works and owner[:8] == self._owner[:8]


def _parsed(path: Path) -> tuple[str, dict[str, object]]:
    """Returns owner and record. The rank of a file that is gone or damaged is free."""
    try:
        owner, record = orjson.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return FREE, {}
    return owner, record


def _named(process: bytes) -> str:
    try:
        return files.name_holder(orjson.loads(process))
    except (ValueError, AttributeError):
        # It has just begun or ended, or a power loss has cut the file.
        return "another process"


class ObjectClaims:
    """Stores marks and beats as ``DiskClaims`` does.

    Args:
        owner: names this process; empty: it only reads.
        settle_seconds: after this, a listing shows what every process had written before.
    """

    beat_seconds = 60.0

    def __init__(
        self,
        url: str,
        owner: str,
        settle_seconds: float,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self._store = ObjectStore(url, apart=True, options=options)
        self._owner = owner
        self._settle_seconds = settle_seconds
        if owner:
            self.beat()

    def look(self) -> Look:
        return _POLICY.run(self._look, "The claims of tasks cannot be listed")

    def put(self, mark: Mark, content: bytes) -> bool:
        _POLICY.run(
            lambda: self._store.put(_object_name(mark), content),
            "The claim of a task cannot be written",
        )
        if not is_process(mark.owner):
            return True
        time.sleep(self._settle_seconds)
        look = self.look()
        look.marks.append(mark)  # the listing may lag
        if look.current()[mark.rank] == mark:
            return True
        self.remove(mark)
        return False

    def read(self, mark: Mark) -> bytes:
        return self._store.read(_object_name(mark), 1 << 20) or b""

    def remove(self, mark: Mark) -> None:
        self._store.remove(_object_name(mark))

    def beat(self) -> None:
        self._store.put(f"{_WORKERS}/{self._owner}", orjson.dumps(files.this_process()))

    def name(self, owner: str) -> str:
        return _named(self._store.read(f"{_WORKERS}/{owner}", 1 << 20) or b"")

    def forget(self, owner: str) -> None:
        self._store.remove(f"{_WORKERS}/{owner}")

    def close(self) -> None:
        self.forget(self._owner)

    def _look(self) -> Look:
        written = self._store.times()
        beats = {
            owner: at
            for owner, at in self._store.times(_WORKERS).items()
            if _OWNER.fullmatch(owner)
        }
        names = [_NAME.fullmatch(name) for name in written]
        marks = [Mark(int(name[1]), int(name[2]), name[3]) for name in names if name is not None]
        owned = [mark for mark in marks if is_process(mark.owner)]
        signs = [*beats.items(), *((mark.owner, written[_object_name(mark)]) for mark in owned)]
        now = time.time()
        if self._owner:
            now = beats.get(self._owner, 0.0)
        dead_seconds = _BEATS * self.beat_seconds
        # Without times the difference is NaN, and every owner is alive.
        alive = {
            owner for owner, at in signs if not now - at >= dead_seconds and not has_ended(owner)
        }
        if self._owner:
            alive.add(self._owner)
        return Look(marks, alive, beats.keys() - alive)


def _object_name(mark: Mark) -> str:
    return f"{mark.rank:05d}-{mark.number:06d}-{mark.owner}"


# owners -------------------------------------------------------------------------------------------


def is_process(owner: str) -> bool:
    return not owner.startswith((FREE, GIVEN_UP))


def is_run(owner: str) -> bool:
    return owner.endswith(_RUN)


def new_owner(runs_all: bool = False) -> str:
    """Returns a name for this process: boot, PID namespace, process id, start, and random digits,
    eight hexadecimal digits each.

    Until 0.2.0 the first part was a hash of the host name, so no process takes such an owner for
    ended.
    """
    pid = os.getpid()
    # A random place is unlike every other one.
    place = process_place() or os.urandom(8).hex()
    return f"{place}{pid:08x}{_started(pid)}{os.urandom(4).hex()}{_RUN * runs_all}"


def has_ended(owner: str) -> bool:
    """Whether the owner has ended for sure. Other boots and PID namespaces show nothing."""
    if owner[:16] != process_place():
        return False
    pid = int(owner[16:24], 16)
    is_gone = owner[24:32] != _started(pid)
    return is_gone or (pid == os.getpid() and owner not in open_here)


def _started(pid: int) -> str:
    """Returns a process's start in clock ticks since boot, because its id may be reused.

    Zeros: no such process, or no ``/proc``.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "0" * 8
    ticks = int(text.rpartition(")")[2].split()[19])
    return f"{ticks & 0xFFFFFFFF:08x}"
