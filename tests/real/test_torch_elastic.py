"""``Pack`` and ``Mix`` go on with another number of ranks and workers: each token and each row
comes once.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

import itertools
import json
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.torch import Mix, Pack, restore
from tests.real.loops import take, text_of, write_rows
from tests.stateful_rows import Rows
from tests.training_rows import merge, rows_of

LONG = [(number * 7) % 23 for number in range(60)]
COUNTS = {"a": 40, "b": 11, "c": 1}
Place = tuple[int, int]
"""Rank and world size."""


@pytest.fixture
def folder(tmp_path):
    """Rows of tokens that count on, of 0 to 22 tokens each; and rows of three sources, by name."""
    numbers = itertools.count(1)
    tokens = [list(itertools.islice(numbers, length)) for length in LONG]
    write_rows(tmp_path / "rows", [{"text": "x", "tokens": row} for row in tokens])
    for name, count in COUNTS.items():
        write_rows(tmp_path / name, [{"text": f"{name}{number}"} for number in range(count)])
    return tmp_path


def tokens_of(row):
    return list(row["tokens"])


def letters(row):
    return [ord(row["text"][0]) * 1000 + int(row["text"][1:])] * 3


def rows(folder, place, name="rows", function=text_of, **options):
    reader = JsonlReader((folder / name).as_posix())
    return rows_of(reader, *place, seed=1, function=function, **options)


def packed(folder, place=(0, 1), **options):
    return Pack(rows(folder, place, function=tokens_of), 16, **options)


def mixed(folder, place=(0, 1), at_end="drop", function=text_of):
    sources = [rows(folder, place, name, function) for name in COUNTS]
    return Mix(sources, [2, 1, 1], at_end=at_end)


def loader(dataset, workers=0, **options):
    return StatefulDataLoader(dataset, 2, num_workers=workers, collate_fn=list, **options)


def stopped(make, before, steps, states=()):
    """What all ranks of (world size, workers) read up to a step, and their states, through JSON."""
    read, saved = [], []
    for rank in range(before[0]):
        one = loader(make((rank, before[0])), before[1])
        if states:
            restore(one, states)
        else:
            one.dataset.set_epoch(2)
        read += take(iter(one), steps)
        saved.append(json.loads(json.dumps(one.state_dict())))
    return read, saved


def rest(make, after, states):
    """What all ranks read after these states, and in the next epoch."""
    read, following = [], []
    for rank in range(after[0]):
        one = loader(make((rank, after[0])), after[1])
        if restore(one, states) == 2:
            one.dataset.set_epoch(2)
            read += take(one)
        one.dataset.set_epoch(3)
        following += take(one)
    return read, following


def flat(samples):
    return [token for sample in samples for token in sample["input_ids"].tolist() if token]


def counted(samples):
    return Counter(flat(samples) if isinstance(samples[0], dict) else samples)


CHANGES = [((1, 0), (2, 0)), ((1, 2), (2, 0)), ((2, 2), (1, 0)), ((2, 0), (1, 3)), ((3, 1), (2, 2))]
SAMPLES = [(name, number) for name, count in COUNTS.items() for number in range(count)]
NAMES = [f"{name}{number}" for name, number in SAMPLES]
ROWS = Counter(NAMES[: COUNTS["a"]])
LETTERS = Counter({ord(name) * 1000 + number: 3 for name, number in SAMPLES})
KINDS = {
    "rows": (partial(rows, name="a"), ROWS),
    "rows in batches": (partial(rows, name="a", batch_size=2), ROWS),
    "packed": (partial(packed, pad=0), Counter(range(1, sum(LONG) + 1))),
    "mixed": (mixed, Counter(NAMES)),
    "pack of mix": (
        lambda folder, place: Pack(mixed(folder, place, function=letters), 7, pad=0),
        LETTERS,
    ),
    "mix of packs": (
        lambda folder, place: Mix(
            [Pack(rows(folder, place, name, letters), 7, pad=0) for name in COUNTS],
            [2, 1, 1],
            at_end="drop",
        ),
        LETTERS,
    ),
}


# Of each pair of a kind, a change and a step there is one that is not full.
TRIED = [
    pytest.param(kind, *change, steps, marks=[pytest.mark.full] * (sum(numbers) % 3 > 0))
    for numbers, (kind, change, steps) in zip(
        itertools.product(range(len(KINDS)), range(len(CHANGES)), range(3)),
        itertools.product(KINDS, CHANGES, (0, 2, 12)),
        strict=True,
    )
]


@pytest.mark.parametrize("kind, before, after, steps", TRIED)
def test_each_token_and_each_sample_comes_once(folder, before, after, steps, kind):
    make, whole = partial(KINDS[kind][0], folder), KINDS[kind][1]
    read, states = stopped(make, before, steps)
    twice = [*states, states[0]]  # as of two ranks that read the same rows
    more, following = rest(make, after, twice)
    assert counted(read + more) == whole
    assert counted(following) == whole, "the next epoch is whole"


def test_a_sample_of_a_new_packer_holds_whole_rows_and_rests(folder):
    """Positions begin at 0 wherever another row, or what was left of one, begins."""

    def make(place):
        return packed(folder, place, pad=0, positions=True)

    _, states = stopped(make, (2, 2), 2)
    more, _ = rest(make, (1, 0), states)
    for sample in more:
        ids, at = sample["input_ids"], sample["position_ids"]
        inside = (ids[1:] != 0) & (at[1:] > 0)
        assert (ids[1:][inside] == ids[:-1][inside] + 1).all(), "counts on within a row"
        jumps = (ids[1:] != 0) & (ids[1:] != ids[:-1] + 1)
        assert (at[1:][jumps] == 0).all()


def test_without_pad_each_packer_drops_less_than_a_sample(folder):
    def make(place):
        return packed(folder, place)

    read, states = stopped(make, (2, 2), 3)
    found = Counter(flat(read + rest(make, (3, 0), states)[0]))
    assert set(found.values()) == {1}
    assert sum(LONG) - len(found) < 3 * 16


@pytest.mark.parametrize("before, after", CHANGES)
def test_a_mix_that_stops_gives_no_sample_twice(folder, before, after):
    def make(place):
        sources = [rows(folder, place, name) for name in ("a", "b")]
        return Mix(sources, [2, 1], at_end="stop")

    read, states = stopped(make, before, 2)
    more, _ = rest(make, after, states)
    assert max(Counter(read + more).values()) == 1
    assert len(more) > 0


@pytest.mark.parametrize("steps", [1, 6, 10])
@pytest.mark.parametrize("before, after", CHANGES)
def test_a_mix_that_repeats_leaves_no_sample_out(folder, before, after, steps):
    """Workers may be in different passes of a short source: it goes on in the first that is not
    over for all.
    """

    def make(place):
        return mixed(folder, place, "repeat")

    read, states = stopped(make, before, steps)
    more, _ = rest(make, after, states)
    found = Counter(read + more)
    assert {*found} == {*NAMES}
    assert max(map(found.get, ROWS)) <= 2, "a new pass may begin before the last ends"


def test_an_epoch_goes_on_with_one_topology_after_the_other(folder, tmp_path):
    for made, whole in KINDS.values():
        make = partial(made, folder)
        states = ()
        read = []
        for topology in ((2, 2), (1, 0), (1, 3), (3, 0)):
            some, states = stopped(make, topology, 2, states)
            read += some
            files = [tmp_path / f"{number}.pt" for number in range(len(states))]
            for file, state in zip(files, states, strict=True):
                torch.save(state, file)
            states = files
        read += rest(make, (2, 0), states)[0]
        assert counted(read) == whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [packed, mixed])
def test_the_same_ranks_and_workers_get_exactly_what_would_have_followed(folder, make, workers):
    saving = loader(make(folder), workers)
    batches = iter(saving)
    take(batches, 3)
    state = saving.state_dict()
    wanted = take(batches)
    other = loader(make(folder), workers)
    restore(other, [state])
    np.testing.assert_equal(take(other), wanted)


def test_states_that_cannot_be_merged_are_refused(folder):
    def states_of(*datasets):
        for dataset in datasets:
            next(iter(dataset))
            yield dataset.state_dict()

    for states, message in (
        (states_of(Pack(Rows([[1, 2, 3]] * 9), 2)), r"is no ReaderDataset.*load_state_dict"),
        (states_of(packed(folder), packed(folder, pad=1)), "of different runs: options is"),
    ):
        with pytest.raises(CheckpointMismatch, match=message):
            restore(loader(packed(folder)), [*states])
    with pytest.raises(ConfigError, match="needs a loader of a ReaderDataset, Pack or Mix, and"):
        restore(StatefulDataLoader([1]), [])


def test_states_of_different_steps_are_a_warning(folder, log):
    for make in (packed, mixed):
        states = [stopped(lambda place: make(folder, place), (2, 0), steps)[1] for steps in (2, 3)]  # noqa: B023
        merge([states[0][0], states[1][1]])
    said = [
        line for line in log if "of different steps: rank 0 had 4 samples, rank 1 had 6" in line
    ]
    assert len(said) == 2


def test_a_merged_state_is_for_all_workers_and_for_one_epoch(folder):
    """Loaded by hand into the dataset: workers have copies of it, and begin the next epoch from its
    beginning.
    """
    read, states = stopped(lambda place: packed(folder, place, pad=0), (2, 0), 3)
    dataset = packed(folder, pad=0)
    dataset.load_state_dict(merge(states))
    assert dataset.state_dict() == merge(states)
    one = loader(dataset, 2, persistent_workers=True)
    dataset.set_epoch(2)
    assert Counter(flat(read + take(one))) == Counter(range(1, sum(LONG) + 1))
    dataset.set_epoch(3)
    assert Counter(flat(take(one))) == Counter(range(1, sum(LONG) + 1))
    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        dataset.state_dict()
