"""The order of an epoch: each row once, defined by seed, epoch and position, well mixed; dealt out
to any topology.
"""

import json
from collections import Counter
from itertools import chain, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datatrove_ckpt.readers.blocks import Block
from datatrove_ckpt.torch.order import (
    BlockTable,
    ConsumedRound,
    RemainingPositions,
    Topology,
    Window,
    deal_files,
    order_by_files,
    order_by_rows,
    unevenness,
)
from tests import golden


def blocks_of(*files, size=10):
    """Files by the numbers of rows of their blocks. ``size``: bytes per row."""
    found = []
    for file, groups in enumerate(files):
        first = 0
        for rows in groups:
            found.append(Block(file, first, rows, rows * size))
            first += rows
    return found


def rows_in_order(table, order, positions=None):
    """(file, row in the file) at each position."""
    positions = np.arange(order.rows) if positions is None else positions
    shares, rows = order.locate(positions)
    found = np.zeros((len(positions), 2), np.int64)
    for number in np.unique(shares):
        share, mine = order.shares[number], np.flatnonzero(shares == number)
        windows = share.window_of(rows[mine])
        for one in np.unique(windows):
            window, chosen = share.window(int(one)), mine[windows == one]
            piece, places = window.locate(rows[chosen] - window.first)
            starts = np.cumsum(window.pieces.rows) - window.pieces.rows
            block = window.pieces.block[piece]
            row = window.pieces.start[piece] + places - starts[piece]
            found[chosen] = np.stack([table.file[block], table.first[block] + row], axis=1)
    return [(int(file), int(row)) for file, row in found]


def all_rows(blocks):
    return [(block.file, block.first + row) for block in blocks for row in range(block.rows)]


INPUTS = golden.named("blocks_of_files", globals())
WINDOWS = [Window(rows=1), Window(rows=16), Window(bytes=300), Window(bytes=2**28)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_each_row_has_one_position(window):
    for blocks, (seed, epoch) in product(INPUTS.values(), [(None, 0), (0, 1), (-5, 3)]):
        table = BlockTable(blocks)
        orders = [order_by_rows(table, seed, epoch, window)]
        orders += [order_by_files(table, seed, epoch, window, count) for count in (1, 2, 5)]
        for order in orders:
            assert sorted(rows_in_order(table, order)) == all_rows(blocks)


def test_seed_and_epoch_alone_define_the_order():
    table = BlockTable(INPUTS["many blocks"])
    orders = {
        key: rows_in_order(table, order_by_rows(table, *key, Window(rows=100)))
        for key in product((0, 1), (0, 1))
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    again = order_by_rows(table, 1, 0, Window(rows=100))
    assert rows_in_order(table, again) == orders[1, 0]
    assert orders[0, 0][:4] == FIRST_ROWS, "states of earlier releases need the same order"


FIRST_ROWS = [(3, 16), (7, 35), (7, 57), (5, 40)]


@pytest.mark.parametrize("skip, limit", [(0, 0), (3, -1), (3, 4), (5, 100), (100, 5)])
def test_skip_and_limit_count_rows_of_the_whole_input(skip, limit):
    blocks = INPUTS["few files"]
    table = BlockTable(blocks, skip=skip, limit=limit)
    wanted = all_rows(blocks)[skip : skip + limit if limit >= 0 else None]
    assert rows_in_order(table, order_by_rows(table, None, 0, Window(bytes=2**28))) == wanted
    assert sorted(rows_in_order(table, order_by_rows(table, 1, 0, Window(bytes=2**28)))) == wanted
    assert table.total == len(wanted)


# Mixing ------------------------------------------------------------------------------------------

TEN_FILES = blocks_of(*([1000] * 100 for _ in range(10)), size=1000)


def span_and_neighbours(rows, per_file, files):
    """How many files a batch of 32 spans on average, and the share of neighbours that are within 1
    % of the input.
    """
    batches = [rows[at : at + 32] for at in range(0, len(rows) - 31, 32)]
    span = sum(len({file for file, _ in batch}) for batch in batches) / len(batches)
    places = np.array([file * per_file + row for file, row in rows])
    near = np.abs(np.diff(places)) < 0.01 * per_file * files
    return span, float(near.mean())


@pytest.mark.parametrize("workers, batch", [(1, 1), (2, 32)])
@pytest.mark.parametrize(
    "window, streams, least_span, most_near",
    [
        (Window(rows=64_000), (), 8.5, 0.08),
        (Window(bytes=2**26), (), 8.5, 0.08),
        # Files that cannot be entered take turns. Rows of one file within a window are near each
        # other.
        (Window(rows=10_000), range(10), 9.5, 0.06),
    ],
    ids=str,
)
def test_a_batch_spans_the_files_and_neighbours_are_far_apart(
    window, streams, least_span, most_near, workers, batch
):
    table = BlockTable(TEN_FILES, streams=streams)
    order = order_by_rows(table, 1, 0, window)
    topology = Topology(1, workers, batch)
    for first in (0, 500_000 // workers):
        rows = rows_in_order(
            table, order, topology.places(0, workers - 1, np.arange(first, first + 3200))
        )
        span, near = span_and_neighbours(rows, 100_000, 10)
        assert span >= least_span
        assert near < most_near


def open_at_most(table, order, window):
    """What the largest windows of all shares take together."""
    weights, taken = table.weights(window), []
    for share in order.shares:
        last = int(share.window_of(np.array([share.rows - 1]))[0])
        taken.append(
            max(int(weights[share.window(number).pieces.block].sum()) for number in range(last + 1))
        )
    return sum(taken)


def test_the_window_bounds_what_is_open():
    table = BlockTable(TEN_FILES)
    for window in (Window(rows=64_000), Window(bytes=2**26), Window(bytes=2**28)):
        order = order_by_rows(table, 1, 0, window)
        assert window.limit / 2 < open_at_most(table, order, window) <= window.limit
    tiny = order_by_rows(table, 1, 0, Window(bytes=1))
    assert open_at_most(table, tiny, Window(bytes=1)) == 1_000_000, "one block"


def test_workers_that_divide_the_shares_read_no_block_twice():
    table = BlockTable(TEN_FILES)
    order = order_by_rows(table, 1, 0, Window(bytes=2**28))
    assert len(order.shares) == 6
    for slots in (1, 2, 3, 6):
        shares = [
            set(order.locate(np.arange(slot, 1000, slots))[0].tolist()) for slot in range(slots)
        ]
        assert sum(map(len, shares)) == 6


def test_files_that_cannot_be_entered_are_each_read_from_the_beginning_to_the_end():
    table = BlockTable(blocks_of(*([100] * 30 for _ in range(40))), streams=range(40))
    order = order_by_rows(table, 1, 0, Window(rows=3200))
    read = Counter()
    seen = {}
    for number, share in enumerate(order.shares):
        for window in range(len(share._ends)):
            pieces = share.window(window).pieces
            for block in pieces.block:
                file = int(table.file[block])
                assert table.first[block] == read[file] * 100
                read[file] += 1
                seen.setdefault(file, set()).add(number)
    assert set(read.values()) == {30}
    assert {len(shares) for shares in seen.values()} == {1}
    span, _ = span_and_neighbours(rows_in_order(table, order, np.arange(50_000, 53_200)), 3000, 40)
    assert span > 12


# Shares ------------------------------------------------------------------------------------------


def dealt(ranks, *files):
    """The rank of each file, and how uneven their shares are."""
    table = BlockTable(blocks_of(*files))
    return deal_files(table, ranks).tolist(), unevenness(table, ranks)


test_whole_files_are_dealt_out_evenly = golden.shows("dealt_files", globals())


TOPOLOGIES = [Topology(*key) for key in product((1, 2, 3, 4), (1, 2, 3), (1, 3))]


@pytest.mark.parametrize("even", [None, "drop", "repeat"])
def test_each_position_is_dealt_once_and_evenly(even):
    for topology, rows in product(TOPOLOGIES, (0, 1, 5, 37)):
        dealt, ranks = [], []
        for rank in range(topology.ranks):
            ranks.append(topology.of_rank(rows, rank, even))
            counts = [
                topology.of_worker(rows, rank, worker, even) for worker in range(topology.workers)
            ]
            assert sum(counts) == ranks[-1]
            for worker, count in enumerate(counts):
                places = topology.places(rank, worker, np.arange(count))
                slots, samples = topology.owner(places)
                assert (slots == worker * topology.ranks + rank).all()
                assert samples.tolist() == list(range(count))
                dealt += places.tolist()
        assert max(ranks) - min(ranks) <= (even is None)
        kept = {None: rows, "drop": rows // topology.ranks * topology.ranks}.get(even, sum(ranks))
        assert sorted(dealt) == list(range(kept))
        assert kept - rows < topology.ranks


def test_a_global_batch_is_the_same_under_each_topology():
    def batches(ranks, workers):
        topology = Topology(ranks, workers, 24 // ranks)
        found = []
        for step in range(5):
            first = step // workers * topology.batch
            samples = np.arange(first, first + topology.batch)
            positions = [
                topology.places(rank, step % workers, samples).tolist() for rank in range(ranks)
            ]
            found.append(sorted(chain.from_iterable(positions)))
        return found

    wanted = [list(range(step * 24, step * 24 + 24)) for step in range(5)]
    assert all(batches(*key) == wanted for key in product((1, 2, 3, 4, 8), (1, 2, 3)))


# Elastic -----------------------------------------------------------------------------------------


def take(rows, rounds, topology, counts, even=None):
    """The positions that the slots read, and the round that results.

    Counts that are too high mean all.
    """
    remaining = RemainingPositions(rows, rounds)
    read, had = [], [0] * topology.slots
    for rank, worker in product(range(topology.ranks), range(topology.workers)):
        slot = worker * topology.ranks + rank
        had[slot] = min(counts[slot], topology.of_worker(remaining.rows, rank, worker, even))
        read += remaining.positions(topology.places(rank, worker, np.arange(had[slot]))).tolist()
    return read, ConsumedRound.from_json(
        json.loads(json.dumps(ConsumedRound(topology, tuple(had)).to_json()))
    )


@settings(max_examples=30)
@given(
    st.integers(0, 400),
    st.lists(st.sampled_from(TOPOLOGIES), max_size=4),
    st.sampled_from(TOPOLOGIES),
    st.data(),
)
def test_topologies_follow_each_other_and_nothing_is_read_twice_or_left_out(
    rows, before, last, data
):
    rounds, read = list[ConsumedRound](), list[int]()
    for topology in before:
        counts = data.draw(
            st.lists(st.integers(0, 20), min_size=topology.slots, max_size=topology.slots)
        )
        more, done = take(rows, rounds, topology, counts)
        read += more
        rounds.append(done)
    read += take(rows, rounds, last, [10**6] * last.slots)[0]
    assert sorted(read) == list(range(rows))


@pytest.mark.parametrize("even", ["drop", "repeat"])
def test_even_shares_stay_even_after_another_topology(even):
    for first, second, step in product(TOPOLOGIES[::5], TOPOLOGIES[::7], (0, 2, 4)):
        read, done = take(53, [], first, [step] * first.slots, even)
        rest, _ = take(53, [done], second, [10**6] * second.slots, even)
        assert len(rest) % second.ranks == 0
        seen = Counter(read + rest)
        if even == "drop":
            assert len(seen) > 53 - second.ranks
            assert max(seen.values()) == 1
        else:
            assert sorted(seen) == list(range(53))
            assert sum(seen.values()) < 53 + second.ranks


def test_the_rest_does_not_depend_on_who_read_what_came_before():
    rests = []
    for ranks, workers in product((1, 2, 4), (1, 2)):
        topology = Topology(ranks, workers, 8 // ranks)
        counts = [topology.batch * 6 // workers] * topology.slots
        rests.append(
            RemainingPositions(1000, [take(1000, [], topology, counts)[1]])
            .positions(np.arange(900))
            .tolist()
        )
    assert all(rest == rests[0] for rest in rests)
