"""Samples that are rows of some columns, without documents: token rows for training.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.torch import ReaderDataset
from tests.real.loops import write_rows
from tests.resume import assert_resume_is_exact
from tests.training_rows import rows_of

ROWS = [
    {"input_ids": [i, i + 1, i + 2], "weight": i / 2, "name": f"row {i}", "other": [i] * (i % 3)}
    for i in range(97)
]
COLUMNS = ["input_ids", "name"]


@pytest.fixture(params=["parquet", "arrow", "jsonl", "jsonl.gz"])
def reader(request, tmp_path):
    return write_rows(tmp_path / "input", ROWS, request.param)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_several_stops_give_the_rows_of_a_run_without_stops(reader, workers, batched):
    def make():
        if batched:
            rows = rows_of(reader, seed=1, columns=COLUMNS).map(dict).batch(4)
            return StatefulDataLoader(rows, batch_size=None, num_workers=workers)
        rows = rows_of(reader, seed=1, columns=COLUMNS, batch_size=4)
        return StatefulDataLoader(rows, batch_size=4, num_workers=workers)

    assert len(make()) == 25
    assert assert_resume_is_exact(make, [(1, 5), 25], epochs=2) == [97, 97]


def test_what_cannot_work_is_refused(reader):
    with pytest.raises(ConfigError, match="has no column 'tokens'"):
        list(ReaderDataset(reader).select_columns(["tokens"]))
