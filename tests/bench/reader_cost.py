"""What a position on each document costs, and what skipping to one does.

    python tests/bench/reader_cost.py [documents]
    python tests/bench/reader_cost.py cold [documents]

Reading: datatrove's reader and ours by turns, on the same files, the best of five each, in seconds; below 1.05 is the
aim. What tracking adds to one document is measured by itself as well, because the two readers differ in more than that.
Skipping: seconds until the last document, all others done.

cold: seconds from the start of a new process to the document behind a million others of a dataset in Parquet, by
HuggingFaceDatasetReader: streaming, and map-style with its Arrow cache made before. Of these, what the imports take.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
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


COLD = """
import itertools, json, sys, time
started = time.time()
from loguru import logger
logger.remove()
folder, streaming, number, state = sys.argv[1:]
from datatrove.pipeline.readers import HuggingFaceDatasetReader
if state:
    from datatrove_ckpt.readers import HuggingFaceDatasetReader
import datasets
imported = time.time()
datasets.disable_progress_bars()
options = {"data_files": folder + "/*.parquet", "split": "train", "cache_dir": folder + "/cache"}
reader = HuggingFaceDatasetReader("parquet", options, streaming=streaming == "True")
if state:
    reader.load_state_dict(json.loads(state))
    document = next(reader.run())
else:
    document = next(itertools.islice(reader.run(), int(number), None))
assert document.id == "id " + number, document.id
print(json.dumps([imported - started, time.time() - imported]))
"""


def cold(count: int) -> None:
    logger.remove()
    print(f"Document {count} in a new process; seconds\n")
    print("| dataset | reader | after the imports | imports |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_many(Path(folder) / "a.parquet", count + 10)
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}

        def run(streaming: bool, state: Any) -> list[float]:
            arguments = [folder, str(streaming), str(count), json.dumps(state) if state else ""]
            command = [sys.executable, "-c", COLD, *arguments]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
            found: list[float] = json.loads(done.stdout)
            return found

        for streaming in (True, False):
            state = state_before(folder, streaming, count)
            for name, given in (("ours", state), ("datatrove", None)):
                imports, rest = run(streaming, given)
                print(f"| {'stream' if streaming else 'map-style'} | {name} | {rest:.2f} | {imports:.2f} |", flush=True)


def write_many(path: Path, count: int) -> None:
    """Rows of 2 kB, in row groups of 1,000 as the hub recommends."""
    some = [row["text"] for row in rows(1000)]
    schema = pa.schema([("text", pa.string()), ("id", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, count, 1000):
            ids = [f"id {number}" for number in range(first, min(first + 1000, count))]
            writer.write_table(pa.table({"text": some[: len(ids)], "id": ids}, schema=schema))


def state_before(folder: str, streaming: bool, count: int) -> Any:
    """The position right before document ``count``, made from that of an early one: rows are documents here."""
    options = {"data_files": f"{folder}/*.parquet", "split": "train", "cache_dir": f"{folder}/cache"}
    reader = ours.HuggingFaceDatasetReader("parquet", options, streaming=streaming)
    state = position_state(next(reader.run()))
    assert state is not None
    return state | {"documents": count, "at": [count]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["cold"]:
        cold(int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
