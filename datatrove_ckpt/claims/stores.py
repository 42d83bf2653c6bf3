"""Where claims lie: marks of ranks and beats of processes, on a disk or in an object store.

    a disk          claims/00007-000003, with the owner in it: a hard link gives the name once
                    claims/workers/OWNER: the owner is alive if it holds the lock of this file; or,
                    where locks do not work between machines, if the file changed shortly before our
                    own file
    object stores   claims/00007-000003-OWNER: two processes may write the same number, and look
                    again after a while
                    claims/workers/OWNER: the owner is alive if its object was written shortly
                    before our own object, unless it was a process of this boot and PID namespace,
                    and has ended

Times are compared only with each other, as the file server or the store has stamped them.
"""

from __future__ import annotations

import math
import os
import re
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import orjson
from fsspec.utils import get_protocol

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.lock import Lock, lock_holder, name_holder, this_process
from datatrove_ckpt.common import JsonObject, object_store
from datatrove_ckpt.common.pid_namespace import pid_namespace_id
from datatrove_ckpt.common.retrying import STORAGE

_RETRIES = replace(STORAGE, patience=20.0)  # claims are hints: nothing waits long for them
_OWNER = re.compile("[0-9a-f]{40}(-run|-looks)?")
_NAME = re.compile(r"(\d+)-(\d+)(?:-([0-9a-z-]+))?")
_BEATS = 5  # an owner that missed so many beats is dead
# After so long, a listing shows what was written before.
_SETTLE_SECONDS = 1.0
_HUB_SETTLE_SECONDS = 5.0
_WORKERS = "workers"
# Owners that are no processes, whose names are hexadecimal and sort before these.
FREE = "free"
GIVEN_UP = "given-up"
# Endings of the names of owners.
RUN = "-run"  # runs all ranks
LOOKS = "-looks"  # takes none, and waits for the others
open_here: set[str] = set()
"""The owners of this process that have not closed their claims."""


class Claim(NamedTuple):
    rank: int
    number: int
    owner: str


class ClaimsSnapshot(NamedTuple):
    """All marks of a store, and the owners that are alive, or whose last beat is old."""

    marks: list[Claim]
    alive: set[str]
    dead: set[str]

    def current(self) -> dict[int, Claim]:
        """Returns the mark of each rank that counts."""
        found: dict[int, Claim] = {}
        for mark in sorted(self.marks, key=lambda mark: (-mark.number, mark.owner)):
            found.setdefault(mark.rank, mark)
        return found


def refuse_for_claims(folder: str) -> None:
    """Raises ConfigError if ``logging_dir`` is in a repository."""
    if object_store.is_in_repository(folder):
        object_store.refuse_repository("logging_dir", folder, "each claim of a worker")


def open_store(
    url: str, owner: str = "", options: JsonObject | None = None
) -> DiskClaims | ObjectClaims:
    """Opens the claims at a URL. ``owner``: names this process; empty: it only reads."""
    protocol = get_protocol(url)
    if protocol in ("file", "local"):
        return DiskClaims(Path(url), owner)
    settle_seconds = _HUB_SETTLE_SECONDS if protocol == "hf" else _SETTLE_SECONDS
    return ObjectClaims(url, owner, settle_seconds, options)


class DiskClaims:
    """Stores marks and beats as files.

    Args:
        owner: names this process; empty: it only reads.

    Attributes:
        beat_seconds: an owner without a beat for five times as long is dead.
    """

    beat_seconds = 30.0

    def __init__(self, folder: Path, owner: str = "") -> None:
        self._folder = folder
        self._owner = owner
        if owner:
            files.disk.make_dirs(folder / _WORKERS)
            self._own = Lock(folder / _WORKERS / owner)

    def look(self) -> ClaimsSnapshot:
        names = [_NAME.fullmatch(path.name) for path in self._folder.glob("*-*")]
        marks = [
            Claim(int(name[1]), int(name[2]), str(_read_mark(self._folder / name[0])[0]))
            for name in names
            if name is not None
        ]
        workers = [
            path for path in (self._folder / _WORKERS).glob("*") if _OWNER.fullmatch(path.name)
        ]
        alive = {path.name for path in workers if self._is_alive(path)}
        return ClaimsSnapshot(marks, alive, {path.name for path in workers} - alive)

    def put(self, mark: Claim, content: JsonObject) -> bool:
        """Writes a mark. Returns False if another process has written a mark of this number
        first.
        """
        new = self._folder / f"{self._owner}.new"
        fd = files.disk.create(new)
        try:
            files.disk.write(fd, orjson.dumps([mark.owner, content]), new)
        finally:
            os.close(fd)
        path = self._path(mark)
        is_ours = files.disk.put_new(new, path) or _read_mark(path)[0] == mark.owner
        files.disk.remove(new)
        return is_ours

    def read(self, mark: Claim) -> JsonObject:
        return _read_mark(self._path(mark))[1]

    def remove(self, mark: Claim) -> None:
        files.disk.remove(self._path(mark))

    def beat(self) -> None:
        if not self._own.path.exists():  # another process took it for dead
            removed = self._own
            self._own = Lock(removed.path)
            removed.release()
        os.utime(self._own.path)  # a file server sets the time of its own clock

    def name(self, owner: str) -> str:
        """Returns process id and host of an owner."""
        content = b""
        with suppress(FileNotFoundError):
            content = (self._folder / _WORKERS / owner).read_bytes()
        return _name_process(content)

    def forget(self, owner: str) -> None:
        """Removes the beat of an owner."""
        files.disk.remove(self._folder / _WORKERS / owner)

    def close(self) -> None:
        self._own.release(remove=True)

    def _path(self, mark: Claim) -> Path:
        return self._folder / f"{mark.rank:05d}-{mark.number:06d}"

    def _is_alive(self, path: Path) -> bool:
        if path.name == self._owner or lock_holder(path) is not None:
            return True
        now = time.time()
        is_gone = has_ended(path.name)
        if self._owner:
            now = _changed(self._own.path)  # by the clock that stamps beats
            is_gone = self._own.works and path.name[:8] == self._owner[:8]  # locks hold in a kernel
        return now - _changed(path) < _BEATS * self.beat_seconds and not is_gone


def _changed(path: Path) -> float:
    """Returns when a beat came; before all times, if another process took its owner for dead."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return -math.inf


def _read_mark(path: Path) -> tuple[str, JsonObject]:
    """Returns owner and record. The rank of a file that is gone or damaged is free."""
    try:
        owner, record = orjson.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return FREE, {}
    return owner, record


def _name_process(process: bytes) -> str:
    try:
        return name_holder(orjson.loads(process))
    except (ValueError, AttributeError):
        # It has just begun or ended, or a power loss has cut the file.
        return "another process"


class ObjectClaims:
    """Stores marks and beats as objects.

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
        options: JsonObject | None = None,
    ) -> None:
        self._store = object_store.ObjectStore(url, apart=True, options=options)
        self._owner = owner
        self._settle_seconds = settle_seconds
        if owner:
            self.beat()

    def look(self) -> ClaimsSnapshot:
        return _RETRIES.run(self._look, "The claims of tasks cannot be listed")

    def put(self, mark: Claim, content: JsonObject) -> bool:
        _RETRIES.run(
            lambda: self._store.put(_object_name(mark), orjson.dumps(content)),
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

    def read(self, mark: Claim) -> JsonObject:
        found: JsonObject = orjson.loads(self._store.read(_object_name(mark), 1 << 20) or b"{}")
        return found

    def remove(self, mark: Claim) -> None:
        self._store.delete(_object_name(mark))

    def beat(self) -> None:
        self._store.put(f"{_WORKERS}/{self._owner}", orjson.dumps(this_process()))

    def name(self, owner: str) -> str:
        return _name_process(self._store.read(f"{_WORKERS}/{owner}", 1 << 20) or b"")

    def forget(self, owner: str) -> None:
        self._store.delete(f"{_WORKERS}/{owner}")

    def close(self) -> None:
        self.forget(self._owner)

    def _look(self) -> ClaimsSnapshot:
        written = self._store.names()
        beats = {
            owner: at
            for owner, at in self._store.names(_WORKERS).items()
            if _OWNER.fullmatch(owner)
        }
        names = [_NAME.fullmatch(name) for name in written]
        marks = [Claim(int(name[1]), int(name[2]), name[3]) for name in names if name is not None]
        owned = [mark for mark in marks if is_process(mark.owner)]
        signs = [*beats.items(), *((mark.owner, written[_object_name(mark)]) for mark in owned)]
        now = time.time()
        if self._owner:
            now = beats.get(self._owner, 0.0)
        dead_seconds = _BEATS * self.beat_seconds
        # Without times an age is NaN, and every owner is alive.
        alive = {
            owner
            for owner, at in signs
            if (math.isnan(now - at) or now - at < dead_seconds) and not has_ended(owner)
        }
        if self._owner:
            alive.add(self._owner)
        return ClaimsSnapshot(marks, alive, beats.keys() - alive)


def _object_name(mark: Claim) -> str:
    return f"{mark.rank:05d}-{mark.number:06d}-{mark.owner}"


# owners -------------------------------------------------------------------------------------------


def is_process(owner: str) -> bool:
    return not owner.startswith((FREE, GIVEN_UP))


def new_owner(end: str = "") -> str:
    """Returns a name for this process: boot, PID namespace, process id, start, and random digits,
    eight hexadecimal digits each.

    Until 0.2.0 the first part was a hash of the host name, so no process takes such an owner for
    ended.
    """
    pid = os.getpid()
    # A random place is unlike every other one.
    place = pid_namespace_id() or os.urandom(8).hex()
    return f"{place}{pid:08x}{_started(pid)}{os.urandom(4).hex()}{end}"


def has_ended(owner: str) -> bool:
    """Whether the owner has ended for sure. Other boots and PID namespaces show nothing."""
    if owner[:16] != pid_namespace_id():
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
