"""A torch training loop stops and resumes in the middle of an epoch: no sample twice, none left
out.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datatrove.data import Document
from datatrove.pipeline.readers import JsonlReader as OriginalJsonl
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.generation.as_read import as_read
from datatrove_ckpt.readers import JsonlReader, ParquetReader
from datatrove_ckpt.torch import ReaderDataset
from tests.pages import torch_example

pytestmark = [
    # torchdata 0.11 calls what torch 2.13 calls deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # Small machines have fewer cores than the loader has workers here.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

DOCUMENTS = 97


@pytest.fixture(params=["2 JSONL files", "20 JSONL files", "2 Parquet files"])
def reader(request, tmp_path):
    """More shards than files, fewer shards than files (but with 4 workers on 3 ranks), and rows in
    groups.
    """
    count, kind, _ = request.param.split()
    texts = [f"text {i}" for i in range(DOCUMENTS)]
    tmp_path = tmp_path / "input"
    tmp_path.mkdir()
    for number in range(int(count)):
        mine = texts[number :: int(count)]
        if kind == "JSONL":
            (tmp_path / f"{number:02}.jsonl").write_text(
                "".join(f'{{"text": "{text}"}}\n' for text in mine)
            )
        else:
            pq.write_table(
                pa.table({"text": mine}), tmp_path / f"{number:02}.parquet", row_group_size=7
            )
    return (JsonlReader if kind == "JSONL" else ParquetReader)(tmp_path.as_posix())


def loader(
    reader,
    workers,
    rank,
    ranks,
    epoch=0,
    **options,
):
    dataset = ReaderDataset(reader, rank, ranks, shuffle_seed=1)
    if epoch is not None:
        dataset.set_epoch(epoch)
    return StatefulDataLoader(dataset, batch_size=3, num_workers=workers, **options)


def texts(batches):
    return [text for batch in batches for text in batch["text"]]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_an_order_of_its_own_and_the_same_on_every_start(reader, workers):
    persistent = {"persistent_workers": True} if workers else {}
    current = loader(reader, workers, 0, 1, **persistent)
    epochs = []
    for epoch in (0, 1, 0):
        current.dataset.set_epoch(epoch)
        epochs.append(texts(current))
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_states_of_another_setting_are_refused(reader):
    current = loader(reader, 0, 0, 2)
    next(iter(current))
    state = current.state_dict()
    other = loader(reader, 0, 0, 1)
    other.load_state_dict(state)
    with pytest.raises(
        CheckpointMismatch, match=r"rank 0 of world_size=2.*rank 0 of world_size=1.*restore"
    ):
        list(other)
    with pytest.raises(CheckpointMismatch, match="shuffle_seed=1, and this is 2"):
        ReaderDataset(reader, shuffle_seed=2).load_state_dict(state["dataset_state"])
    with pytest.raises(ConfigError, match="cannot be counted"):
        ReaderDataset(OriginalJsonl("/"))
    with pytest.raises(ConfigError, match="rank"):
        ReaderDataset(reader, 2, 2)


@pytest.mark.parametrize(("workers", "stops"), [(0, [7, 12, 49, 50]), (2, [9, 60])])
def test_the_loop_in_the_docs_stops_and_resumes(tmp_path, workers, stops):
    """49 batches each epoch; a state is saved after every second one."""
    block = torch_example()
    namespace: dict[str, Any] = {}
    exec(compile(block.text, block.page, "exec"), namespace)
    folder = tmp_path / "documents"
    folder.mkdir()
    for number in range(3):
        lines = [f'{{"text": "text {i}"}}\n' for i in range(number, DOCUMENTS, 3)]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    batches = partial(namespace["batches"], folder.as_posix(), workers=workers)
    whole = list(batches(run=(tmp_path / "whole").as_posix()))
    assert len(whole) == 3 * 49
    for epoch in range(3):
        assert sorted(text for at, batch in whole if at == epoch for text in batch) == sorted(
            f"text {i}" for i in range(DOCUMENTS)
        )
    run = (tmp_path / "stopped").as_posix()
    done = 0
    for stop in stops:
        # The last one is not trained on.
        taken = list(itertools.islice(batches(run=run), stop - done + 1))
        assert taken[: stop - done] == whole[done:stop]
        done = stop // 2 * 2
    assert list(batches(run=run)) == whole[done:]


def test_a_tensor_of_a_document_counts_by_type_shape_and_content():
    ones = [
        torch.ones(2),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(()),
        torch.ones(2, 1),
        torch.zeros(2),
    ]
    assert len(
        {as_read(Document(text="", id="a", metadata={"tensor": tensor})) for tensor in ones}
    ) == len(ones)
    assert as_read(Document(text="", id="a", metadata={"tensor": torch.ones(2)})) == as_read(
        Document(text="", id="a", metadata={"tensor": torch.ones(2)})
    )
