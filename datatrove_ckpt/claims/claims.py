"""Which process works on which rank: hints in ``logging_dir/claims``, beside datatrove's
``completions``.

Lock, fence and mirror's owner stay the truth: two processes on one rank are waste, never damage. So
no clock or listing has to be right.

    a mark          rank, number, owner: the mark with the largest number counts, of these the
                    smallest owner
    no mark         the rank is free, or complete
    an owner        a process with a beat (``stores.py``); or FREE, or GIVEN_UP
    a run           an owner that runs all ranks, without marks: beside it no worker takes any
    a record        the content of a mark

A process that dies leaves its marks behind. The next owner runs such a rank alone; a death with a
single rank, the possible cause, counts as an attempt.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import orjson
import xxhash
from loguru import logger

from datatrove_ckpt.claims.progress import Progress
from datatrove_ckpt.claims.stores import (
    FREE,
    GIVEN_UP,
    DiskClaims,
    DiskReader,
    Look,
    Mark,
    ObjectClaims,
    is_process,
    is_run,
    open_here,
)
from datatrove_ckpt.common import LAUNCH
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.errors import CkptError

_KILLS = 3  # so many kills count as one attempt: mostly the machine is the cause, and not the rank
_LOCKED_SECONDS = 30.0  # until a rank is tried again whose lock another process holds


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


@dataclass(frozen=True)
class Record:
    """Attributes:
    tries: attempts in a row that ended by a failure or a death, all but the first without
        progress.
    reached: the rank's progress at the end of the last of them.
    why: the cause, if the rank is given up.
    alone: the owner has no other rank, so its death counts as an attempt.
    """

    tries: int = 0
    reached: Progress = (0, 0, 0)
    why: str = ""
    alone: bool = False


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
        self._taken_at: dict[int, float] = {}
        self.failures = 0
        """How often in a row ``next`` could not read or write the store."""
        self._given_up = (
            f"{GIVEN_UP}-{xxhash.xxh32(os.environb.get(LAUNCH.encode(), b'')).hexdigest()}"
        )
        self._held: dict[int, tuple[Mark, Record]] = {}
        # Ranks with foreign locks, with the time of the next try.
        self._locked: dict[int, float] = {}
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
            taken = self._take_any()
            self.failures = 0
            return taken
        return None

    def _take_any(self) -> int | None:
        look = self._store.look()
        free = self._free(look).ranks
        if self._is_worker:
            random.shuffle(free)
        for rank in free:
            if self._take(rank, look):
                return rank
        return None

    @property
    def has_time(self) -> bool:
        return self._has_time(sum(self._took) / max(1, len(self._took)))

    def complete(self, rank: int) -> None:
        with self._guard, _hint():
            self.done.add(rank)
            self._took.append(time.monotonic() - self._taken_at[rank])
            mark, _ = self._held.pop(rank)
            if self._is_current(mark):
                self._store.remove(mark)

    def release(self, rank: int) -> None:
        with self._guard:
            self._let_go(rank, self._held[rank][1])

    def lost(self, rank: int) -> None:
        """Frees a rank whose lock another process holds, and that is tried again later."""
        with self._guard:
            self._locked[rank] = time.monotonic() + _LOCKED_SECONDS
            self.release(rank)

    def failed(self, rank: int, why: str, for_good: bool) -> None:
        """Counts a failure. The rank is given up if it would fail again (``for_good``), or has
        failed too often.
        """
        with self._guard:
            record = self._counted(rank, self._held[rank][1])
            if for_good or record.tries >= self._max_attempts:
                record = replace(record, why=why)
            self._let_go(rank, record)

    def given_up(self) -> dict[int, str]:
        with self._guard:
            return given_up(self._store, self._given_up_prefix)

    def others(self) -> list[Claimant]:
        with self._guard:
            return [other for other in claimants(self._store, self._owner) if other.is_alive]

    def workers(self) -> list[Claimant]:
        return [other for other in self.others() if not other.runs_all]

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

    @property
    def locked(self) -> set[int]:
        """Returns ranks whose lock another process held at this process's last try."""
        return set(self._locked)

    def _free(self, look: Look) -> Free:
        """Ranks of dead processes come last, and only while this process has no rank."""
        if any(record.alone for _, record in self._held.values()) or any(map(is_run, look.alive)):
            return Free([], False)
        current = look.current()
        free: list[int] = []
        left: list[int] = []
        for rank in self._incomplete():
            mark = current.get(rank)
            if (
                rank in self._held
                or rank in self.done
                or self._locked.get(rank, 0.0) > time.monotonic()
            ):
                continue
            if (
                mark is None
                or mark.owner == self._owner
                or not (is_process(mark.owner) or self._is_given_up(mark))
            ):
                free.append(rank)  # its own mark, but not held: the write failed after it was done
            elif is_process(mark.owner) and mark.owner not in look.alive:
                left.append(rank)
        if not free and not self._held:
            return Free(left, True)
        return Free(free, False)

    def _take(self, rank: int, look: Look) -> bool:
        mark = look.current().get(rank)
        record = Record()
        is_left = False
        number = 1
        if mark is not None:
            is_mine = mark.owner == self._owner
            if self._is_given_up(mark):
                return False
            if not mark.owner.startswith(GIVEN_UP):
                record = _record(self._store, mark)
            is_left = is_process(mark.owner) and not is_mine
            number = mark.number + 1
        if is_left and self._held:
            return False
        if is_left and record.alone:
            record = self._counted(rank, record)
            if record.tries >= self._max_attempts * _KILLS:
                why = (
                    f"the process that ran it was killed, {plural(record.tries, 'time')} in a "
                    "row without progress"
                )
                self._put(Mark(rank, number, self._given_up), replace(record, why=why), look)
                return False
        record = replace(record, alone=self._alone or is_left)
        mine = Mark(rank, number, self._owner)
        if not self._put(mine, record, look):
            return False
        self._held[rank] = mine, record
        self._taken_at[rank] = time.monotonic()
        return True

    @property
    def _given_up_prefix(self) -> str:
        if self._is_worker:
            return self._given_up
        return GIVEN_UP

    def _is_given_up(self, mark: Mark) -> bool:
        return mark.owner.startswith(self._given_up_prefix)

    def _let_go(self, rank: int, record: Record) -> None:
        mark, _ = self._held.pop(rank)
        owner = self._given_up if record.why else FREE
        with _hint():
            if not self._is_current(mark):
                return
            if record.tries or record.why:
                self._put(Mark(rank, mark.number + 1, owner), record, Look([mark], set(), set()))
            else:
                self._store.remove(mark)

    def _is_current(self, mark: Mark) -> bool:
        return self._store.look().current().get(mark.rank) == mark

    def _put(self, mark: Mark, record: Record, before: Look) -> bool:
        if not self._store.put(mark, orjson.dumps(asdict(record))):
            return False
        for old in before.marks:
            if old.rank == mark.rank:
                self._store.remove(old)
        return True

    def _counted(self, rank: int, record: Record) -> Record:
        try:
            reached = self._reached(rank)
        except (OSError, CkptError) as error:
            logger.warning(
                f"How far task {rank} is cannot be read: {error}. It counts as an attempt without "
                "progress."
            )
            reached = record.reached
        tries = record.tries + 1
        if reached > record.reached:
            tries = 1
        return replace(record, tries=tries, reached=reached)

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


def claimants(store: DiskReader | ObjectClaims, without: str = "") -> list[Claimant]:
    """Returns all processes that are alive or have left ranks, ``without`` this owner."""
    look = store.look()
    ranks: dict[str, list[int]] = {owner: [] for owner in sorted(look.alive)}
    for rank, mark in sorted(look.current().items()):
        if is_process(mark.owner):
            ranks.setdefault(mark.owner, []).append(rank)
    ranks.pop(without, None)
    return [
        Claimant(store.name(owner), claimed, owner in look.alive, is_run(owner))
        for owner, claimed in ranks.items()
    ]


def given_up(store: DiskReader | ObjectClaims, prefix: str = GIVEN_UP) -> dict[int, str]:
    marks = store.look().current().values()
    return {mark.rank: _record(store, mark).why for mark in marks if mark.owner.startswith(prefix)}


def _record(store: DiskReader | ObjectClaims, mark: Mark) -> Record:
    try:
        content = orjson.loads(store.read(mark))
        return Record(content["tries"], tuple(content["reached"]), content["why"], content["alone"])
    except (orjson.JSONDecodeError, KeyError, TypeError):  # gone, or cut off by a power loss
        return Record()
