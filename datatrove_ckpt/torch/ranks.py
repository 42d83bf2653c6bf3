"""Lets the ranks of a training agree, and finds the rank that writes to each folder."""

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import orjson
import torch
import torch.distributed as dist
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CkptError, ConfigError, StorageFailed, WorkerDied
from datatrove_ckpt.torch.progress import PROGRESS

_T = TypeVar("_T")

_LOOK_SECONDS = 10.0
"""Between two looks at the progress of ranks that have not come; longer than between two records of
it.
"""
_WARN_LOOKS = 2
_POLL_SECONDS = 0.1
_numbers = itertools.count()


class Ranks:
    """All ranks of torch.distributed, or one rank without it.

    The ranks use a group of their own on the CPU, so that nothing waits for the GPUs.

    A call begins with ``barrier``: each rank records its call and its progress in the store of
    torch.distributed, and the first rank waits for the others. Every 10 seconds it reads their
    records. It is an error if another rank makes another call, if it has passed the call (since the
    last call of all ranks it has taken more batches, or begun more exchanges with all ranks), or if
    it has ended and closed its connections. Without such evidence the others may be slow: a warning
    names them.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        """None: there is one rank."""
        self.writing = self.group
        """The group of the writing threads."""
        self.rank = 0
        self.size = 1
        self._meetings = 0
        self._place = ""
        """The key in the store at which ranks that make this call meet."""
        self._progress = self._progress_before = [0, 0]
        """The progress of this rank at this call, and at the call before."""
        self._store: dist.Store | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            store = dist.group.WORLD.get_group_store()
            self._store = dist.PrefixStore(f"datatrove_ckpt {next(_numbers)}", store)
            PROGRESS.start()
            self.barrier("TrainingCheckpoints()")
            self.group = _new_group()
            self.writing = _new_group()

    def barrier(self, call: str) -> None:
        """Records the call. The first rank waits for a while until all ranks make it.

        Raises:
            ConfigError: another rank does not make the call.
        """
        if self._store is None:
            return
        last = self._place
        self._meetings += 1
        self._place = f"{self._meetings} {call}"
        self._progress_before = self._progress
        self._progress = PROGRESS.counts()
        with _unless_ended():
            record = orjson.dumps([self._meetings, call, self._progress])
            self._store.set(f"at {self.rank}", record)
            come = self._store.add(self._place, 1)
            if come == self.size:
                self._store.set(f"met {self._place}", "")
                self._store.delete_key(last)
                self._store.delete_key(f"met {last}")
            if come == 1:  # of a thousand ranks, one reads the records of all
                self._wait_for_others(self._store, call)

    def _wait_for_others(self, store: dist.Store, call: str) -> None:
        met = [f"met {self._place}"]
        with suppress(RuntimeError):  # the time is over; of a store that has gone, the next raises
            store.wait(met, timedelta(seconds=_LOOK_SECONDS))
            return
        seen = dict[int, int]()
        for look in itertools.count(1):
            missing = self._missing_ranks(store, call)
            records = {rank: PROGRESS.record_of(rank)[0] for rank in missing}
            if records.items() & seen.items() and self.group is not None:
                return  # a rank writes no records: ``gather`` raises if it has ended
            seen = records
            if look == _WARN_LOOKS:
                logger.warning(
                    f"{call}: rank {', '.join(map(str, missing))} has not called it for "
                    f"{look * _LOOK_SECONDS:.0f} s. The wait continues. If it never comes, call "
                    "this in all ranks."
                )
            # torch would log each end of ``store.wait``.
            for _ in range(round(_LOOK_SECONDS / _POLL_SECONDS)):
                if store.check(met):
                    return
                time.sleep(_POLL_SECONDS)

    def _missing_ranks(self, store: dist.Store, call: str) -> list[int]:
        missing = []
        for rank in range(self.size):
            record = b'[0, "", [0, 0]]'
            if store.check([f"at {rank}"]):
                record = store.get(f"at {rank}")
            meetings, other, before = orjson.loads(record)
            if meetings >= self._meetings and other != call:
                raise ConfigError(
                    f"Rank {self.rank} calls {call}, and rank {rank} {other}. "
                    "All ranks make the same calls at the same steps."
                )
            if meetings >= self._meetings:
                continue
            missing.append(rank)
            _, *now = PROGRESS.record_of(rank)
            own_now = PROGRESS.counts()
            if not own_now[0]:
                now[0] = 0  # the other rank may take the batches of both
            counts = zip(before, now, self._progress_before, own_now, strict=True)
            for then, count, own_then, own_count in counts:
                if then == own_then and count > own_count:
                    raise ConfigError(
                        f"{call}: rank {rank} has gone on without it, and rank {self.rank} waits "
                        "for it. Call this in all ranks: they save and restore together."
                    )
        return missing

    def gather(self, value: _T) -> list[_T]:
        if self.group is None:
            return [value]
        values = [value] * self.size
        with _unless_ended():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, call: Callable[[], _T]) -> list[_T]:
        """Makes a call in each rank.

        Returns the results of all ranks; raises this rank's error, or another rank's.
        """
        result = []
        error: Exception | None = None
        shared_error: CkptError | None = None
        try:
            result.append(call())
        except Exception as raised:
            error = raised
            shared_error = StorageFailed(f"Another rank failed: {failure_line(raised)}")
            if isinstance(raised, CkptError):  # errors of libraries may not be pickled
                shared_error = raised
        gathered = self.gather((result, shared_error))
        for failure in (error, *(other for _, other in gathered)):
            if failure is not None:
                raise failure
        return [each for results, _ in gathered for each in results]

    def highest(self, values: Sequence[float]) -> list[float]:
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with _unless_ended():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return [*tensor.tolist()]

    def owner(self, folder: Path) -> int:
        """Returns the lowest rank that sees this very folder, on a disk of its node or a shared
        disk.
        """
        if self.group is None:
            return 0
        shared = folder / ".id"
        files.keep_first(shared, uuid.uuid4().bytes)
        return self.gather(shared.read_bytes()).index(shared.read_bytes())


def _new_group() -> dist.ProcessGroup:
    # While one rank fetches or writes a step, the others wait.
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))


@contextmanager
def _unless_ended() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise WorkerDied(
            f"Another rank has ended: its log says why. ({failure_line(error)})"
        ) from error
