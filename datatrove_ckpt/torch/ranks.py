"""The ranks of a training: what they tell each other, and which of them write to which folder."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """All ranks of torch.distributed, or one without it. Each rank makes one, and makes the same calls.

    They talk through the CPU, in a group of their own, so that nothing waits for the GPUs.
    """

    def __init__(self) -> None:
        self.group: Any = None
        """None: there is one rank."""
        self._is_alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = 0
        self.size = 1
        if not self._is_alone:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            self.group = dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        if self._is_alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def highest(self, values: Sequence[float]) -> list[float]:
        """Of each number the highest of all ranks."""
        if self._is_alone:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in tensor.tolist()]

    def owner(self, folder: Path) -> int:
        """The lowest rank that sees this very folder: a disk of its node, or one that nodes share."""
        if self._is_alone:
            return 0
        own = folder / f".id-{uuid.uuid4().hex}"
        shared = folder / ".id"
        own.write_text(uuid.uuid4().hex)
        with suppress(FileExistsError):
            os.link(own, shared)
        own.unlink()
        return self.gather(shared.read_text()).index(shared.read_text())
