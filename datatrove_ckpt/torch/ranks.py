"""Lets the ranks of a training agree, and finds the rank that writes to each folder."""

import ast
import itertools
import linecache
import re
import time
import traceback
import uuid
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
from datatrove_ckpt.user_code import statements

_T = TypeVar("_T")

_PATIENCE = timedelta(seconds=20)
_numbers = itertools.count()
_STARTED = time.time()
# Conditions that only rank 0 meets. Each rank may have the tp_rank or local_rank 0.
_ALONE = re.compile(
    r"((^|\W|global_|world_|get_)rank\W{0,4} == 0|(^| and )(not ([\w.]*\.)?rank|([\w.]*\.)?"
    r"(is_(main|master|chief)|(is_)?(main_process|master_process|global_zero|world_process_zero|"
    r"rank_zero|rank_?0))(\(\))?))($| and )",
    re.IGNORECASE,
)


class Ranks:
    """All ranks of torch.distributed, or one rank without it. Each rank makes an instance, and the
    same calls.

    The ranks use a group of their own on the CPU, so that nothing waits for the GPUs.

    A call begins with ``barrier``: each rank records its call in the store of torch.distributed,
    and the first rank waits for the others. After 20 seconds it reads their records. It is an error
    if another rank makes another call, if an ``if rank == 0:`` of the user's code leads to this
    call, so that the others never come, or if a rank has ended and closed its connections. Without
    such evidence the others may be slow: a warning names them, and the rank continues to wait.
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
        with _unless_ended():
            self._store.set(f"at {self.rank}", self._place)
            come = self._store.add(self._place, 1)
            if come == self.size:
                self._store.set(f"met {self._place}", "")
                self._store.delete_key(last)
                self._store.delete_key(f"met {last}")
            if come > 1:  # of a thousand ranks, one reads the records of all
                return
            try:
                self._store.wait([f"met {self._place}"], _PATIENCE)
            except RuntimeError:  # the time is over; of a store that has gone, the next call raises
                self._explain(self._store, call)

    def _explain(self, store: dist.Store, call: str) -> None:
        missing = []
        for rank in range(self.size):
            record = "0"
            if store.check([f"at {rank}"]):
                record = store.get(f"at {rank}").decode()
            if int(record.split()[0]) < self._meetings:
                missing.append(str(rank))
            elif record != self._place:
                other = record.partition(" ")[2]
                raise ConfigError(
                    f"Rank {self.rank} calls {call}, and rank {rank} {other}. "
                    "All ranks make the same calls at the same steps."
                )
        if not missing:
            return
        missing_ranks = f"{call}: rank {', '.join(missing)}"
        for frame, line in traceback.walk_stack(None):
            file = frame.f_code.co_filename
            lines = _lines(file)
            condition = _lone_condition("".join(lines), line)
            if condition and len(missing) == self.size - 1:  # else several ranks pass it
                guard = lines[condition - 1].strip()
                lone = lines[line - 1].strip()
                raise ConfigError(
                    f"{missing_ranks} cannot come, because of `{guard}` in {file}, line "
                    f"{condition}. All ranks save and restore together: write `{lone}` (line "
                    f"{line}) without it."
                )
        logger.warning(
            f"{missing_ranks} has not called it for {_PATIENCE.seconds} s. The wait continues: a "
            "rank may be slow. If it never comes, call this in all ranks, not in one of them."
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
        highest: list[float] = tensor.tolist()
        return highest

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


def _lines(file: str) -> list[str]:
    """Returns the lines of a file; none if the file was edited while it ran."""
    with suppress(OSError):
        if Path(file).stat().st_ctime > _STARTED:
            return []
    return linecache.getlines(file)


def _lone_condition(source: str, line: int) -> int:
    """Returns the line of the ``if`` that lets rank 0 alone reach a line; 0: there is none, or the
    code after a ``return`` in it may be an ``else``.
    """
    with suppress(SyntaxError):
        for node in ast.walk(statements.parse(source)):
            if not isinstance(node, ast.If) or isinstance(node.body[-1], ast.Return):
                continue
            if not node.orelse and node.lineno <= line:
                test = ast.unparse(node.test)
                if line <= (node.end_lineno or 0) and _ALONE.search(test) and " or " not in test:
                    return node.lineno
    return 0
