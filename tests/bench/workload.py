"""Inputs: numbered documents of a given size, made once per folder in each format.

A document's text begins with ``#<number>#``, by which the mock server tells documents apart.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")


def rows(count: int, size: int) -> Iterator[dict[str, Any]]:
    """Rows whose text has ``size`` characters, of words no compressor finds too easy."""
    chance = random.Random(0)
    words = [f"{chance.random():.6}" for _ in range(5000)]
    stock = " ".join(chance.choices(words, k=200_000 + size // 4))
    for number in range(count):
        start = chance.randrange(len(stock) - size)
        text = f"#{number}# {stock[start : start + size]}"[:size]
        yield {"text": text, "id": f"document {number}", "url": f"https://example.org/{number}"}


def make_input(folder: Path, kind: str, count: int, size: int) -> Path:
    """A folder with one file of ``count`` documents; one that is there already is taken as it is."""
    place = folder / "inputs" / f"{kind.replace('.', '-')}-{count}-{size}"
    if (place / "done").exists():
        return place / "data"
    (place / "data").mkdir(parents=True, exist_ok=True)
    path = place / "data" / f"input.{kind}"
    if kind == "parquet":
        _write_parquet(path, count, size)
    else:
        with _open(path) as file:
            for row in rows(count, size):
                file.write(json.dumps(row).encode() + b"\n")  # zstd's writer has no writelines
    (place / "done").touch()
    return place / "data"


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "wb", compresslevel=3)
    if path.suffix == ".zst":
        import zstandard

        return zstandard.open(path, "wb")
    return path.open("wb")


def _write_parquet(path: Path, count: int, size: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    group: list[dict[str, Any]] = []
    with pq.ParquetWriter(path, pa.schema([(name, pa.string()) for name in ("text", "id", "url")])) as writer:
        for row in rows(count, size):
            group.append(row)
            if len(group) == 10_000:
                writer.write_table(pa.Table.from_pylist(group))
                group.clear()
        if group:
            writer.write_table(pa.Table.from_pylist(group))
