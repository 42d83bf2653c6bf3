"""States of training loops that cannot be right: all are refused by name, and none gives samples
twice.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

import gc
import itertools
import multiprocessing
from collections import Counter

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers import JsonlReader, ParquetReader
from datatrove_ckpt.torch import Mix, TrainingCheckpoints, restore
from tests.real.loops import take, text_of, texts, write_rows
from tests.training_rows import merge, rows_of

TEXTS = [f"text {i}" for i in range(100)]


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path / "input", [{"text": text} for text in TEXTS], "parquet", 4)
    return (tmp_path / "input").as_posix()


def dataset(folder, rank=0, ranks=1, **options):
    changed = {"seed": 1, "batch_size": 4, "function": text_of} | options
    return rows_of(ParquetReader(folder), rank, ranks, **changed)


def loader(folder, workers=0, rank=0, ranks=1, **options):
    return StatefulDataLoader(
        dataset(folder, rank, ranks), 4, num_workers=workers, collate_fn=list, **options
    )


# Snapshots that are older than the state ---------------------------------------------------------


def test_a_state_between_two_snapshots_goes_to_the_same_topology_only(folder):
    """torchdata keeps the workers' states of the snapshot, and how many batches it gave since."""
    saving = loader(folder, 2, snapshot_every_n_steps=4)
    read = take(iter(saving), 6)
    state = saving.state_dict()
    same = loader(folder, 2)
    restore(same, [state])
    assert Counter(read + take(same)) == Counter(TEXTS)
    expected = "2 steps after its snapshot.*snapshot_every_n_steps=1"
    with pytest.raises(CheckpointMismatch, match=expected):
        merge([state])
    for workers in (0, 1, 3):
        with pytest.raises(CheckpointMismatch, match=expected):
            restore(loader(folder, workers), [state])


@pytest.fixture
def no_garbage():
    """Nothing is freed that is part of a cycle."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("by", ["restore", "checkpoints"])
def test_a_restored_loader_that_is_dropped_has_ended_its_workers(folder, tmp_path, no_garbage, by):
    """In the garbage, each would wait five seconds for a queue that is gone before it."""
    others = {*multiprocessing.active_children()}
    first, resumed = loader(folder, 1), loader(folder, 1)
    saved = TrainingCheckpoints(tmp_path / "run", asynchronous=False)
    with saved:
        saved.restore(loader=first)
        take(iter(first), 2)
        saved.save(2, loader=first)
    if by == "restore":
        restore(resumed, [first.state_dict()])
    else:
        TrainingCheckpoints(tmp_path / "run").restore(loader=resumed)
    take(iter(resumed), 2)
    assert len({*multiprocessing.active_children()} - others) == 2
    del first, resumed
    assert {*multiprocessing.active_children()} <= others


# Two iterations over one dataset -----------------------------------------------------------------


def test_two_iterations_at_once_have_no_state(folder):
    """The dataset has one position, and the loaders ask it for theirs."""
    train = loader(folder)
    batches = iter(train)
    read = take(batches, 5)
    state = train.state_dict()
    other = StatefulDataLoader(train.dataset, batch_size=4, collate_fn=list)
    others = iter(other)
    take(others, 2)
    for one in (train, other, train.dataset):
        with pytest.raises(ConfigError, match=r"two iterations.*its own dataset"):
            one.state_dict()
    del others, other
    with pytest.raises(ConfigError, match="two iterations"):
        train.state_dict()  # the dataset's position is still that of the other one
    read += take(batches)
    resumed = loader(folder)
    restore(resumed, [state])
    assert Counter(read) == Counter(take(iter(loader(folder)), 5) + take(resumed)) == Counter(TEXTS)


def test_an_iteration_that_was_left_is_forgotten(folder):
    train = loader(folder)
    for _ in train:
        break
    read = take(iter(train), 5)
    for end in (train.state_dict(), None):
        if end is not None:
            train.load_state_dict(end)
            read += take(train)
    assert Counter(read) == Counter(TEXTS)
    finished = iter(train.dataset)
    assert len(list(finished)) == 100
    next(iter(train.dataset))
    train.dataset.state_dict()


@pytest.mark.parametrize(
    "wrap", [lambda one: Mix([one, one], [1, 1]), lambda one: Mix([one, Mix([one], [1])], [1, 1])]
)
def test_a_mix_of_one_dataset_with_itself_has_no_state(folder, wrap):
    mix = wrap(dataset(folder))
    next(iter(mix))
    with pytest.raises(ConfigError, match=r"two iterations.*its own dataset"):
        mix.state_dict()


# States of different steps -----------------------------------------------------------------------


def saved(make, ranks, steps):
    """For each rank what it read up to its step, and its state."""
    found = []
    for rank, count in enumerate(steps):
        one = make(rank, ranks)
        found.append((take(iter(one), count), one.state_dict()))
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_states_of_different_steps_are_refused(folder, workers):
    def make(rank, ranks):
        return loader(folder, workers, rank, ranks)

    expected = r"of different steps: rank 0 had 12 samples, rank 1 had \d+"
    states = [state for _, state in saved(make, 2, [3, 4])]  # one batch apart
    with pytest.raises(CheckpointMismatch, match=expected):
        merge(states)
    for rank in (0, 1):
        with pytest.raises(CheckpointMismatch, match=expected):
            restore(make(rank, 2), states)


@pytest.mark.parametrize("ends", [[12, 13], [13, 12], [9, 9], [0, 0]])
def test_states_of_one_step_are_merged_also_at_the_end(folder, ends):
    """50 rows each: the ranks end after 13 batches."""
    found = saved(lambda rank, ranks: loader(folder, 0, rank, ranks), 2, ends)
    other = loader(folder, 2)
    restore(other, [state for _, state in found])
    assert Counter([*found[0][0], *found[1][0], *take(other)]) == Counter(TEXTS)


@pytest.mark.parametrize("columns", [None, ["text"]])
def test_damaged_lines_are_no_difference_between_steps(tmp_path, columns):
    """Rank 1 reads over many of them in each of its batches."""
    lines = ["{damaged" if n % 4 == 1 else f'{{"text": "{n}"}}' for n in range(120)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    reader = JsonlReader(tmp_path.as_posix())

    def make(rank, ranks):
        one = rows_of(reader, rank, ranks, columns=columns, batch_size=4)
        return StatefulDataLoader(one, 4)

    def take(loader, count=None):
        return texts(itertools.islice(loader, count))

    read = Counter()
    states = []
    for count in (5, 1):
        loaders = [make(rank, 2) for rank in (0, 1)]
        for one in loaders:
            if count == 1:
                restore(one, states)
            read.update(take(one, count))
        states = [one.state_dict() for one in loaders]
    other = make(0, 1)
    restore(other, states)
    read.update(take(other))
    assert read == Counter(str(number) for number in range(120) if number % 4 != 1)
