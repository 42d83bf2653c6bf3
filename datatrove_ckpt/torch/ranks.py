"""The ranks of a training: how they agree, and which of them write to which folder."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CkptError, StorageFailed

_T = TypeVar("_T")


class Ranks:
    """All ranks of torch.distributed, or one rank without it. Each rank makes one, and the same
    calls.

    They use a group of their own on the CPU, so that nothing waits for the GPUs.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        """None: there is one rank."""
        self.writing = self.group
        """The group of the writing threads."""
        self.rank = 0
        self.size = 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            self.group = _new_group()
            self.writing = _new_group()

    def gather(self, value: _T) -> list[_T]:
        if self.group is None:
            return [value]
        values = [value] * self.size
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
