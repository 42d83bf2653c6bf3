"""Claims ranks for processes: hints in ``logging_dir/claims``, beside datatrove's ``completions``.

Lock, fence and mirror's owner stay the truth: two processes on one rank are waste, never damage. So
no clock or listing has to be right.

    a claim         rank, number, owner: the claim with the largest number counts, or of several
                    such claims the claim with the smallest owner
    no claim        the rank is free, or complete
    an owner        a process with a heartbeat; or FREE, or GIVEN_UP
    a run           an owner that runs all ranks, without claims: beside it no worker takes a rank,
                    and on a disk claims/run.lock excludes a second run
    a sibling       an owner without a claim: each sibling gets a rank before others take a second
                    rank
    a record        the content of a claim

A process that dies leaves its claims behind. The next owner runs such a rank alone; a death with a
single rank, the possible cause, counts as an attempt.

Claims and heartbeats are stored so:

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
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import orjson
import xxhash
from fsspec.utils import get_protocol
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.lock import Lock, lock_holder, name_holder, this_process
from datatrove_ckpt.common import LAUNCH, JsonObject, object_store
from datatrove_ckpt.common.attempts import AttemptProgress, AttemptRecord, may_overlap
from datatrove_ckpt.common.pid_namespace import pid_namespace_id
from datatrove_ckpt.common.retrying import JITTER, STORAGE
from datatrove_ckpt.common.threads import context_thread

_RETRIES = replace(STORAGE, patience=20.0)  # claims are hints: no caller waits long for them
_OWNER = re.compile("[0-9a-f]{40}(-run|-looks)?")
_NAME = re.compile(r"(\d+)-(\d+)(?:-([0-9a-z-]+))?")
_MISSED_HEARTBEATS = 5  # an owner that missed so many heartbeats is dead
# After so long, a listing shows all earlier writes.
_SETTLE_SECONDS = 1.0
_HUB_SETTLE_SECONDS = 5.0
_LOCKED_SECONDS = 30.0  # until a rank that another process has locked is tried again
_WORKERS = "workers"
# Owners that are no processes, whose names are hexadecimal and sort before these.
FREE = "free"
GIVEN_UP = "given-up"
RUN = "-run"  # runs all ranks
LOOKS = "-looks"  # takes no rank, and waits for the others
open_here: set[str] = set()
"""The owners of this process that have not closed their claims."""


class Claim(NamedTuple):
    rank: int
    number: int
    owner: str


class ClaimsSnapshot(NamedTuple):
    """All claims, the live owners, and the owners with an old heartbeat."""

    claims: list[Claim]
    alive: set[str]
    dead: set[str]

    def current(self) -> dict[int, Claim]:
        claims: dict[int, Claim] = {}
        for claim in sorted(self.claims, key=lambda claim: (-claim.number, claim.owner)):
            claims.setdefault(claim.rank, claim)
        return claims


def refuse_for_claims(folder: str) -> None:
    if object_store.is_in_repository(folder):
        object_store.refuse_repository("logging_dir", folder, "each claim of a worker")


def open_store(
    url: str, owner: str = "", options: JsonObject | None = None
) -> DiskClaims | ObjectClaims:
    protocol = get_protocol(url)
    if protocol in ("file", "local"):
        return DiskClaims(Path(url), owner)
    settle_seconds = _HUB_SETTLE_SECONDS if protocol == "hf" else _SETTLE_SECONDS
    return ObjectClaims(url, owner, settle_seconds, options)


def lock_run(folder: Path) -> Lock:
    """Excludes other processes that would run all ranks.

    Raises:
        CheckpointLocked: another process runs all ranks.
    """
    return Lock(folder / "run.lock", "run")


class DiskClaims:
    """Stores claims and heartbeats as files.

    Args:
        owner: name of this process; empty: a reader.

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
        """Returns False if another process has written a claim with this number."""
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
        process = b""
        with suppress(FileNotFoundError):
            process = (self._folder / _WORKERS / owner).read_bytes()
        return _name_process(process)

    def forget(self, owner: str) -> None:
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
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return -math.inf


def _read_claim(path: Path) -> tuple[str, JsonObject]:
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


class Claimant(NamedTuple):
    process: str
    ranks: list[int]
    is_alive: bool
    runs_all: bool


class FreeRanks(NamedTuple):
    """The ranks to take. Orphaned ranks (claimed by dead processes) run alone."""

    ranks: list[int]
    are_orphaned: bool


@dataclass(eq=False)
class Claims:
    """The claims of this process.

    Args:
        incomplete: lists the incomplete ranks. Called with each snapshot, and in a thread after
            each heartbeat.
        max_attempts: attempts without progress after which a rank is given up.
        has_time: whether a rank that takes so many seconds can end before this process must.
        is_worker: whether this process takes ranks in random order, so that not all workers try the
            same rank, and retries ranks that another launch gave up.
    """

    _store: DiskClaims | ObjectClaims
    _owner: str
    _incomplete: Callable[[], list[int]]
    _progress_of: Callable[[int], AttemptProgress]
    _max_attempts: int
    _alone: bool
    _has_time: Callable[[float], bool]
    _is_worker: bool

    def __post_init__(self) -> None:
        self.done: set[int] = set()
        """Ranks that this process has completed: a listing may not show that yet."""
        self._seconds_of_ranks: list[float] = []
        self.failures = 0
        """Number of calls of ``next`` in a row that could not read or write the store."""
        self._given_up = (
            f"{GIVEN_UP}-{xxhash.xxh32(os.environb.get(LAUNCH.encode(), b'')).hexdigest()}"
        )
        self._prefix = self._given_up if self._is_worker else GIVEN_UP
        self._held: dict[int, tuple[Claim, AttemptRecord, float]] = {}
        self.locked: dict[int, float] = {}
        """Ranks that another process has locked, with the time of the next try."""
        self._guard = threading.RLock()  # ranks run in threads
        self._closed = threading.Event()
        open_here.add(self._owner)
        context_thread(self._send_heartbeats, "datatrove-ckpt claims")

    def free(self) -> FreeRanks:
        with self._guard:
            return self._free(self._store.snapshot())

    def next(self) -> int | None:
        """Returns None if no rank is free, the store cannot be read, or too little time remains."""
        if not self.has_time:
            return None
        with self._guard, _log_errors():
            self.failures += 1
            snapshot = self._store.snapshot()
            free, are_orphaned = self._free(snapshot)
            if self._is_worker:
                JITTER.shuffle(free)
            claimed = next(
                (rank for rank in free if self._take(rank, snapshot, are_orphaned)), None
            )
            self.failures = 0
            return claimed
        return None

    @property
    def has_time(self) -> bool:
        return self._has_time(sum(self._seconds_of_ranks) / max(1, len(self._seconds_of_ranks)))

    def complete(self, rank: int) -> None:
        with self._guard:
            self.done.add(rank)
            self._seconds_of_ranks.append(time.monotonic() - self._held[rank][2])
            self._free_rank(rank, AttemptRecord())

    def release(self, rank: int) -> None:
        with self._guard:
            self._free_rank(rank, self._held[rank][1])

    def lost(self, rank: int) -> None:
        """Frees a rank that another process has locked."""
        with self._guard:
            self.locked[rank] = time.monotonic() + _LOCKED_SECONDS
            self.release(rank)

    def failed(self, rank: int, reason: str, for_good: bool) -> None:
        """Gives a rank up if it would fail again (``for_good``), or has failed too often."""
        with self._guard:
            max_attempts = 1 if for_good else self._max_attempts
            self._free_rank(rank, self._ended(rank, self._held[rank][1], reason, max_attempts))

    def given_up(self) -> dict[int, str]:
        with self._guard:
            return given_up(self._store, self._prefix)

    def other_claimants(self) -> list[Claimant]:
        with self._guard:
            return [other for other in claimants(self._store, self._owner) if other.is_alive]

    def clear(self) -> None:
        with self._guard:
            claims, alive, dead = self._store.snapshot()
            for claim in claims:
                if claim.owner not in alive:
                    self._store.remove(claim)
            for owner in dead:
                self._store.forget(owner)

    def close(self) -> None:
        self._closed.set()
        open_here.discard(self._owner)
        with self._guard, _log_errors():
            for rank in list(self._held):
                self.release(rank)
            self._store.close()

    def _free(self, snapshot: ClaimsSnapshot) -> FreeRanks:
        if any(owner.endswith(RUN) for owner in snapshot.alive):
            return FreeRanks([], False)
        current = snapshot.current()
        free: list[int] = []
        orphaned: list[int] = []
        for rank in self._incomplete():
            owner = current.get(rank, Claim(rank, 0, FREE)).owner
            if rank in self._held or rank in self.done:
                continue
            if self.locked.get(rank, 0.0) > time.monotonic():
                continue  # another process held its lock a moment ago
            # A claim of this process that is not held: its write was reported as failed.
            if is_process(owner) and owner != self._owner:
                if owner not in snapshot.alive:
                    orphaned.append(rank)
            elif not owner.startswith(self._prefix):
                free.append(rank)  # also a rank that was given up in another launch
        if not self._held:
            return FreeRanks(free or orphaned, not free)
        at_work = {claim.owner for claim in current.values()}
        siblings = sum(not owner.endswith(LOOKS) for owner in snapshot.alive - at_work)
        held = [record for _, record, _ in self._held.values()]
        if not may_overlap(held, len(free) + len(orphaned), siblings):
            free = []
        return FreeRanks(free, False)

    def _take(self, rank: int, snapshot: ClaimsSnapshot, is_orphaned: bool) -> bool:
        claim = snapshot.current().get(rank, Claim(rank, 0, FREE))
        record = AttemptRecord()
        if claim.number and not claim.owner.startswith(GIVEN_UP):
            record = _record(self._store, claim)
        owner = self._owner
        if is_orphaned and record.alone:
            # Usually the machine causes a kill, not the rank.
            max_kills = self._max_attempts * 3
            reason = f"its process was killed, {max_kills} times in a row without progress"
            record = self._ended(rank, record, reason, max_kills)
            if record.why:
                owner = self._given_up
        record = record._replace(alone=self._alone or is_orphaned)
        new = Claim(rank, claim.number + 1, owner)
        if not self._put(new, record, snapshot.claims) or record.why:
            return False
        self._held[rank] = new, record, time.monotonic()
        return True

    def _free_rank(self, rank: int, record: AttemptRecord) -> None:
        claim, *_ = self._held.pop(rank)
        owner = self._given_up if record.why else FREE
        with _log_errors():
            if self._store.snapshot().current().get(rank) != claim:
                return
            if record.tries:
                self._put(Claim(rank, claim.number + 1, owner), record, [claim])
            else:
                self._store.remove(claim)

    def _put(self, claim: Claim, record: AttemptRecord, before: list[Claim]) -> bool:
        if not self._store.put(claim, record._asdict()):
            return False
        for old in before:
            if old.rank == claim.rank:
                self._store.remove(old)
        return True

    def _ended(
        self, rank: int, record: AttemptRecord, reason: str, max_attempts: int
    ) -> AttemptRecord:
        try:
            progress = self._progress_of(rank)
        except Exception as error:  # a store may raise any error
            logger.warning(
                f"The progress of task {rank} cannot be read: {error}. It counts as none."
            )
            progress = record.reached
        return record.ended(reason, max_attempts, progress)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(self._store.heartbeat_seconds):
            try:
                self._call_unless_closed(self._store.heartbeat)
                # Finds completed ranks while this process takes no rank.
                self._call_unless_closed(self._incomplete)
            except Exception as error:
                # Any error: without heartbeats, other processes would take the ranks.
                logger.warning(
                    f"The heartbeat of this process's claims failed: {error}. Other workers may "
                    "take its tasks."
                )

    def _call_unless_closed(self, action: Callable[[], object]) -> None:
        with self._guard:
            if not self._closed.is_set():  # while it waited for the guard
                action()


@contextmanager
def _log_errors() -> Iterator[None]:
    """Logs errors: a claim that cannot be changed must not hide why a rank ended."""
    try:
        yield
    except Exception as error:
        logger.warning(
            f"A claim could not be changed: {error}. Other processes may take the task later."
        )


def claimants(store: DiskClaims | ObjectClaims, without: str = "") -> list[Claimant]:
    snapshot = store.snapshot()
    ranks: dict[str, list[int]] = {owner: [] for owner in sorted(snapshot.alive)}
    for rank, claim in sorted(snapshot.current().items()):
        if is_process(claim.owner):
            ranks.setdefault(claim.owner, []).append(rank)
    ranks.pop(without, None)
    return [
        Claimant(store.name(owner), claimed, owner in snapshot.alive, owner.endswith(RUN))
        for owner, claimed in ranks.items()
    ]


def given_up(store: DiskClaims | ObjectClaims, prefix: str = GIVEN_UP) -> dict[int, str]:
    claims = store.snapshot().current().values()
    return {
        claim.rank: _record(store, claim).why for claim in claims if claim.owner.startswith(prefix)
    }


def _record(store: DiskClaims | ObjectClaims, claim: Claim) -> AttemptRecord:
    try:
        fields = store.read(claim)
        return AttemptRecord(
            fields["tries"], tuple(fields["reached"]), fields["why"], fields["alone"]
        )
    except (orjson.JSONDecodeError, KeyError, TypeError):  # removed, or cut off by a power loss
        return AttemptRecord()
