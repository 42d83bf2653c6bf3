"""Formats x files x workers x ranks x loaders: a stop loses no row, repeats none, and moves none.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

from __future__ import annotations

import gzip
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers import IpcReader, JsonlReader, ParquetReader, SeekingReader
from datatrove_ckpt.torch import ReaderDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

FORMATS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "rows"]
"""``rows``: Parquet without counted rows, as streams are read (``indexed=False``)."""

ROWS = 61
BATCH = 4
STOP = 2  # batches


def write(folder: Path, kind: str, files: int) -> SeekingReader:
    """Rows "0", "1", ... in as many files, in small groups."""
    folder.mkdir()
    for file in range(files):
        table = pa.table({"text": [str(i) for i in range(file, ROWS, files)]})
        path = folder / f"{file:02}.{'parquet' if kind == 'rows' else kind}"
        lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
        if kind in ("parquet", "rows"):
            pq.write_table(table, path, row_group_size=5)
        elif kind == "arrow":
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=5)
        else:
            path.write_bytes({"jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}.get(kind, bytes)(lines))
    readers = {"parquet": ParquetReader, "rows": ParquetReader, "arrow": IpcReader}
    return readers.get(kind, JsonlReader)(folder.as_posix())  # type: ignore[no-any-return, unused-ignore]


def dataset(reader: SeekingReader, kind: str, rank: int = 0, ranks: int = 1) -> ReaderDataset:
    options: dict[str, Any] = {"indexed": False} if kind == "rows" else {"batch_size": BATCH}
    return ReaderDataset(reader, rank, ranks, shuffle_seed=1, **options)


def texts(batches: Any) -> list[str]:
    return [text for batch in batches for text in batch["text"]]


@pytest.mark.parametrize(("loader", "workers"), [(StatefulDataLoader, 0), (StatefulDataLoader, 2), (DataLoader, 0)])
@pytest.mark.parametrize("files", [1, 10])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_cell_resumes_exactly(tmp_path: Path, kind: str, files: int, loader: Any, workers: int) -> None:
    """torchdata's loader keeps the position; of a plain one without workers the dataset does."""
    reader = write(tmp_path / "input", kind, files)
    for ranks in (1, 3):
        seen = []
        for rank in range(ranks):
            whole, first, second = (
                loader(dataset(reader, kind, rank, ranks), batch_size=BATCH, num_workers=workers) for _ in range(3)
            )
            keeper, other = (one if loader is StatefulDataLoader else one.dataset for one in (first, second))
            batches = iter(first)
            taken = texts(itertools.islice(batches, STOP))
            other.load_state_dict(pickle.loads(pickle.dumps(keeper.state_dict())))
            mine = texts(whole)
            assert taken + texts(second) == mine, (rank, ranks)
            seen += mine
        assert sorted(seen, key=int) == [str(row) for row in range(ROWS)]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_plain_loader_with_workers_gives_no_state(tmp_path: Path, kind: str) -> None:
    """Its dataset does not know how far the workers are: a state would repeat what they have read."""
    loader = DataLoader(dataset(write(tmp_path / "input", kind, 3), kind), batch_size=BATCH, num_workers=2)
    assert len(texts([next(iter(loader))])) == BATCH
    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        loader.dataset.state_dict()
