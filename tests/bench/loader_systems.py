"""One data loader, measured in a process of its own: rows per second, resume, memory, and how well it shuffles.

``tests.bench.loaders`` starts this file as a script, because MosaicML Streaming needs other versions of some packages
than we do, and so another virtual environment: this file imports nothing of ours at the top.

    python tests/bench/loader_systems.py SYSTEM FOLDER ROWS FILES

Prints one line of JSON. Speeds are per second of CPU time of this process, which other work on the machine hardly
changes.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH = 32
STOP = 0.9  # of the rows
WINDOW = 10_000  # rows that are shuffled at once, in the systems where this is a setting
WORDS = ["cat", "mat", "moon", "sun", "barn", "dog", "old", "near"]


def text_of(row: int) -> str:
    return " ".join(WORDS[(row * 7 + i * (1 + row % 5)) % len(WORDS)] for i in range(20))


def write_parquet(folder: Path, rows: int, files: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    size = rows // files
    for file in range(files):
        numbers = range(file * size, (file + 1) * size)
        table = pa.table({"row": list(numbers), "text": [text_of(row) for row in numbers]})
        pq.write_table(table, folder / f"{file:03}.parquet", row_group_size=1000)


def write_mds(folder: Path, rows: int, files: int) -> None:
    from streaming import MDSWriter

    size = rows // files
    row_bytes = 12 + 8 + len(text_of(0))
    with MDSWriter(out=str(folder), columns={"row": "int", "text": "str"}, size_limit=size * row_bytes) as writer:
        for row in range(rows):
            writer.write({"row": row, "text": text_of(row)})


Dataset = Any


def ours(folder: Path, **options: Any) -> Dataset:
    import pyarrow as pa
    import pyarrow.parquet
    from loguru import logger

    # The memory of pyarrow is not the loader's, nor that of pandas, which pyarrow imports when it is used.
    pa.table({"a": ["x", "y"]}).take(pa.array([1]))["a"].to_numpy()
    logger.remove()
    from datatrove_ckpt.readers import ParquetReader
    from datatrove_ckpt.torch import ReaderDataset

    options = {"shuffle_seed": 1, "shuffle_window": WINDOW} | options
    return ReaderDataset(ParquetReader(str(folder / "parquet")), **options)


def documents(folder: Path) -> Dataset:
    return ours(folder, transform=lambda document: {"row": document.metadata["row"], "text": document.text})


def columns(folder: Path) -> Dataset:
    return ours(folder, columns=["row", "text"])


def columns_large_window(folder: Path) -> Dataset:
    return ours(folder, columns=["row", "text"], shuffle_window="256MB")


def columns_in_order(folder: Path) -> Dataset:
    return ours(folder, columns=["row", "text"], shuffle_seed=None)


def hugging_face_in_order(folder: Path) -> Dataset:
    from datasets import load_dataset

    files = [str(path) for path in sorted((folder / "parquet").iterdir())]
    return load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache"))


def hugging_face(folder: Path) -> Dataset:
    return hugging_face_in_order(folder).shuffle(seed=1, buffer_size=WINDOW)


class Mosaic:
    """A StreamingDataset, with the position as its own loader keeps it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        self.dataset = StreamingDataset(local=str(folder / "mds"), batch_size=BATCH, **options)
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        for row in self.dataset:
            self.given += 1
            yield row

    def state_dict(self) -> Any:
        return self.dataset.state_dict(self.given, True)

    def load_state_dict(self, state: Any) -> None:
        self.given = state["sample_in_epoch"]
        self.dataset.load_state_dict(state)


def mosaic(folder: Path) -> Dataset:
    return Mosaic(folder, shuffle=True, shuffle_algo="py1e", shuffle_seed=1, shuffle_block_size=WINDOW)


def mosaic_in_order(folder: Path) -> Dataset:
    return Mosaic(folder, shuffle=False)


SYSTEMS: dict[str, Callable[[Path], Dataset]] = {
    "ours, documents": documents,
    "ours, columns": columns,
    "ours, columns, window 256MB": columns_large_window,
    "ours, columns, in order": columns_in_order,
    "datasets, shuffle buffer": hugging_face,
    "datasets, in order": hugging_face_in_order,
    "MosaicML Streaming, py1e": mosaic,
    "MosaicML Streaming, in order": mosaic_in_order,
}


def quality(order: list[int], files: int) -> dict[str, float]:
    """How well an order mixes. A uniform one has a displacement of 1/3, and 2 % of its neighbours within 1 %."""
    rows = len(order)
    size = rows // files
    moved = sum(abs(place - row) for place, row in enumerate(order)) / rows / rows
    near = sum(abs(one - other) < rows / 100 for one, other in itertools.pairwise(order)) / (rows - 1)
    batches = [order[at : at + BATCH] for at in range(0, rows - BATCH + 1, BATCH)]
    spans = sum(len({row // size for row in batch}) for batch in batches) / len(batches)
    return {"displacement": moved, "neighbours": near, "files in a batch": spans}


def memory() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(make: Callable[[Path], Dataset], folder: Path, rows: int, files: int) -> dict[str, Any]:
    dataset, before = make(folder), memory()
    next(iter(dataset))  # what is read once: indexes, caches
    dataset = make(folder)
    started = time.process_time()
    order = [int(sample["row"]) for sample in dataset]
    seconds = time.process_time() - started
    used = memory() - before

    stop = int(rows * STOP) // BATCH * BATCH
    dataset = make(folder)
    batches = iter(dataset)
    for _ in itertools.islice(batches, stop):
        pass
    state = dataset.state_dict()
    del batches
    resumed = make(folder)
    wall, cpu = time.perf_counter(), time.process_time()
    resumed.load_state_dict(state)
    rest = iter(resumed)
    first = next(rest, None)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    following = [int(sample["row"]) for sample in itertools.chain([] if first is None else [first], rest)]
    return {
        "rows": len(order),
        "distinct": len(set(order)),
        "rows/s": len(order) / seconds,
        "resume s": cpu,
        "resume wall s": wall,
        "exact": following == order[stop:],
        "repeated": len(set(following) & set(order[:stop])),
        "skipped": len(set(order[stop:]) - set(following)),
        "MB": used,
        "state bytes": len(json.dumps(state, default=str)),
        **quality(order, files),
    }


def main() -> None:
    name, folder, rows, files = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if name in ("parquet", "mds"):
        (write_parquet if name == "parquet" else write_mds)(folder / name, rows, files)
        return
    print(json.dumps(measure(SYSTEMS[name], folder, rows, files)))


if __name__ == "__main__":
    main()
