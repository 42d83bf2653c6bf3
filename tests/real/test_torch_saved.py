"""The files of a dataset that ``save_to_disk`` has written, in a training loop.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

from pathlib import Path

import datasets
import pytest

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers import HuggingFaceDatasetReader, IpcReader
from datatrove_ckpt.torch import ReaderDataset

pytestmark = [
    pytest.mark.xdist_group("datasets"),  # its import takes seconds
]

COUNT = 50
TEXTS = [f"text {number}" for number in range(COUNT)]


@pytest.fixture
def saved(tmp_path):
    datasets.disable_progress_bars()
    path = (tmp_path / "saved").as_posix()
    rows = {"text": TEXTS, "number": list(range(COUNT))}
    datasets.Dataset.from_dict(rows).save_to_disk(path, num_shards=3)
    return path


def reader(path, **options):
    return IpcReader(path, glob_pattern="data-*.arrow", **options)


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
    assert [row["text"] for row in ReaderDataset(reader(saved))] == TEXTS


def test_rows_that_cannot_be_counted_are_refused(saved):
    files = {"data_files": f"{saved}/data-*.arrow", "split": "train"}
    for given in (
        HuggingFaceDatasetReader(saved, load_from_disk=True),
        HuggingFaceDatasetReader("arrow", files, streaming=True),
        HuggingFaceDatasetReader("arrow", files),
    ):
        with pytest.raises(
            ConfigError,
            match=r"cannot be counted.*data-\*.arrow.*StatefulDataLoader, Pack or Mix itself",
        ):
            ReaderDataset(given)
