"""Formats x files x workers x ranks x loaders: a stop loses no row, repeats none, and moves none. Prints the counts.

Needs torch and torchdata: ``uv pip install -e .[torch]``.
"""

from __future__ import annotations

import gzip
import itertools
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Cell:
    """One way of reading. ``workers``: of each rank."""

    kind: str
    files: int
    workers: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.kind:9} {self.files:5} {self.workers:7} {self.ranks:5}"


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
        elif kind == "jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        else:
            path.write_bytes(zstandard.compress(lines) if kind == "jsonl.zst" else lines)
    readers = {"parquet": ParquetReader, "rows": ParquetReader, "arrow": IpcReader}
    return readers.get(kind, JsonlReader)(folder.as_posix())  # type: ignore[no-any-return, unused-ignore]


def dataset(reader: SeekingReader, cell: Cell, rank: int) -> ReaderDataset:
    options = {"indexed": False} if cell.kind == "rows" else {"batch_size": BATCH}
    return ReaderDataset(reader, rank, cell.ranks, shuffle_seed=1, **options)  # type: ignore[arg-type]


def texts(batches: Any) -> list[str]:
    return [text for batch in batches for text in batch["text"]]


def with_a_stop(make: Any, stateful: Any) -> tuple[list[str], list[str]]:
    """The rows without a stop, and those of a loader that stops and another one that goes on."""
    whole = texts(make())
    first = make()
    batches = iter(first)
    taken = texts(itertools.islice(batches, STOP))
    state = pickle.dumps(stateful(first).state_dict())
    del batches
    second = make()
    stateful(second).load_state_dict(pickle.loads(state))
    return whole, taken + texts(second)


def run(cell: Cell, make: Any, stateful: Any, loader: str) -> Counter[str]:
    """All ranks of a cell, one after the other. Prints and returns its counts."""
    counts: Counter[str] = Counter({"stops": cell.ranks})
    seen: list[str] = []
    for rank in range(cell.ranks):
        whole, resumed = with_a_stop(lambda rank=rank: make(rank), stateful)
        counts["twice after a stop"] += sum((Counter(resumed) - Counter(whole)).values())
        counts["skipped after a stop"] += sum((Counter(whole) - Counter(resumed)).values())
        counts["in another order"] += resumed != whole
        seen += whole
    counts["rows"] = len(seen)
    counts["of two ranks"] = len(seen) - len(set(seen))
    counts["missing"] = ROWS - len(set(seen))
    print(f"{cell} {loader:18} {counts['rows']:4} rows, {cell.ranks} stops, {bad(counts)} wrong")
    return counts


def bad(counts: Counter[str]) -> int:
    return sum(count for what, count in counts.items() if what not in ("rows", "stops"))


@pytest.fixture(scope="module", autouse=True)
def sums() -> Iterator[Counter[str]]:
    """The counts of all cells, printed at the end."""
    total: Counter[str] = Counter()
    print(f"\n{'format':9} files workers ranks")
    yield total
    print(f"sum: {dict(total)}, {bad(total)} wrong")


@pytest.mark.parametrize("files", [1, 10])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_cell_resumes_exactly(tmp_path: Path, sums: Counter[str], kind: str, files: int) -> None:
    reader = write(tmp_path / "input", kind, files)
    failed = []
    for workers, ranks in itertools.product((0, 2), (1, 3)):
        cell = Cell(kind, files, workers, ranks)
        counts = run(
            cell,
            lambda rank, cell=cell: StatefulDataLoader(
                dataset(reader, cell, rank), batch_size=BATCH, num_workers=cell.workers
            ),
            lambda loader: loader,
            "StatefulDataLoader",
        )
        failed += [f"{cell}: {dict(counts)}"] if bad(counts) or counts["rows"] != ROWS else []
        sums.update(counts)
    for ranks in (1, 3):
        cell = Cell(kind, files, 0, ranks)
        counts = run(
            cell,
            lambda rank, cell=cell: DataLoader(dataset(reader, cell, rank), batch_size=BATCH),
            lambda loader: loader.dataset,
            "DataLoader",
        )
        failed += [f"{cell}, DataLoader: {dict(counts)}"] if bad(counts) or counts["rows"] != ROWS else []
        sums.update(counts)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_plain_loader_with_workers_gives_no_state(tmp_path: Path, kind: str) -> None:
    """Its dataset does not know how far the workers are: a state would repeat what they have read."""
    cell = Cell(kind, 3, 2, 1)
    loader = DataLoader(dataset(write(tmp_path / "input", kind, 3), cell, 0), batch_size=BATCH, num_workers=2)
    batches = iter(loader)
    assert len(texts([next(batches)])) == BATCH
    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        loader.dataset.state_dict()
    print(f"{cell} DataLoader          refused")
