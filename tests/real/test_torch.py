"""A torch training loop stops and resumes in the middle of an epoch: no sample twice, none left
out.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

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
from tests.pages import blocks, torch_example
from tests.patience import until
from tests.real.test_training_checkpoints import processes_below

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


HOLDS = """
import time

from datatrove_ckpt.torch import TrainingCheckpoints


def maybe_save(self, step, *, usual=TrainingCheckpoints.maybe_save, **what):
    usual(self, step, **what)
    if step == {}:
        time.sleep(1000)


TrainingCheckpoints.maybe_save = maybe_save
"""
"""Before the script: it waits there to be killed, or it might end before the test looks."""


@pytest.fixture
def started(tmp_path):
    """Starts the command of the docs in a folder that has the script and documents."""
    (line,) = [line for block in blocks("bash", "docs/training.md") for line in block.lines]
    assert line.startswith("torchrun ")
    running = []

    def start(name, before=""):
        folder = tmp_path / name
        folder.joinpath("documents").mkdir(parents=True, exist_ok=True)
        folder.joinpath("train.py").write_text(before + torch_example().text)
        lines = [json.dumps({"text": f"text {number}"}) + "\n" for number in range(DOCUMENTS)]
        folder.joinpath("documents/0.jsonl").write_text("".join(lines))
        command = [sys.executable, "-m", "torch.distributed.run", *line.split()[1:]]
        variables = {**os.environ, "PET_STANDALONE": "1", "OMP_NUM_THREADS": "1"}
        running.append(subprocess.Popen(command, cwd=folder, env=variables))
        return running[-1]

    yield start
    for process in running:
        kill_below(process.pid)


def kill_below(pid):
    for each in processes_below(pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


@pytest.mark.timeout(1800)  # six starts of torchrun
def test_the_script_in_the_docs_goes_on_after_kills(tmp_path, started):
    assert started("whole").wait(300) == 0
    expected = tmp_path.joinpath("whole/run/metrics.csv").read_text()
    assert len(expected.splitlines()) == 1 + 3 * (DOCUMENTS // 4)
    for saved in (10, 30):
        process = started("killed", HOLDS.format(saved + 3))
        until(tmp_path.joinpath(f"killed/run/step-{saved:08}").exists)
        kill_below(process.pid)
        process.wait()
        assert not tmp_path.joinpath("killed/run/step-00000072").exists()
    assert started("killed").wait(300) == 0
    assert tmp_path.joinpath("killed/run/metrics.csv").read_text() == expected
    for _ in range(2):  # there is nothing left to train
        assert started("killed").wait(300) == 0
        assert tmp_path.joinpath("killed/run/metrics.csv").read_text() == expected


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
