"""Claims ranks for processes: hints in ``logging_dir/claims``, beside datatrove's ``completions``.

Lock, fence and mirror's owner stay the truth: two processes on one rank are waste, never damage. So
no clock or listing has to be right.

    a claim         rank, number, owner: the claim with the largest number counts, or of several
                    such claims the claim with the smallest owner
    no claim        the rank is free, or complete
    an owner        a process with a heartbeat; or FREE, or GIVEN_UP
    a run           an owner that runs all ranks, without claims: beside it no worker takes a rank
    a sibling       an owner without a claim: each sibling gets a rank before others take a second
                    rank
    a record        the content of a claim

A process that dies leaves its claims behind. The next owner runs such a rank alone; a death with a
single rank, the possible cause, counts as an attempt.

``stores.py`` writes claims and heartbeats. ``common/attempts.py`` decides which ranks are given up,
and which are run alone.
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
from datatrove_ckpt.common.threads import context_thread


class Claimant(NamedTuple):
    process: str
    ranks: list[int]
    is_alive: bool
    runs_all: bool


class FreeRanks(NamedTuple):
    """The ranks that a process may take.

    If they are orphaned (claimed by dead processes), each is run alone.
    """

    ranks: list[int]
    are_orphaned: bool


@dataclass(eq=False)
class Claims:
    """The claims of this process.

    Args:
        incomplete: lists the incomplete ranks. Called with each snapshot, and in a thread after
            each heartbeat.
        max_attempts: attempts without progress after which a rank is given up.
        alone: whether this process runs one rank at a time.
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
        """Takes a rank. Returns None if no rank is free, the store cannot be read, or too little
        time remains.
        """
        if not self.has_time:
            return None
        with self._guard, _log_errors():
            self.failures += 1
            snapshot = self._store.snapshot()
            free, are_orphaned = self._free(snapshot)
            if self._is_worker:
                random.shuffle(free)
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
        """Frees a rank that another process has locked. It is tried again later."""
        with self._guard:
            self.locked[rank] = time.monotonic() + 30.0
            self.release(rank)

    def failed(self, rank: int, reason: str, for_good: bool) -> None:
        """Counts a failure. The rank is given up if it would fail again (``for_good``), or has
        failed too often.
        """
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
        """Removes claims and heartbeats of dead processes, and frees ranks that were given up."""
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
        """Returns the free ranks; ranks of dead processes only if no other rank is free, and this
        process has no rank.
        """
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
            reason = (
                f"the process that ran it was killed, {max_kills} times in a row without progress"
            )
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
        except Exception as error:  # a store's library may raise any error
            logger.warning(
                f"The progress of task {rank} cannot be read: {error}. It counts as an attempt "
                "without progress."
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
    except Exception as error:  # a store's library may raise any error
        logger.warning(
            f"A claim could not be changed: {error}. Other processes may take the task later."
        )


def claimants(store: DiskClaims | ObjectClaims, without: str = "") -> list[Claimant]:
    """Returns all processes that are alive or left ranks behind, ``without`` this owner."""
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
