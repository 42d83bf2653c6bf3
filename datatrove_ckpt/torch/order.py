"""Computes the order of an epoch: which row of which block stands at which position, and which
worker reads it.

Seed, epoch, window and the blocks of the input define one order for all ranks and workers. So a
state needs only a position (the number of samples before it), at which any number of ranks and
workers can continue.

    blocks -> shuffled, so that each stretch has blocks of all files in proportion
           -> cut into canonical shares of equal numbers of rows
           -> each share is read window by window; the rows of a window come in shuffled order
           -> position p is row p // shares of share p % shares, while all shares have rows

Canonical shares are the idea of MosaicML Streaming (``num_canonical_nodes``). The number of shares
follows from the window and the input alone. Blocks of a compressed file keep their order, and a
share reads up to ``OPEN_STREAMS`` of them at a time.

Permutations sort by a hash of the number (splitmix64): numpy's generators may change.

Ranks take turns by the row, and the workers of a rank by the batch, or without ``batch_size`` by
the row. So for any number of ranks and workers, the global batch of step s has the positions from
``s * world_size * batch_size`` on. After a ``ConsumedRound`` the remaining positions are dealt out
anew. A state holds the rounds so far.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import groupby, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from datatrove_ckpt.readers.blocks import Block

Numbers = npt.NDArray[np.int64]

OPEN_BLOCKS = 24
"""A share has at least this many blocks in its window; else there are fewer shares."""
OPEN_STREAMS = 16
_ROW_BYTES = 64
"""The least size of a row in a window: its place in the order also takes memory."""
_TOGETHER_BYTES = 2**20
"""Blocks that are read together in the order of the input."""
_SHARE_COUNTS = (1, 2, 4, *(3 * 2**n for n in range(1, 14)))
"""Numbers with many divisors: workers that divide the number of shares read no block twice."""


@dataclass(frozen=True, slots=True)
class Window:
    """The size of the shuffle over all ranks and workers: ``rows`` or ``bytes``, the other None."""

    rows: int | None = None
    bytes: int | None = None

    @property
    def limit(self) -> int:
        return self.rows or self.bytes or 1


class BlockTable:
    """The blocks of an input as columns.

    Args:
        streams: the compressed files.
        limit: leave out all rows after so many; -1: none.
        size: bytes of a row in memory, for each of its bytes in the file.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        streams: Iterable[int] = (),
        skip: int = 0,
        limit: int = -1,
        size: int = 1,
    ) -> None:
        columns = [(block.file, block.first, block.rows, block.bytes) for block in blocks]
        table = np.array(columns, dtype=np.int64).reshape(-1, 4)
        self.file, self.first, rows, in_file = (np.ascontiguousarray(column) for column in table.T)
        ends = np.cumsum(rows)
        last = int(rows.sum())
        if limit >= 0:
            last = min(skip + limit, last)
        self.start: Numbers = np.clip(skip - (ends - rows), 0, rows)
        self.rows: Numbers = np.clip(last - (ends - rows), 0, rows) - self.start
        self.bytes: Numbers = np.maximum(
            size * in_file * self.rows // np.maximum(rows, 1), _ROW_BYTES * self.rows
        )
        self.is_stream = np.isin(self.file, np.fromiter(streams, np.int64))
        self.total = int(self.rows.sum())

    @cached_property
    def hash(self) -> str:
        columns = np.stack([self.file, self.first, self.start, self.rows, self.bytes])
        return xxh3_64_hexdigest(columns.astype("<i8").tobytes())

    @cached_property
    def used(self) -> Numbers:
        return np.flatnonzero(self.rows)

    def weights(self, window: Window) -> Numbers:
        if window.rows is not None:
            return self.rows
        return np.maximum(self.bytes, 1)

    def mean(self, window: Window) -> float:
        if len(self.used) > 1:
            return float(self.weights(window)[self.used].mean())
        return 0.0


@dataclass(frozen=True, slots=True)
class Pieces:
    block: Numbers
    start: Numbers
    rows: Numbers

    def part(self, low: int, high: int) -> "Pieces":
        return Pieces(self.block[low:high], self.start[low:high], self.rows[low:high])


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """A window of one share.

    Attributes:
        order: the rows of the window in their order, as numbers that count over all its pieces.
        shuffled: the next window does not begin where this window ends.
    """

    pieces: Pieces
    order: Numbers
    first: int
    shuffled: bool

    def locate(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the rows' pieces and places."""
        places = self.order[rows]
        return np.searchsorted(np.cumsum(self.pieces.rows), places, side="right"), places


class EpochShare:
    def __init__(
        self,
        pieces: Pieces,
        weights: Numbers,
        limit: float,
        salt: int | None,
        files: Numbers | None = None,
    ) -> None:
        """Cuts a share into windows.

        Args:
            salt: salt of the permutations; None: rows in the order of the input.
            files: the file of each block, if a window has one stretch of each file only. Files
                take turns; without permutations, a window has one file: columns may differ.
        """
        self._pieces = pieces
        self._salt = salt
        self._files = files
        self.rows = int(pieces.rows.sum())
        self._cuts = _cut_windows(weights, limit)
        if salt is None and files is not None:
            changes = np.flatnonzero(np.diff(files[pieces.block])) + 1
            self._cuts = np.union1d(self._cuts, changes)
        self._ends: Numbers = np.cumsum(pieces.rows)[self._cuts[1:] - 1]

    def window_of(self, rows: Numbers) -> Numbers:
        return np.searchsorted(self._ends, rows, side="right")

    def window(self, number: int) -> OpenWindow:
        first = 0
        if number:
            first = int(self._ends[number - 1])
        count = int(self._ends[number]) - first
        pieces = self._pieces.part(*self._cuts[number : number + 2])
        if self._salt is None:
            return OpenWindow(pieces, np.arange(count), first, False)
        salt = hashed(self._salt, number)
        # splitmix64 is a bijection, so the fastest sort gives the same order.
        order = np.argsort(_hashes(np.arange(count), salt))
        if self._files is not None:
            order = _in_turns(pieces, self._files, order, salt)
        return OpenWindow(pieces, order, first, True)


class EpochOrder:
    def __init__(self, shares: Sequence[EpochShare]) -> None:
        self.shares = shares
        lengths = np.array([share.rows for share in shares], dtype=np.int64)
        self.rows = int(lengths.sum())
        self._levels = np.unique(np.concatenate([[0], lengths]))
        self._active = [np.flatnonzero(lengths > level) for level in self._levels[:-1]]
        counts = np.array([len(active) for active in self._active], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(counts * np.diff(self._levels))])

    def locate(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        share = np.empty_like(positions)
        row = np.empty_like(positions)
        level = np.searchsorted(self._starts, positions, side="right") - 1
        for number in distinct(level):
            chosen = level == number
            active = self._active[number]
            turn = positions[chosen] - self._starts[number]
            share[chosen] = active[turn % len(active)]
            row[chosen] = self._levels[number] + turn // len(active)
        return share, row


def distinct(numbers: Numbers) -> Numbers:
    """Returns distinct small numbers. np.unique takes 20 times as long."""
    return np.flatnonzero(np.bincount(numbers))


def order_by_rows(table: BlockTable, seed: int | None, epoch: int, window: Window) -> EpochOrder:
    """``seed`` None: the order of the input, in one share."""
    if seed is None:
        return EpochOrder([_in_order(table, table.used)])
    salt = hashed(seed, epoch)
    if table.is_stream.any():
        count = 1
        if len(np.unique(table.file[table.used])) >= 2 * OPEN_STREAMS:
            count = 2
        return order_by_files(table, seed, epoch, window, count)
    weights = table.weights(window)
    opened = min(window.limit / max(1.0, table.mean(window)), len(table.used))
    count = max((count for count in _SHARE_COUNTS if count <= opened / OPEN_BLOCKS), default=1)
    pieces = _whole(table, shuffled_blocks(table, table.used, salt))
    cuts = [table.total * number // count for number in range(count + 1)]
    ends = np.cumsum(pieces.rows)
    parts = [_rows_between(pieces, ends, low, high) for low, high in pairwise(cuts)]
    limit = window.limit / count
    return EpochOrder(
        [
            EpochShare(part, weights[part.block], limit, hashed(salt, n))
            for n, part in enumerate(parts)
        ]
    )


def order_by_files(
    table: BlockTable, seed: int | None, epoch: int, window: Window, count: int
) -> EpochOrder:
    """Makes ``count`` shares of whole files, with at least ``OPEN_BLOCKS`` in a window."""
    share_of = deal_files(table, count)[table.file[table.used]]
    weights = table.weights(window)
    limit = max(window.limit / count, min(window.limit, OPEN_BLOCKS * table.mean(window)))
    files = table.file if table.is_stream.any() else None
    shares = []
    for number in range(count):
        blocks = table.used[share_of == number]
        if seed is None:
            shares.append(_in_order(table, blocks))
            continue
        salt = hashed(seed, epoch)
        blocks = shuffled_blocks(table, blocks, hashed(salt, number))
        share_salt = hashed(salt, count, number)
        shares.append(EpochShare(_whole(table, blocks), weights[blocks], limit, share_salt, files))
    return EpochOrder(shares)


def deal_files(table: BlockTable, count: int) -> Numbers:
    """Deals files out to shares: the longest file first, each to the share with the fewest rows."""
    rows = np.bincount(table.file, weights=table.rows).astype(np.int64)
    sums = [(0, number) for number in range(count)]
    dealt = np.zeros(len(rows), np.int64)
    for file in np.argsort(-rows, kind="stable"):
        length, share = heappop(sums)
        heappush(sums, (length + int(rows[file]), share))
        dealt[file] = share
    return dealt


def unevenness(table: BlockTable, count: int) -> float:
    """Returns the part of the longest share of whole files that the shortest share lacks."""
    sums = np.bincount(deal_files(table, count)[table.file], weights=table.rows, minlength=count)
    if sums.max():
        return float(1 - sums.min() / sums.max())
    return 0.0


def shuffled_blocks(table: BlockTable, blocks: Numbers, salt: int) -> Numbers:
    files, inverse = np.unique(table.file[blocks], return_inverse=True)
    within = np.where(
        table.is_stream[blocks], np.arange(len(blocks), dtype=np.uint64), _hashes(blocks, salt)
    )
    by_file = np.lexsort((within, inverse))
    blocks = blocks[by_file]
    of_file = inverse[by_file]
    rows = table.rows[blocks]
    sums = np.bincount(of_file, weights=rows)
    before = np.cumsum(rows) - rows - (np.cumsum(sums) - sums)[of_file]
    # One random number per file, so that files of equal size take turns exactly.
    turn = _hashes(files, hashed(salt, "turns")) / 2.0**64
    keys = (before + rows * turn[of_file]) / sums[of_file]
    streams = np.unique(of_file[table.is_stream[blocks]])
    if len(streams):
        groups = -(-len(streams) // OPEN_STREAMS)
        group_of = np.zeros(len(files))
        group_of[streams[np.argsort(_hashes(files[streams], hashed(salt, "files")))]] = (
            np.arange(len(streams)) % groups
        )
        keys = np.where(table.is_stream[blocks], (group_of[of_file] + keys) / groups, keys)
    return blocks[np.argsort(keys, kind="stable")]


def _in_turns(pieces: Pieces, files: Numbers, order: Numbers, salt: int) -> Numbers:
    """Each turn has one row of each of the equally long files."""
    numbers, of_file = np.unique(files[pieces.block], return_inverse=True)
    file = np.repeat(of_file, pieces.rows)
    by_file = order[np.argsort(file[order], kind="stable")]
    rows = np.bincount(file, minlength=len(numbers))
    turn = np.arange(len(order)) - np.repeat(np.cumsum(rows) - rows, rows)
    chance = _hashes(by_file, hashed(salt, "turns")) / 2.0**64
    return by_file[np.argsort((turn + chance) / np.repeat(rows, rows), kind="stable")]


def hashed(*key: object) -> int:
    return int(xxh3_64_intdigest("/".join(map(str, key)).encode()))


def _hashes(numbers: Numbers, salt: int) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        ) + np.uint64(salt)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _whole(table: BlockTable, blocks: Numbers) -> Pieces:
    return Pieces(blocks, table.start[blocks], table.rows[blocks])


def _rows_between(pieces: Pieces, ends: Numbers, low: int, high: int) -> Pieces:
    first = int(np.searchsorted(ends, low, side="right"))
    last = int(np.searchsorted(ends, high, side="left")) + 1
    part = pieces.part(first, last)
    starts = ends[first:last] - part.rows
    skipped = np.maximum(0, low - starts)
    return Pieces(part.block, part.start + skipped, np.minimum(part.rows, high - starts) - skipped)


def _in_order(table: BlockTable, blocks: Numbers) -> EpochShare:
    return EpochShare(_whole(table, blocks), table.bytes[blocks], _TOGETHER_BYTES, None, table.file)


def _cut_windows(weights: Numbers, limit: float) -> Numbers:
    cuts = [0]
    ends = np.cumsum(weights)
    first = 0
    while first < len(weights):
        before = ends[first] - weights[first]
        first = max(first + 1, int(np.searchsorted(ends, before + limit, side="right")))
        cuts.append(first)
    return np.array(cuts, dtype=np.int64)


# who reads which position

Even = Literal["drop", "repeat"] | None


@dataclass(frozen=True, slots=True)
class Topology:
    """The number of ranks and of workers of each rank (1: the rank itself reads).

    Attributes:
        batch: how many samples in a row a worker gets.
    """

    ranks: int
    workers: int
    batch: int = 1

    @property
    def slots(self) -> int:
        """All ranks' first workers come first, then all second workers."""
        return self.ranks * self.workers

    def of_rank(self, rows: int, rank: int, even: Even) -> int:
        if even == "drop":
            return rows // self.ranks
        if even == "repeat":
            return -(-rows // self.ranks)
        return (rows - rank + self.ranks - 1) // self.ranks

    def of_worker(self, rows: int, rank: int, worker: int, even: Even) -> int:
        mine = self.of_rank(rows, rank, even)
        turns, remainder = divmod(mine, self.workers * self.batch)
        return turns * self.batch + min(max(remainder - worker * self.batch, 0), self.batch)

    def places(self, rank: int, worker: int, samples: Numbers) -> Numbers:
        turn = samples // self.batch
        offset = samples % self.batch
        return ((turn * self.workers + worker) * self.batch + offset) * self.ranks + rank

    def owner(self, places: Numbers) -> tuple[Numbers, Numbers]:
        in_rank = places // self.ranks
        rank = places % self.ranks
        batch = in_rank // self.batch
        offset = in_rank % self.batch
        return batch % self.workers * self.ranks + rank, batch // self.workers * self.batch + offset


@dataclass(frozen=True)
class ConsumedRound:
    topology: Topology
    counts: tuple[int, ...]

    def to_json(self) -> list[object]:
        runs = [[len(list(run)), count] for count, run in groupby(self.counts)]
        return [self.topology.ranks, self.topology.workers, self.topology.batch, runs]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "ConsumedRound":
        ranks, workers, batch, runs = values
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


class RemainingPositions:
    def __init__(self, rows: int, rounds: Sequence[ConsumedRound] = ()) -> None:
        self.rows = rows
        self._steps: list[tuple[Numbers, int]] = []
        for consumed in rounds:
            holes = consumed.holes(self.rows)
            self._steps.append((holes, consumed._end))
            self.rows = len(holes) + max(0, self.rows - consumed._end)

    def positions(self, places: Numbers) -> Numbers:
        """Returns the positions of places in the remaining list, which repeats."""
        result = places % max(1, self.rows)
        for holes, end in reversed(self._steps):
            beyond = end + result - len(holes)
            if len(holes):
                beyond = np.where(
                    result < len(holes), holes[np.minimum(result, len(holes) - 1)], beyond
                )
            result = beyond
        return result
