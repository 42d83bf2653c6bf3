"""The files of a dataset that ``save_to_disk`` has written, in a training loop.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

from pathlib import Path

import datasets
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers import HuggingFaceDatasetReader, IpcReader
from datatrove_ckpt.torch import ReaderDataset
from tests.real.loops import texts
from tests.training_rows import rows_of

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


def loader(path, workers=0, **options):
    one = rows_of(reader(path), batch_size=4, **options)
    return StatefulDataLoader(one, batch_size=4, num_workers=workers)


def test_rows_are_those_of_the_reader_and_come_in_the_order_of_the_dataset(saved):
    found = list(ReaderDataset(reader(saved, skip=3, limit=30)))
    wanted = list(HuggingFaceDatasetReader(saved, load_from_disk=True, skip=3, limit=30).run())
    assert [(row["text"], row["number"]) for row in found] == [
        (one.text, one.metadata["number"]) for one in wanted
    ]
    assert len(found) == 30


def test_only_the_files_of_the_dataset_are_read(saved):
    datasets.load_from_disk(saved).map(lambda row: {"text": row["text"].upper()})
    assert list(Path(saved).glob("cache-*.arrow")), "datasets keeps results beside the dataset"
    assert texts(loader(saved)) == TEXTS


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
