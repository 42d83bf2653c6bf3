"""Stores claims of ranks and heartbeats of processes, on a disk or in an object store.

    a disk          claims/00007-000003, with the owner in it: a hard link gives the name once
                    claims/workers/OWNER: the owner is alive if it holds the lock of this file; or,
                    if locks do not work between machines, if the file changed shortly before this
                    process's file
    object stores   claims/00007-000003-OWNER: two processes may write the same number, and list
                    the claims again after a while
                    claims/workers/OWNER: the owner is alive if its object was written shortly
                    before this process's object, unless the owner was a process of this boot and
                    PID namespace, and has ended

Only times that the same file server or store has stamped are compared.
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

_RETRIES = replace(STORAGE, patience=20.0)  # claims are hints: no caller waits long for them
_OWNER = re.compile("[0-9a-f]{40}(-run|-looks)?")
_NAME = re.compile(r"(\d+)-(\d+)(?:-([0-9a-z-]+))?")
_MISSED_HEARTBEATS = 5  # an owner that missed so many heartbeats is dead
# After so long, a listing shows all earlier writes.
_SETTLE_SECONDS = 1.0
_HUB_SETTLE_SECONDS = 5.0
_WORKERS = "workers"
# Owners that are no processes, whose names are hexadecimal and sort before these.
FREE = "free"
GIVEN_UP = "given-up"
# Endings of the names of owners.
RUN = "-run"  # runs all ranks
LOOKS = "-looks"  # takes no rank, and waits for the others
open_here: set[str] = set()
"""The owners of this process that have not closed their claims."""


class Claim(NamedTuple):
    rank: int
    number: int
    owner: str


class ClaimsSnapshot(NamedTuple):
    """All claims of a store, the owners that are alive, and the owners with an old heartbeat."""

    claims: list[Claim]
    alive: set[str]
    dead: set[str]

    def current(self) -> dict[int, Claim]:
        """Returns the claim of each rank that counts."""
        claims: dict[int, Claim] = {}
        for claim in sorted(self.claims, key=lambda claim: (-claim.number, claim.owner)):
            claims.setdefault(claim.rank, claim)
        return claims


def refuse_for_claims(folder: str) -> None:
    """Raises ConfigError if ``logging_dir`` is in a repository."""
    if object_store.is_in_repository(folder):
        object_store.refuse_repository("logging_dir", folder, "each claim of a worker")


def open_store(
    url: str, owner: str = "", options: JsonObject | None = None
) -> DiskClaims | ObjectClaims:
    """Opens the claims at a URL, for the process named ``owner``; if empty, only for reading."""
    protocol = get_protocol(url)
    if protocol in ("file", "local"):
        return DiskClaims(Path(url), owner)
    settle_seconds = _HUB_SETTLE_SECONDS if protocol == "hf" else _SETTLE_SECONDS
    return ObjectClaims(url, owner, settle_seconds, options)


class DiskClaims:
    """Stores claims and heartbeats as files.

    Args:
        owner: name of this process; empty: the process only reads.

    Attributes:
        heartbeat_seconds: interval of heartbeats. An owner without a heartbeat for five times as
            long is dead.
    """

    heartbeat_seconds = 30.0

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._owner = owner
        if owner:
            files.disk.make_dirs(folder / _WORKERS)
            self._worker_lock = Lock(folder / _WORKERS / owner)

    def snapshot(self) -> ClaimsSnapshot:
        names = [_NAME.fullmatch(path.name) for path in self._folder.glob("*-*")]
        claims = [
            Claim(int(name[1]), int(name[2]), str(_read_claim(self._folder / name[0])[0]))
            for name in names
            if name is not None
        ]
        workers = [
            path for path in (self._folder / _WORKERS).glob("*") if _OWNER.fullmatch(path.name)
        ]
        alive = {path.name for path in workers if self._is_alive(path)}
        return ClaimsSnapshot(claims, alive, {path.name for path in workers} - alive)

    def put(self, claim: Claim, record: JsonObject) -> bool:
        """Writes a claim. Returns False if another process was first to write a claim with this
        number.
        """
        new = self._folder / f"{self._owner}.new"
        files.disk.write_new(new, [orjson.dumps([claim.owner, record])])
        path = self._path(claim)
        is_ours = files.disk.put_new(new, path) or _read_claim(path)[0] == claim.owner
        files.disk.remove(new)
        return is_ours

    def read(self, claim: Claim) -> JsonObject:
        return _read_claim(self._path(claim))[1]

    def remove(self, claim: Claim) -> None:
        files.disk.remove(self._path(claim))

    def heartbeat(self) -> None:
        if not self._worker_lock.path.exists():  # another process took it for dead
            removed = self._worker_lock
            self._worker_lock = Lock(removed.path)
            removed.release()
        os.utime(self._worker_lock.path)  # a file server sets the time of its own clock

    def name(self, owner: str) -> str:
        """Returns process id and host of an owner."""
        process = b""
        with suppress(FileNotFoundError):
            process = (self._folder / _WORKERS / owner).read_bytes()
        return _name_process(process)

    def forget(self, owner: str) -> None:
        """Removes the heartbeat of an owner."""
        files.disk.remove(self._folder / _WORKERS / owner)

    def close(self) -> None:
        self._worker_lock.release(remove=True)

    def _path(self, claim: Claim) -> Path:
        return self._folder / f"{claim.rank:05d}-{claim.number:06d}"

    def _is_alive(self, path: Path) -> bool:
        if path.name == self._owner or lock_holder(path) is not None:
            return True
        now = time.time()
        is_gone = has_ended(path.name)
        if self._owner:
            now = _changed(self._worker_lock.path)  # by the clock that stamps heartbeats
            is_gone = (
                self._worker_lock.works and path.name[:8] == self._owner[:8]
            )  # locks hold in a kernel
        return now - _changed(path) < _MISSED_HEARTBEATS * self.heartbeat_seconds and not is_gone


def _changed(path: Path) -> float:
    """Returns the time of a heartbeat; minus infinity if another process removed its file."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return -math.inf


def _read_claim(path: Path) -> tuple[str, JsonObject]:
    """Returns owner and record. The rank of a missing or damaged file is free."""
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
    """Stores claims and heartbeats as objects.

    Args:
        owner: name of this process; empty: the process only reads.
        settle_seconds: time after which a listing shows the writes of all processes.
    """

    heartbeat_seconds = 60.0

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
            self.heartbeat()

    def snapshot(self) -> ClaimsSnapshot:
        return _RETRIES.run(self._list, "The claims of tasks cannot be listed")

    def put(self, claim: Claim, record: JsonObject) -> bool:
        _RETRIES.run(
            lambda: self._store.put(_object_name(claim), orjson.dumps(record)),
            "The claim of a task cannot be written",
        )
        if not is_process(claim.owner):
            return True
        time.sleep(self._settle_seconds)
        snapshot = self.snapshot()
        snapshot.claims.append(claim)  # the listing may lag
        if snapshot.current()[claim.rank] == claim:
            return True
        self.remove(claim)
        return False

    def read(self, claim: Claim) -> JsonObject:
        record: JsonObject = orjson.loads(self._store.read(_object_name(claim), 1 << 20) or b"{}")
        return record

    def remove(self, claim: Claim) -> None:
        self._store.delete(_object_name(claim))

    def heartbeat(self) -> None:
        self._store.put(f"{_WORKERS}/{self._owner}", orjson.dumps(this_process()))

    def name(self, owner: str) -> str:
        return _name_process(self._store.read(f"{_WORKERS}/{owner}", 1 << 20) or b"")

    def forget(self, owner: str) -> None:
        self._store.delete(f"{_WORKERS}/{owner}")

    def close(self) -> None:
        self.forget(self._owner)

    def _list(self) -> ClaimsSnapshot:
        written = self._store.names()
        heartbeats = {
            owner: at
            for owner, at in self._store.names(_WORKERS).items()
            if _OWNER.fullmatch(owner)
        }
        names = [_NAME.fullmatch(name) for name in written]
        claims = [Claim(int(name[1]), int(name[2]), name[3]) for name in names if name is not None]
        owned = [claim for claim in claims if is_process(claim.owner)]
        life_signs = [
            *heartbeats.items(),
            *((claim.owner, written[_object_name(claim)]) for claim in owned),
        ]
        now = time.time()
        if self._owner:
            now = heartbeats.get(self._owner, 0.0)
        dead_seconds = _MISSED_HEARTBEATS * self.heartbeat_seconds
        # Without times an age is NaN, and every owner is alive.
        alive = {
            owner
            for owner, at in life_signs
            if (math.isnan(now - at) or now - at < dead_seconds) and not has_ended(owner)
        }
        if self._owner:
            alive.add(self._owner)
        return ClaimsSnapshot(claims, alive, heartbeats.keys() - alive)


def _object_name(claim: Claim) -> str:
    return f"{claim.rank:05d}-{claim.number:06d}-{claim.owner}"


# owners -------------------------------------------------------------------------------------------


def is_process(owner: str) -> bool:
    return not owner.startswith((FREE, GIVEN_UP))


def new_owner(end: str = "") -> str:
    """Returns a name for this process: boot, PID namespace, process id, start, and random digits,
    eight hexadecimal digits each.

    Until 0.2.0 the first part was a hash of the host name, so no process considers such an owner
    ended.
    """
    pid = os.getpid()
    # A random namespace differs from all others.
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
