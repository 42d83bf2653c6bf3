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

``stores.py`` writes marks and beats. ``common/attempts.py`` decides which ranks are given up, and
which are run alone.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import orjson
import xxhash
from loguru import logger

from datatrove_ckpt.claims.stores import (
    FREE,
    GIVEN_UP,
    LOOKS,
    RUN,
    Claim,
    ClaimsSnapshot,
    DiskClaims,
    ObjectClaims,
    is_process,
    open_here,
)
from datatrove_ckpt.common import LAUNCH
from datatrove_ckpt.common.attempts import AttemptProgress, AttemptRecord, may_overlap


class Claimant(NamedTuple):
    process: str
    ranks: list[int]
    is_alive: bool
    runs_all: bool


class FreeRanks(NamedTuple):
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
        is_worker: this process takes ranks in any order, so that not all workers try one rank, and
            retries ranks that another launch gave up.
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
        """How often in a row ``next`` could not read or write the store."""
        self._given_up = (
            f"{GIVEN_UP}-{xxhash.xxh32(os.environb.get(LAUNCH.encode(), b'')).hexdigest()}"
        )
        self._prefix = self._given_up if self._is_worker else GIVEN_UP
        self._held: dict[int, tuple[Claim, AttemptRecord, float]] = {}
        self.locked: dict[int, float] = {}
        """Ranks with foreign locks, with the time of the next try."""
        self._guard = threading.RLock()  # ranks run in threads
        self._closed = threading.Event()
        open_here.add(self._owner)
        threading.Thread(target=self._beat, name="datatrove-ckpt claims", daemon=True).start()

    def free(self) -> FreeRanks:
        with self._guard:
            return self._free(self._store.look())

    def next(self) -> int | None:
        """Takes a rank. Returns None if no rank is free, the store cannot be read, or no time is
        left.
        """
        if not self.has_time:
            return None
        with self._guard, _log_errors():
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
        """Frees a rank whose lock another process holds, and that is tried again later."""
        with self._guard:
            self.locked[rank] = time.monotonic() + 30.0
            self.release(rank)

    def failed(self, rank: int, why: str, for_good: bool) -> None:
        """Counts a failure. The rank is given up if it would fail again (``for_good``), or has
        failed too often.
        """
        with self._guard:
            most = 1 if for_good else self._max_attempts
            self._free_rank(rank, self._ended(rank, self._held[rank][1], why, most))

    def given_up(self) -> dict[int, str]:
        with self._guard:
            return given_up(self._store, self._prefix)

    def others(self) -> list[Claimant]:
        with self._guard:
            return [other for other in claimants(self._store, self._owner) if other.is_alive]

    def clear(self) -> None:
        """Removes the marks and beats of dead processes, and frees the ranks that were given up."""
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
        with self._guard, _log_errors():
            for rank in list(self._held):
                self.release(rank)
            self._store.close()

    def _free(self, look: ClaimsSnapshot) -> FreeRanks:
        """Ranks of dead processes come last, and only while this process has no rank."""
        if any(owner.endswith(RUN) for owner in look.alive):
            return FreeRanks([], False)
        current = look.current()
        free: list[int] = []
        left: list[int] = []
        for rank in self._incomplete():
            owner = current.get(rank, Claim(rank, 0, FREE)).owner
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
            return FreeRanks(free or left, not free)
        at_work = {mark.owner for mark in current.values()}
        siblings = sum(not owner.endswith(LOOKS) for owner in look.alive - at_work)
        held = [record for _, record, _ in self._held.values()]
        if not may_overlap(held, len(free) + len(left), siblings):
            free = []
        return FreeRanks(free, False)

    def _take(self, rank: int, look: ClaimsSnapshot, is_left: bool) -> bool:
        mark = look.current().get(rank, Claim(rank, 0, FREE))
        record = AttemptRecord()
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
        new = Claim(rank, mark.number + 1, owner)
        if not self._put(new, record, look.marks) or record.why:
            return False
        self._held[rank] = new, record, time.monotonic()
        return True

    def _free_rank(self, rank: int, record: AttemptRecord) -> None:
        mark, *_ = self._held.pop(rank)
        owner = self._given_up if record.why else FREE
        with _log_errors():
            if self._store.look().current().get(rank) != mark:
                return
            if record.tries:
                self._put(Claim(rank, mark.number + 1, owner), record, [mark])
            else:
                self._store.remove(mark)

    def _put(self, mark: Claim, record: AttemptRecord, before: list[Claim]) -> bool:
        if not self._store.put(mark, record._asdict()):
            return False
        for old in before:
            if old.rank == mark.rank:
                self._store.remove(old)
        return True

    def _ended(self, rank: int, record: AttemptRecord, why: str, most: int) -> AttemptRecord:
        try:
            reached = self._progress_of(rank)
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
def _log_errors() -> Iterator[None]:
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


def _record(store: DiskClaims | ObjectClaims, mark: Claim) -> AttemptRecord:
    try:
        content = store.read(mark)
        return AttemptRecord(
            content["tries"], tuple(content["reached"]), content["why"], content["alone"]
        )
    except (orjson.JSONDecodeError, KeyError, TypeError):  # gone, or cut off by a power loss
        return AttemptRecord()
