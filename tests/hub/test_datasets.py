"""datasets loads repositories of the fake hub, whole and streaming, and datatrove reads and writes ``hf://`` there."""

from __future__ import annotations

import io
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datatrove.data import Document
from datatrove.pipeline.readers import HuggingFaceDatasetReader, ParquetReader
from datatrove.pipeline.writers import ParquetWriter

from tests.hub import FakeHub


def rows(start: int) -> list[dict[str, object]]:
    return [{"id": str(number), "text": f"text {number}"} for number in range(start, start + 10)]


def parquet(start: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows(start)), buffer, row_group_size=5)
    return buffer.getvalue()


def jsonl(start: int) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows(start)).encode()


@pytest.fixture(params=["parquet", "jsonl"])
def repository(request: pytest.FixtureRequest, hub: FakeHub) -> str:
    write = parquet if request.param == "parquet" else jsonl
    hub.put("org/data", {f"data/{n}.{request.param}": write(10 * n) for n in range(2)})
    return "org/data"


@pytest.mark.parametrize("streaming", [False, True])
def test_load_dataset(repository: str, streaming: bool) -> None:
    loaded = datasets.load_dataset(repository, split="train", streaming=streaming)
    assert [row["id"] for row in loaded] == [str(number) for number in range(20)]


def test_datatroves_reader(repository: str) -> None:
    reader = HuggingFaceDatasetReader(repository, {"split": "train"}, streaming=True)
    assert [document.text for document in reader.run()] == [f"text {number}" for number in range(20)]


def test_datatroves_reader_and_writer_of_hf_urls(hub: FakeHub, tmp_path: Path) -> None:
    hub.create_repo("org/data")
    with ParquetWriter("hf://datasets/org/data/config", "${rank}.parquet") as writer:
        for number in range(3):
            writer.write(Document(f"text {number}", str(number)))
    assert list(hub.files("org/data")) == ["config/000_00000.parquet"]
    assert [document.id for document in ParquetReader("hf://datasets/org/data/config").run()] == ["0", "1", "2"]
