"""ReaderDataset in training loops: lengths, epochs, states that do not lie, other numbers of ranks
and workers.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

import json

import pytest
from loguru import logger
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers import ParquetReader
from datatrove_ckpt.torch import restore
from tests.real.loops import texts, write_rows
from tests.training_rows import rows_of

TEXTS = [f"text {i}" for i in range(97)]


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path / "input", [{"text": text} for text in TEXTS], "parquet", 4)
    return (tmp_path / "input").as_posix()


def dataset(folder, rank=0, ranks=1, **options):
    return rows_of(ParquetReader(folder), rank, ranks, **({"seed": 1} | options))


def loader(folder, workers=0, rank=0, ranks=1, **options):
    return StatefulDataLoader(
        dataset(folder, rank, ranks, **options), batch_size=4, num_workers=workers
    )


def read_through(folder, workers=0, epoch=0):
    """A loader at the end of an epoch, and its state at the last batch."""
    one = loader(folder, workers)
    one.dataset.set_epoch(epoch)
    for _ in one:
        state = one.state_dict()
    return one, state


@pytest.fixture
def log(tmp_path):
    """A file of all warnings, those of workers included."""
    path = tmp_path / "log"
    sink = logger.add(path, format="{message}", level="WARNING")
    yield path
    logger.remove(sink)


# Lengths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_length_is_what_comes(folder, ranks, drop_last):
    for workers, seed in ((0, 1), (0, None), (2, 1)):
        loaders = [
            loader(folder, workers, rank, ranks, drop_last=drop_last, batch_size=4, seed=seed)
            for rank in range(ranks)
        ]
        for one in loaders:
            batches = list(one)
            assert len(texts(batches)) == len(one.dataset)
            assert len(batches) == len(one)
        lengths = {len(one.dataset) for one in loaders}
        assert max(lengths) - min(lengths) <= (not drop_last)


def test_a_readers_own_seed_shuffles_too(folder):
    reader = ParquetReader(folder, shuffle_seed=1)
    orders = [[sample["text"] for sample in rows_of(reader, seed=seed)] for seed in (None, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != TEXTS


# States that do not lie --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1])
def test_a_state_from_before_the_epoch_works(folder, seed):
    options = {"seed": seed}
    first = dataset(folder, **options)
    state = json.loads(json.dumps(first.state_dict()))
    whole = [sample["text"] for sample in first]
    other = dataset(folder, **options)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert [sample["text"] for sample in other] == whole
    for workers in (0, 2):
        before = loader(folder, workers, **options)
        state = before.state_dict()
        after = loader(folder, workers, **options)
        after.load_state_dict(state)
        assert texts(after) == texts(before)


@pytest.mark.parametrize("at", ["last batch", "end"])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_epoch_is_skipped_after_the_end_of_one(folder, workers, at):
    def epochs(first, state=None):
        one = loader(folder, workers)
        if state is not None:
            one.load_state_dict(state)
        found = []
        for epoch in range(first, 3):
            one.dataset.set_epoch(epoch)
            found.append(texts(one))
        return found

    whole = epochs(0)
    one, state = read_through(folder, workers)
    if at == "end":
        state = one.state_dict()
    if at == "last batch":
        assert epochs(0, state) == [[], *whole[1:]]
    else:  # torchdata would begin a finished loader again
        with pytest.raises(CheckpointMismatch, match="which would repeat it"):
            epochs(0, state)
    if at == "end" or workers:
        first, second = epochs(1, state)
        assert sorted(first) == sorted(whole[1]), (
            "torchdata goes on with the worker whose turn it is"
        )
        assert second == whole[2]


def test_the_state_of_the_last_batch_does_not_skip_the_next_epoch_unseen(folder):
    """torchdata keeps that the dataset has ended in a short batch, and then asks it for nothing."""
    _, state = read_through(folder)
    other = loader(folder)
    other.load_state_dict(state)
    other.dataset.set_epoch(1)
    assert texts(other) == []
    with pytest.raises(CheckpointMismatch, match=r"Epoch 1 gave no sample.*loop of epochs at 0"):
        other.dataset.set_epoch(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_forgotten_set_epoch_warns_once(folder, workers, log):
    one = loader(folder, workers)
    for _ in range(4):
        list(one)
    assert (
        log.read_text().count("Epoch 0 begins again, in the same order as before. Call set_epoch")
        == 1
    )


# Another number of ranks and workers -------------------------------------------------------------


@pytest.mark.parametrize("at", ["last batch", "end"])
@pytest.mark.parametrize("workers", [0, 2])
def test_restore_goes_on_with_the_next_epoch_after_the_end_of_one(folder, workers, at):
    whole = loader(folder, workers)
    whole.dataset.set_epoch(3)
    wanted = texts(whole)
    one, state = read_through(folder, workers, 2)
    other = loader(folder, workers)
    epoch = restore(other, [one.state_dict() if at == "end" else state])
    assert epoch == 3
    seen = []
    for number in range(epoch, 4):
        other.dataset.set_epoch(number)
        seen += texts(other)
    assert seen == wanted
