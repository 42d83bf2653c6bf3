"""What a position on each document costs, and what skipping to one does.

    python tests/bench/reader_cost.py [documents]

Reading: datatrove's reader and ours by turns, on the same files, the best of five each, in seconds; below 1.05 is the
aim. What tracking adds to one document is measured by itself as well, because the two readers differ in more than that.
Skipping: seconds until the last document, all others done.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datatrove.data import Document
from datatrove.io import DataFolder
from datatrove.pipeline import readers as original
from loguru import logger

from datatrove_ckpt import readers as ours
from datatrove_ckpt.readers import jsonl, position_state, positions

KINDS: dict[str, tuple[Any, Any]] = {
    "jsonl": (original.JsonlReader, ours.JsonlReader),
    "jsonl.gz": (original.JsonlReader, ours.JsonlReader),
    "jsonl.zst": (original.JsonlReader, ours.JsonlReader),
    "parquet": (original.ParquetReader, ours.ParquetReader),
    "arrow": (original.IpcReader, ours.IpcReader),
}


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Of about 2 kB."""
    words = [f"{random.Random(i).random():.5}" for i in range(5000)]
    chance = random.Random(0)
    for i in range(count):
        yield {"text": " ".join(chance.choices(words, k=250)), "id": f"id {i}", "url": f"https://a.b/{i}"}


def write(folder: Path, kind: str, count: int) -> None:
    folder.mkdir()
    path = folder / f"a.{kind}"
    if kind.startswith("jsonl"):
        with DataFolder(folder.as_posix()).open(path.name, "wt", compression="infer") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows(count))
        return
    table = pa.Table.from_pylist(list(rows(count)))
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=10_000)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)


def exhaust(documents: Iterator[Document]) -> float:
    started = time.perf_counter()
    for _ in documents:
        pass
    return time.perf_counter() - started


def main(count: int) -> None:
    logger.remove()
    print(f"{count} documents of about 2 kB; seconds\n")
    print("| input | datatrove | ours | ours / datatrove | us per document | skip all but one |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as parent:
        for kind, (theirs, mine) in KINDS.items():
            folder = Path(parent) / kind
            write(folder, kind, count)
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(5):
                for reader, taken in zip((theirs, mine), times, strict=True):
                    taken.append(exhaust(reader(folder.as_posix()).run()))
            *_, before_last, _last = mine(folder.as_posix()).run()
            resumed = mine(folder.as_posix())
            resumed.load_state_dict(position_state(before_last))
            skip = exhaust(resumed.run())
            theirs_best, ours_best = map(min, times)
            print(
                f"| {kind} | {theirs_best:.2f} | {ours_best:.2f} | {ours_best / theirs_best:.2f} "
                f"| {ours_best / count * 1e6:.1f} | {skip:.3f} |"
            )
    tracking()


def tracking() -> None:
    """The few operations that make a position, by themselves."""
    line, file, documents = b"x" * 2000, positions.FileState({}), []
    fields = {"text": "", "id": "", "media": [], "metadata": {}}
    best = {}
    for name, make in {"plain": Document, "positioned": ours.PositionedDocument}.items():
        for _ in range(5):
            started = time.perf_counter()
            for i in range(100_000):
                document = make(**fields)
                if name == "positioned":
                    document.position = (0, i, file, (i, i, i, jsonl.xxh3_64_intdigest(line, i), 1), (0, 0, False))
            best[name] = min(best.get(name, 1.0), (time.perf_counter() - started) * 10)
            documents.append(document)
    print(f"\nA positioned document takes {best['positioned'] - best['plain']:.2f} us longer to make than a plain one.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
