"""The files of a dataset that ``save_to_disk`` has written, in a training loop: columns, shuffling,
other topologies.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

import itertools
from collections import Counter
from pathlib import Path

import datasets
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers import HuggingFaceDatasetReader, IpcReader
from datatrove_ckpt.torch import ReaderDataset, restore
from tests.real.loops import texts

pytestmark = [
    pytest.mark.xdist_group("datasets"),  # its import takes seconds
]

COUNT = 50
TEXTS = [f"text {number}" for number in range(COUNT)]


def made(**columns):
    rows = {
        "text": TEXTS,
        "number": list(range(COUNT)),
        "input_ids": [[n, n + 1] for n in range(COUNT)],
    }
    return datasets.Dataset.from_dict(rows | columns)


@pytest.fixture
def saved(tmp_path):
    datasets.disable_progress_bars()
    path = (tmp_path / "saved").as_posix()
    made().save_to_disk(path, num_shards=3)
    return path


def reader(path, **options):
    return IpcReader(path, glob_pattern="data-*.arrow", **options)


def loader(path, workers=0, rank=0, ranks=1, **options):
    one = ReaderDataset(reader(path), rank, ranks, batch_size=4, **({"shuffle_seed": 1} | options))
    return StatefulDataLoader(one, batch_size=4, num_workers=workers)


def whole(document):
    return document


def test_documents_are_those_of_the_reader_and_come_in_the_order_of_the_dataset(saved):
    found = list(ReaderDataset(reader(saved, skip=3, limit=30), transform=whole))
    wanted = list(HuggingFaceDatasetReader(saved, load_from_disk=True, skip=3, limit=30).run())
    assert [(one.text, one.metadata["number"]) for one in found] == [
        (one.text, one.metadata["number"]) for one in wanted
    ]
    assert len({one.id for one in found}) == 30


def test_it_has_a_length_an_order_for_each_epoch_and_columns(saved):
    one = loader(saved, columns=["input_ids", "text"])
    assert len(one) == 13
    assert len(one.dataset) == COUNT
    epochs = []
    for epoch in (0, 1):
        one.dataset.set_epoch(epoch)
        epochs.append(texts(one))
    assert epochs[0] != epochs[1]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(TEXTS)
    rows = ReaderDataset(reader(saved), columns=["input_ids"])
    assert [row["input_ids"].tolist() for row in rows] == [[n, n + 1] for n in range(COUNT)]


def test_it_goes_on_with_other_ranks_and_workers_and_refuses_another_dataset(saved):
    read, states = [], []
    for rank in range(2):
        one = loader(saved, 2, rank, 2)
        read += texts(itertools.islice(one, 3))
        states.append(one.state_dict())
    other = loader(saved, 3)
    restore(other, states)
    assert Counter(read + texts(other)) == Counter(TEXTS)
    made(text=TEXTS[::-1]).save_to_disk(saved, num_shards=3)
    with pytest.raises(CheckpointMismatch, match="has changed"):
        restore(loader(saved), states)


def test_only_the_files_of_the_dataset_are_read(saved):
    datasets.load_from_disk(saved).map(lambda row: {"text": row["text"].upper()})
    assert list(Path(saved).glob("cache-*.arrow")), "datasets keeps results beside the dataset"
    assert texts(loader(saved, shuffle_seed=None)) == TEXTS


def test_rows_that_cannot_be_counted_are_refused(saved):
    files = {"data_files": f"{saved}/data-*.arrow", "split": "train"}
    for given in (
        HuggingFaceDatasetReader(saved, load_from_disk=True),
        HuggingFaceDatasetReader("arrow", files, streaming=True),
        HuggingFaceDatasetReader("arrow", files),
    ):
        with pytest.raises(
            ConfigError, match=r"cannot be counted.*data-\*.arrow.*give the dataset itself"
        ):
            ReaderDataset(given)


def test_a_stream_of_datasets_resumes_in_the_loader_without_a_reader(saved):
    def make():
        stream = datasets.load_dataset(
            "arrow", data_files=f"{saved}/data-*.arrow", split="train", streaming=True
        )
        return StatefulDataLoader(stream, batch_size=4)

    whole, one = texts(make()), make()
    read = texts(itertools.islice(one, 5))
    other = make()
    other.load_state_dict(one.state_dict())
    assert read + texts(other) == whole
