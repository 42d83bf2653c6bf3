"""The ranks of a training: how they agree, and which of them write to which folder."""

from __future__ import annotations

import atexit
import itertools
import linecache
import math
import re
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CkptError, ConfigError, StorageFailed, WorkerDied

_T = TypeVar("_T")

_PATIENCE = timedelta(seconds=20)
_numbers = itertools.count()
# Names of one rank of all: tp_rank and local_rank may be 0 in each rank.
_ALONE = re.compile(
    r"\b(if|and)\b(.*(\W|global_|world_|get_)rank\W{0,4}== ?0\b| not ([\w.]*\.)?rank\b"
    r"| ([\w.]*\.)?(is_)?(main_process|master|master_process|global_zero|world_process_zero|"
    r"rank_zero)\b)",
    re.IGNORECASE,
)


class Ranks:
    """All ranks of torch.distributed, or one rank without it. Each rank makes one, and the same
    calls.

    They use a group of their own on the CPU, so that nothing waits for the GPUs.

    A call begins with ``meet``: each rank notes its call in the store of torch.distributed, and
    waits for the others. After 20 seconds it reads their notes. It is an error if another rank
    makes another call or has ended, or if an ``if rank == 0:`` of the user's code leads to this
    call: then the others never come. Without such evidence they may be slow, so it warns, and goes
    on waiting.
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
        self._store: dist.Store | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            store = dist.group.WORLD.get_group_store()
            self._store = dist.PrefixStore(f"datatrove_ckpt {next(_numbers)}", store)
            _all.add(self)
            self.meet("TrainingCheckpoints()")
            self.group = _new_group()
            self.writing = _new_group()

    def meet(self, call: str) -> None:
        """Waits for a while until all ranks make the call.

        Raises:
            ConfigError: another rank does not make it.
        """
        if self._store is None:
            return
        self._meetings += 1
        last = self._place
        self._place = f"{self._meetings} {call}"
        with _unless_ended():
            self.note(call)
            if self._store.add(self._place, 1) == self.size:
                self._store.set(f"met {self._place}", "")
                for key in (last, f"met {last}"):
                    self._store.delete_key(key)
            try:
                self._store.wait([f"met {self._place}"], _PATIENCE)
            except dist.DistStoreError:  # the time is over
                self._look_for_others(self._store, call)

    def note(self, call: str) -> None:
        if self._store is not None:
            self._store.set(f"at {self.rank}", f"{self._meetings} {call}")

    def _look_for_others(self, store: dist.Store, call: str) -> None:
        missing = []
        for rank in range(self.size):
            note = "0 "
            if store.check([f"at {rank}"]):
                note = store.get(f"at {rank}").decode()
            number = int(note.split()[0])
            other = note.partition(" ")[2]
            if other == _END or (number >= self._meetings and other != call):
                raise ConfigError(
                    f"Rank {self.rank} calls {call}, and rank {rank} {other}. All ranks make the "
                    f"same calls: write this {call} so that each rank reaches it."
                )
            if number < self._meetings:
                missing.append(rank)
        who = f"{call}: rank {', '.join(map(str, missing))}"
        for frame, number in traceback.walk_stack(None):
            path = frame.f_code.co_filename
            lines = linecache.getlines(path)
            condition = _condition(lines, frame.f_code.co_firstlineno, number)
            if condition:
                raise ConfigError(
                    f"{who} cannot come, because of `{lines[condition - 1].strip()}` in {path}, "
                    f"line {condition}. All ranks save and restore together: write "
                    f"`{lines[number - 1].strip()}` (line {number}) without that condition."
                )
        logger.warning(
            f"{who} has not called it for {_PATIENCE.seconds} s. Goes on waiting: a rank may be "
            "slow. If it never comes, call this in all ranks, not in one of them."
        )

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
        result: list[_T] = []
        error: Exception | None = None
        told: CkptError | None = None
        try:
            result.append(call())
        except Exception as raised:
            error = raised
            told = StorageFailed(f"Another rank failed: {failure_line(raised)}")
            if isinstance(raised, CkptError):  # errors of libraries may not be pickled
                told = raised
        gathered = self.gather((result, told))
        for found in (error, *(other for _, other in gathered)):
            if found is not None:
                raise found
        return [each for results, _ in gathered for each in results]

    def highest(self, values: Sequence[float]) -> list[float]:
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with _unless_ended():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        highest: list[float] = tensor.tolist()
        return highest

    def owner(self, folder: Path) -> int:
        """Returns the lowest rank that sees this very folder: a disk of its node, or a shared
        one.
        """
        if self.group is None:
            return 0
        own = folder / f".id-{uuid.uuid4().hex}"
        shared = folder / ".id"
        files.disk.write_new(own, [uuid.uuid4().bytes], files.PUBLIC_FILE)
        files.disk.put_new(own, shared)
        files.disk.remove(own)
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


def _condition(lines: Sequence[str], first: int, number: int) -> int:
    """Returns the line of the ``if`` that lets rank 0 alone reach a line of a function; 0: there is
    none, or an ``else`` follows it.
    """
    indent = math.inf
    for at in range(number, first - 1, -1):
        line = lines[at - 1] if at <= len(lines) else ""
        own = len(line) - len(line.lstrip())
        if not line.strip() or own >= indent:
            continue
        indent = own
        if _ALONE.search(line) and " or " not in line:
            after = (each for each in lines[at:] if each.strip())
            end = next((each for each in after if len(each) - len(each.lstrip()) <= own), "")
            return 0 if end.lstrip().startswith("el") else at
    return 0


_END = "has ended"
_all: weakref.WeakSet[Ranks] = weakref.WeakSet()


@atexit.register
def _note_end() -> None:
    for ranks in _all:
        with suppress(Exception):  # the store may have gone
            ranks.note(_END)
