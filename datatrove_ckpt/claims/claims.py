"""Which process works on which rank: hints in ``logging_dir/claims``, beside datatrove's
``completions``.

Lock, fence and mirror's owner stay the truth: two processes on one rank are waste, never damage. So
no clock or listing has to be right.

    a mark          rank, number, owner: the mark with the largest number counts, of these the
                    smallest owner
    no mark         the rank is free, or complete
    an owner        a process with a beat; or FREE, or GIVEN_UP
    a run           an owner that runs all ranks, without marks: beside it no worker takes any
    a sibling       an owner without a mark: each gets a rank before others take a second one
    a record        the content of a mark

A process that dies leaves its marks behind. The next owner runs such a rank alone; a death with a
single rank, the possible cause, counts as an attempt.

Claims lie, and their owners are alive, as the store says:

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

``common/attempts.py`` decides which ranks are given up, and which are run alone.
"""

from __future__ import annotations

import math
import os
import random
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
from datatrove_ckpt.common import LAUNCH, JsonObject, object_store
from datatrove_ckpt.common.attempts import Progress, Record, may_overlap
from datatrove_ckpt.common.places import process_place
from datatrove_ckpt.common.retrying import STORAGE

_POLICY = replace(STORAGE, patience=20.0)  # claims are hints: nothing waits long for them
_OWNER = re.compile("[0-9a-f]{40}(-run|-looks)?")
_NAME = re.compile(r"(\d+)-(\d+)(?:-([0-9a-z-]+))?")
_BEATS = 5  # so many beats that did not come are a death
# Seconds until a listing has what was written before.
_SETTLES = 1.0
_HUB_SETTLES = 5.0
_WORKERS = "workers"
# Names of processes are hexadecimal, and sorted before.
FREE = "free"
GIVEN_UP = "given-up"
# How the names of these owners end.
RUN = "-run"  # runs all ranks
LOOKS = "-looks"  # takes none, and waits for the others
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


def refuse_for_claims(folder: str) -> None:
    """Raises ConfigError if ``logging_dir`` is in a repository."""
    if object_store.is_in_repository(folder):
        object_store.refuse_repository("logging_dir", folder, "each claim of a worker")


def open_store(
    url: str, owner: str = "", options: JsonObject | None = None
) -> DiskClaims | ObjectClaims:
    """``owner``: names this process; empty: it only reads."""
    protocol = get_protocol(url)
    if protocol in ("file", "local"):
        return DiskClaims(Path(url), owner)
    return ObjectClaims(url, owner, _HUB_SETTLES if protocol == "hf" else _SETTLES, options)


class DiskClaims:
    """Stores marks and beats.

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
            self._own = files.Lock(folder / _WORKERS / owner)

    def look(self) -> Look:
        names = [_NAME.fullmatch(path.name) for path in self._folder.glob("*-*")]
        marks = [
            Mark(int(name[1]), int(name[2]), str(_parsed(self._folder / name[0])[0]))
            for name in names
            if name is not None
        ]
        workers = [
            path for path in (self._folder / _WORKERS).glob("*") if _OWNER.fullmatch(path.name)
        ]
        alive = {path.name for path in workers if self._is_alive(path)}
        return Look(marks, alive, {path.name for path in workers} - alive)

    def put(self, mark: Mark, content: JsonObject) -> bool:
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
        is_ours = files.disk.put_new(new, path) or _parsed(path)[0] == mark.owner
        files.disk.remove(new)
        return is_ours

    def read(self, mark: Mark) -> JsonObject:
        return _parsed(self._path(mark))[1]

    def remove(self, mark: Mark) -> None:
        files.disk.remove(self._path(mark))

    def beat(self) -> None:
        if not self._own.path.exists():  # another process took it for dead
            removed = self._own
            self._own = files.Lock(removed.path)
            removed.release()
        os.utime(self._own.path)  # a file server sets the time of its own clock

    def name(self, owner: str) -> str:
        """Returns process id and host of an owner."""
        with suppress(FileNotFoundError):
            return _named((self._folder / _WORKERS / owner).read_bytes())
        return _named(b"")

    def forget(self, owner: str) -> None:
        """Removes the beat of an owner."""
        files.disk.remove(self._folder / _WORKERS / owner)

    def close(self) -> None:
        self._own.release(remove=True)

    def _path(self, mark: Mark) -> Path:
        return self._folder / f"{mark.rank:05d}-{mark.number:06d}"

    def _is_alive(self, path: Path) -> bool:
        if path.name == self._owner or files.lock_holder(path) is not None:
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


def _parsed(path: Path) -> tuple[str, JsonObject]:
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
        options: JsonObject | None = None,
    ) -> None:
        self._store = object_store.ObjectStore(url, apart=True, options=options)
        self._owner = owner
        self._settle_seconds = settle_seconds
        if owner:
            self.beat()

    def look(self) -> Look:
        return _POLICY.run(self._look, "The claims of tasks cannot be listed")

    def put(self, mark: Mark, content: JsonObject) -> bool:
        _POLICY.run(
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

    def read(self, mark: Mark) -> JsonObject:
        found: JsonObject = orjson.loads(self._store.read(_object_name(mark), 1 << 20) or b"{}")
        return found

    def remove(self, mark: Mark) -> None:
        self._store.delete(_object_name(mark))

    def beat(self) -> None:
        self._store.put(f"{_WORKERS}/{self._owner}", orjson.dumps(files.this_process()))

    def name(self, owner: str) -> str:
        return _named(self._store.read(f"{_WORKERS}/{owner}", 1 << 20) or b"")

    def forget(self, owner: str) -> None:
        self._store.delete(f"{_WORKERS}/{owner}")

    def close(self) -> None:
        self.forget(self._owner)

    def _look(self) -> Look:
        written = self._store.names()
        beats = {
            owner: at
            for owner, at in self._store.names(_WORKERS).items()
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
        # Without times an age is NaN, and every owner is alive.
        alive = {
            owner
            for owner, at in signs
            if (math.isnan(now - at) or now - at < dead_seconds) and not has_ended(owner)
        }
        if self._owner:
            alive.add(self._owner)
        return Look(marks, alive, beats.keys() - alive)


def _object_name(mark: Mark) -> str:
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
    place = process_place() or os.urandom(8).hex()
    return f"{place}{pid:08x}{_started(pid)}{os.urandom(4).hex()}{end}"


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


class Claimant(NamedTuple):
    process: str
    ranks: list[int]
    is_alive: bool
    runs_all: bool


class Free(NamedTuple):
    """The ranks that a process may take.

    ``are_left``: by dead processes; each is run alone.
    """

    ranks: list[int]
    are_left: bool


@dataclass(eq=False)
class Claims:
    """The claims of this process.

    Args:
        incomplete: lists the incomplete ranks. Called at each look, and in a thread after each
            beat.
        max_attempts: attempts without progress after which a rank is given up.
        alone: this process runs one rank at a time.
        has_time: whether a rank that takes so many seconds can end before this process must.
        is_worker: takes ranks in any order, so that not all workers try one rank; and retries ranks
            that another launch gave up.
    """

    _store: DiskClaims | ObjectClaims
    _owner: str
    _incomplete: Callable[[], list[int]]
    _reached: Callable[[int], Progress]
    _max_attempts: int
    _alone: bool
    _has_time: Callable[[float], bool]
    _is_worker: bool

    def __post_init__(self) -> None:
        self.done: set[int] = set()
        """Ranks that this process has completed: a listing may not show that yet."""
        self._took: list[float] = []
        self.failures = 0
        """How often in a row ``next`` could not read or write the store."""
        self._given_up = (
            f"{GIVEN_UP}-{xxhash.xxh32(os.environb.get(LAUNCH.encode(), b'')).hexdigest()}"
        )
        self._prefix = GIVEN_UP
        if self._is_worker:
            self._prefix = self._given_up
        self._held: dict[int, tuple[Mark, Record, float]] = {}
        self.locked: dict[int, float] = {}
        """Ranks with foreign locks, with the time of the next try."""
        self._guard = threading.RLock()  # ranks run in threads
        self._closed = threading.Event()
        open_here.add(self._owner)
        threading.Thread(target=self._beat, name="datatrove-ckpt claims", daemon=True).start()

    def free(self) -> Free:
        with self._guard:
            return self._free(self._store.look())

    def next(self) -> int | None:
        """Takes a rank. Returns None if no rank is free, the store cannot be read, or no time is
        left.
        """
        if not self.has_time:
            return None
        with self._guard, _hint():
            self.failures += 1
            look = self._store.look()
            free, are_left = self._free(look)
            if self._is_worker:
                random.shuffle(free)
            taken = next((rank for rank in free if self._take(rank, look, are_left)), None)
            self.failures = 0
            return taken
        return None

    @property
    def has_time(self) -> bool:
        return self._has_time(sum(self._took) / max(1, len(self._took)))

    def complete(self, rank: int) -> None:
        with self._guard:
            self.done.add(rank)
            self._took.append(time.monotonic() - self._held[rank][2])
            self._let_go(rank, Record())

    def release(self, rank: int) -> None:
        with self._guard:
            self._let_go(rank, self._held[rank][1])

    def lost(self, rank: int) -> None:
        """Frees a rank whose lock another process holds, and that is tried again later."""
        with self._guard:
            self.locked[rank] = time.monotonic() + 30.0
            self.release(rank)

    def failed(self, rank: int, why: str, for_good: bool) -> None:
        """Counts a failure. The rank is given up if it would fail again (``for_good``), or has
        failed too often.
        """
        with self._guard:
            most = self._max_attempts
            if for_good:
                most = 1
            self._let_go(rank, self._ended(rank, self._held[rank][1], why, most))

    def given_up(self) -> dict[int, str]:
        with self._guard:
            return given_up(self._store, self._prefix)

    def others(self) -> list[Claimant]:
        with self._guard:
            return [other for other in claimants(self._store, self._owner) if other.is_alive]

    def clear(self) -> None:
        """Removes what no living process owns: ranks that are given up are free again."""
        with self._guard:
            marks, alive, dead = self._store.look()
            for mark in marks:
                if mark.owner not in alive:
                    self._store.remove(mark)
            for owner in dead:
                self._store.forget(owner)

    def close(self) -> None:
        self._closed.set()
        open_here.discard(self._owner)
        with self._guard, _hint():
            for rank in list(self._held):
                self.release(rank)
            self._store.close()

    def _free(self, look: Look) -> Free:
        """Ranks of dead processes come last, and only while this process has no rank."""
        if any(owner.endswith(RUN) for owner in look.alive):
            return Free([], False)
        current = look.current()
        free: list[int] = []
        left: list[int] = []
        for rank in self._incomplete():
            owner = current.get(rank, Mark(rank, 0, FREE)).owner
            if rank in self._held or rank in self.done:
                continue
            if self.locked.get(rank, 0.0) > time.monotonic():
                continue  # another process held its lock a moment ago
            # An own mark that is not held: the write failed after it was done.
            if is_process(owner) and owner != self._owner:
                if owner not in look.alive:
                    left.append(rank)
            elif not owner.startswith(self._prefix):
                free.append(rank)  # also one that was given up in another launch
        if not self._held:
            return Free(free or left, not free)
        at_work = {mark.owner for mark in current.values()}
        siblings = sum(not owner.endswith(LOOKS) for owner in look.alive - at_work)
        held = [record for _, record, _ in self._held.values()]
        if not may_overlap(held, len(free) + len(left), siblings):
            free = []
        return Free(free, False)

    def _take(self, rank: int, look: Look, is_left: bool) -> bool:
        mark = look.current().get(rank, Mark(rank, 0, FREE))
        record = Record()
        if mark.number and not mark.owner.startswith(GIVEN_UP):
            record = _record(self._store, mark)
        owner = self._owner
        if is_left and record.alone:
            # Mostly the machine is the cause of a kill, and not the rank.
            most = self._max_attempts * 3
            why = f"the process that ran it was killed, {most} times in a row without progress"
            record = self._ended(rank, record, why, most)
            if record.why:
                owner = self._given_up
        record = record._replace(alone=self._alone or is_left)
        new = Mark(rank, mark.number + 1, owner)
        if not self._put(new, record, look.marks) or record.why:
            return False
        self._held[rank] = new, record, time.monotonic()
        return True

    def _let_go(self, rank: int, record: Record) -> None:
        mark, *_ = self._held.pop(rank)
        owner = self._given_up if record.why else FREE
        with _hint():
            if self._store.look().current().get(rank) != mark:
                return
            if record.tries:
                self._put(Mark(rank, mark.number + 1, owner), record, [mark])
            else:
                self._store.remove(mark)

    def _put(self, mark: Mark, record: Record, before: list[Mark]) -> bool:
        if not self._store.put(mark, record._asdict()):
            return False
        for old in before:
            if old.rank == mark.rank:
                self._store.remove(old)
        return True

    def _ended(self, rank: int, record: Record, why: str, most: int) -> Record:
        try:
            reached = self._reached(rank)
        except Exception as error:  # of a store's library, too
            logger.warning(
                f"How far task {rank} is cannot be read: {error}. It counts as an attempt without "
                "progress."
            )
            reached = record.reached
        return record.ended(why, most, reached)

    def _beat(self) -> None:
        while not self._closed.wait(self._store.beat_seconds):
            try:
                self._beat_once(self._store.beat)
                # Looks for completed ranks while this process takes none.
                self._beat_once(self._incomplete)
            except Exception as error:
                # Also a store library's errors: without beats, others would take the ranks.
                logger.warning(
                    f"The beat of this process's claims failed: {error}. Other workers may take "
                    "its tasks."
                )

    def _beat_once(self, action: Callable[[], object]) -> None:
        with self._guard:
            if not self._closed.is_set():  # while it waited for the guard
                action()


@contextmanager
def _hint() -> Iterator[None]:
    """Logs errors: a claim that cannot be changed must not hide why a rank ended."""
    try:
        yield
    except Exception as error:  # of a store's library, too
        logger.warning(
            f"A claim could not be changed: {error}. Other processes may take the task later."
        )


def claimants(store: DiskClaims | ObjectClaims, without: str = "") -> list[Claimant]:
    """Returns all processes that are alive or have left ranks, ``without`` this owner."""
    look = store.look()
    ranks: dict[str, list[int]] = {owner: [] for owner in sorted(look.alive)}
    for rank, mark in sorted(look.current().items()):
        if is_process(mark.owner):
            ranks.setdefault(mark.owner, []).append(rank)
    ranks.pop(without, None)
    return [
        Claimant(store.name(owner), claimed, owner in look.alive, owner.endswith(RUN))
        for owner, claimed in ranks.items()
    ]


def given_up(store: DiskClaims | ObjectClaims, prefix: str = GIVEN_UP) -> dict[int, str]:
    marks = store.look().current().values()
    return {mark.rank: _record(store, mark).why for mark in marks if mark.owner.startswith(prefix)}


def _record(store: DiskClaims | ObjectClaims, mark: Mark) -> Record:
    try:
        content = store.read(mark)
        return Record(content["tries"], tuple(content["reached"]), content["why"], content["alone"])
    except (orjson.JSONDecodeError, KeyError, TypeError):  # gone, or cut off by a power loss
        return Record()
