"""Prints how training input mixes, and that other numbers of ranks and workers continue it: ``python -m`` this module.

Only positions are computed, no file is read: the order of 10 files of 100 row groups of 1,000 rows of 1 kB, and of one
compressed file of as many rows.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from datatrove_ckpt.readers.blocks import Block
from datatrove_ckpt.torch.deal import Remaining, Round, Topology
from datatrove_ckpt.torch.order import BlockTable, EpochOrder, Numbers, Window, order_by_rows

ROWS = 1_000_000
BATCH = 32
TOPOLOGIES = [(1, 1), (1, 4), (2, 2), (4, 1), (3, 2), (8, 4), (64, 2)]


def blocks_of(files: int, rows: int = 1000) -> list[Block]:
    """``ROWS`` rows in blocks of as many."""
    per_file = ROWS // files
    return [Block(file, first, rows, rows * 1000) for file in range(files) for first in range(0, per_file, rows)]


def places_in_input(table: BlockTable, order: EpochOrder, positions: Numbers) -> Numbers:
    """Where in the input the rows at these positions are."""
    shares, rows = order.locate(positions)
    found = np.zeros(len(positions), np.int64)
    starts = np.cumsum(table.rows) - table.rows
    for number, share in enumerate(order.shares):
        mine = np.flatnonzero(shares == number)
        windows = share.window_of(rows[mine])
        for one in np.unique(windows):
            window, chosen = share.window(int(one)), mine[windows == one]
            places = window.order[rows[chosen] - window.first]
            ends = np.cumsum(window.pieces.rows)
            piece = np.searchsorted(ends, places, side="right")
            in_piece = places - (ends - window.pieces.rows)[piece]
            found[chosen] = starts[window.pieces.block[piece]] + window.pieces.start[piece] + in_piece
    return found


def mixing(name: str, files: int, window: Window, slots: int, streams: bool = False) -> str:
    """One line of the table."""
    table = BlockTable(blocks_of(files), range(files) if streams else ())
    order = order_by_rows(table, 1, 0, window)
    everything = places_in_input(table, order, np.arange(ROWS))
    mine = everything[::slots]
    batches = mine[: len(mine) // BATCH * BATCH].reshape(-1, BATCH) // (ROWS // files)
    span = np.mean([len(set(batch)) for batch in batches.tolist()])
    near = np.mean(np.abs(np.diff(mine)) < ROWS // 100)
    moved = np.mean(np.abs(everything - np.arange(ROWS))) / ROWS
    size = sum(share.largest_window for share in order.shares) / (1000 if window.rows else 1_000_000)
    cells = [name, slots, len(order.shares), f"{size:.0f} MB", f"{moved:.3f}", f"{100 * near:.1f} %"]
    return f"| {' | '.join(map(str, cells))} | {span:.1f} of {files} |"


def continued(before: Topology, after: Topology) -> str:
    """How often positions come twice, and are left out, if ``after`` continues what ``before`` began."""
    chance = np.random.default_rng(0)
    turns, ahead = int(chance.integers(100, 5000)), int(chance.integers(0, before.slots))
    counts = tuple((turns + (slot < ahead)) * BATCH for slot in range(before.slots))
    total = before.slots * 6000 * BATCH
    seen = np.zeros(total, np.int64)
    for rank, worker in product(range(before.ranks), range(before.workers)):
        places = before.places(rank, worker, np.arange(counts[before.slot(rank, worker)]))
        np.add.at(seen, Remaining(total).positions(places), 1)
    left = Remaining(total, [Round(before, counts)])
    for rank, worker in product(range(after.ranks), range(after.workers)):
        samples = np.arange(after.of_worker(left.rows, rank, worker, None))
        np.add.at(seen, left.positions(after.places(rank, worker, samples)), 1)
    return f"{int((seen > 1).sum())}/{int((seen == 0).sum())}"


def main() -> None:
    print("| input, window | workers | shares | open in sum | moved by | neighbours within 1 % | a batch of 32 spans |")
    print("|---|---|---|---|---|---|---|")
    for size, slots in product((2**24, 2**26, 2**28, 2**30), (1, 4)):
        print(mixing(f"10 files, {size / 2**20:.0f} MiB", 10, Window(bytes=size), slots))
    for size in (10_000, 50_000, 100_000):
        print(mixing(f"10 compressed files, {size:,} rows", 10, Window(rows=size, bytes=None), 1, True))
        print(mixing(f"one compressed file, {size:,} rows", 1, Window(rows=size, bytes=None), 1, True))
    print("\nTwice/left out, from ranks x workers (rows) to ranks x workers (columns):\n")
    print("| | " + " | ".join(f"{ranks}x{workers}" for ranks, workers in TOPOLOGIES) + " |")
    print("|---" * (len(TOPOLOGIES) + 1) + "|")
    for before in TOPOLOGIES:
        cells = [continued(Topology(*before), Topology(*after)) for after in TOPOLOGIES]
        print(f"| {before[0]}x{before[1]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
