"""Decides who reads which positions of an epoch: ranks and workers take turns.

Ranks take turns by the row, and the workers of a rank by the batch, or without ``batch_size`` by
the row. So for any number of ranks and workers, the global batch of step s has the positions from
``s * world_size * batch_size`` on. After a ``Round`` the remaining positions are dealt out anew. A
state holds the rounds so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import numpy as np

from datatrove_ckpt.torch.order import Numbers

Even = Literal["drop", "repeat"] | None


@dataclass(frozen=True, slots=True)
class Topology:
    """The number of ranks and of workers of each rank (1: the rank itself reads).

    ``batch``: how many samples in a row a worker gets.
    """

    ranks: int
    workers: int
    batch: int = 1

    @property
    def slots(self) -> int:
        """The number of workers.

        They are numbered in turn: all ranks' first ones, then all ranks' second ones.
        """
        return self.ranks * self.workers

    def of_rank(self, rows: int, rank: int, even: Even) -> int:
        if even == "drop":
            return rows // self.ranks
        if even == "repeat":
            return -(-rows // self.ranks)
        return (rows - rank + self.ranks - 1) // self.ranks

    def of_worker(self, rows: int, rank: int, worker: int, even: Even) -> int:
        mine = self.of_rank(rows, rank, even)
        turns, rest = divmod(mine, self.workers * self.batch)
        return turns * self.batch + min(max(rest - worker * self.batch, 0), self.batch)

    def places(self, rank: int, worker: int, samples: Numbers) -> Numbers:
        """Returns the places, in the list that is dealt out, of a worker's samples with these
        numbers.
        """
        turn = samples // self.batch
        offset = samples % self.batch
        return ((turn * self.workers + worker) * self.batch + offset) * self.ranks + rank

    def owner(self, places: Numbers) -> tuple[Numbers, Numbers]:
        """Reverts ``places``: returns the slots, and the numbers of the samples there."""
        in_rank = places // self.ranks
        rank = places % self.ranks
        batch = in_rank // self.batch
        offset = in_rank % self.batch
        return batch % self.workers * self.ranks + rank, batch // self.workers * self.batch + offset


@dataclass(frozen=True)
class Round:
    topology: Topology
    counts: tuple[int, ...]

    def to_json(self) -> list[object]:
        runs = [[len(list(run)), count] for count, run in groupby(self.counts)]
        return [self.topology.ranks, self.topology.workers, self.topology.batch, runs]

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> Round:
        ranks, workers, batch, runs = content
        counts = tuple(count for length, count in runs for _ in range(length))
        return cls(Topology(ranks, workers, batch), counts)

    @cached_property
    def _end(self) -> int:
        batch = self.topology.batch
        return -(-max(self.counts) // batch) * batch * self.topology.slots

    def holes(self, rows: int) -> Numbers:
        batch = self.topology.batch
        low = min(self.counts) // batch * batch * self.topology.slots
        high = min(self._end, rows)
        places = np.arange(low, max(low, high))
        slots, samples = self.topology.owner(places)
        return places[samples >= np.array(self.counts)[slots]]


class Remaining:
    """The positions of an epoch that are left after some rounds, in their order."""

    def __init__(self, rows: int, rounds: Sequence[Round] = ()) -> None:
        self.rows = rows
        self._steps: list[tuple[Numbers, int]] = []
        for one in rounds:
            holes = one.holes(self.rows)
            self._steps.append((holes, one._end))
            self.rows = len(holes) + max(0, self.rows - one._end)

    def positions(self, places: Numbers) -> Numbers:
        """Returns the positions in the epoch of these places in the remaining list, which repeats
        after its end.
        """
        found = places % max(1, self.rows)
        for holes, end in reversed(self._steps):
            beyond = end + found - len(holes)
            if len(holes):
                beyond = np.where(
                    found < len(holes), holes[np.minimum(found, len(holes) - 1)], beyond
                )
            found = beyond
        return found
