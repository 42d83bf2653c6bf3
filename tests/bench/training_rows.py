"""Rows for training: rows per second, and what a resume costs by the size of row groups and record batches.

    python -m tests.bench.training_rows rows [rows]
    python -m tests.bench.training_rows resume [rows [rows of a group ...]]

Needs the extras torch and hub. Each figure is of a process of its own. The systems take turns, and each one's best of
two rounds counts. Compare the ratios of one run: absolute figures depend on the machine and on what else it does.

rows: token rows of 64 int32, in row groups and record batches of 100,000, with a text of 60 characters beside them
(so that they make documents, too). "documents" is what release 0.1 does: a Document for each row. CPU is that of all
processes; "own" is that of the process which has the loader, as a training loop: workers take the rest off it.

resume: seconds and memory from a loaded state to the first sample behind 99 % of the rows, in one file, with groups of
several sizes, after the imports. "0.1" are states of documents, as release 0.1 saves them; the others are of rows that
were counted. Memory is what the process
has at most during the resume beyond what it had before it, without pages of mapped files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 64
GROUP = 100_000
ROUNDS = 2
DATASETS_ROWS = 50_000  # it takes long


def table(count: int, tokens: int = TOKENS) -> Any:
    import pyarrow as pa

    values = np.random.default_rng(0).integers(0, 50_000, count * tokens, dtype=np.int32)
    offsets = np.arange(0, count * tokens + 1, tokens, dtype=np.int32)
    texts = pa.array([f"row {number:09} of a table with token rows and a text beside them" for number in range(count)])
    return pa.table({"text": texts, "input_ids": pa.ListArray.from_arrays(offsets, values)})


def write(folder: Path, kind: str, rows: Any, group: int) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    if kind == "parquet":
        pq.write_table(rows, folder / "a.parquet", row_group_size=group)
    else:
        with pa.ipc.new_file(folder / "a.arrow", rows.schema) as writer:
            writer.write_table(rows.combine_chunks(), max_chunksize=group)
    return folder.as_posix()


# Rows per second ---------------------------------------------------------------------------------------------------


def reader(kind: str, folder: str) -> Any:
    from datatrove_ckpt.readers import IpcReader, ParquetReader

    return (ParquetReader if kind == "parquet" else IpcReader)(folder)


def dataset(kind: str, folder: str, **options: Any) -> Any:
    from datatrove_ckpt.torch import ReaderDataset

    return ReaderDataset(reader(kind, folder), **options)


def pyarrow_alone(kind: str, folder: str) -> Iterator[int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "parquet":
        for batch in pq.ParquetFile(f"{folder}/a.parquet").iter_batches(8192, columns=["input_ids"]):
            yield batch.num_rows
        return
    with pa.ipc.open_file(pa.OSFile(f"{folder}/a.arrow")) as file:
        for number in range(file.num_record_batches):
            yield file.get_batch(number).num_rows


def of_datasets(kind: str, folder: str, form: str) -> Iterator[int]:
    import datasets

    files = {"data_files": f"{folder}/a.{kind}", "split": "train", "streaming": True, "cache_dir": f"{folder}.cache"}
    found = datasets.load_dataset(kind, **files).select_columns(["input_ids"])
    return ones(itertools.islice(found.with_format(form) if form else found, DATASETS_ROWS))


def ones(samples: Iterable[Any]) -> Iterator[int]:
    return (1 for _ in samples)


def batches(samples: Iterable[Any]) -> Iterator[int]:
    return (len(batch["input_ids"]) for batch in samples)


def tokens_of(document: Any) -> Any:
    return {"input_ids": document.metadata["input_ids"]}


def hashed(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform of some 20 microseconds."""
    assert hashlib.blake2b(sample["input_ids"].tobytes() * 64).digest()
    return sample


def loaded(kind: str, folder: str, workers: int, arrays: bool, transform: Any = None) -> Iterator[int]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    made = dataset(kind, folder, columns=["input_ids"], batch_size=512, arrays=arrays, transform=transform)
    return batches(StatefulDataLoader(made, batch_size=None if arrays else 512, num_workers=workers))


def documents_loaded(kind: str, folder: str, workers: int) -> Iterator[int]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    made = dataset(kind, folder, indexed=False, transform=tokens_of)
    loader = StatefulDataLoader(made, batch_size=512, num_workers=workers, collate_fn=len)
    return iter(loader)


SYSTEMS: dict[str, Callable[[str, str], Iterator[int]]] = {
    "documents": lambda kind, folder: ones(dataset(kind, folder, indexed=False, transform=tokens_of)),
    "columns": lambda kind, folder: ones(dataset(kind, folder, columns=["input_ids"])),
    "columns, shuffled": lambda kind, folder: ones(dataset(kind, folder, columns=["input_ids"], shuffle_seed=1)),
    "arrays of 512": lambda kind, folder: batches(
        dataset(kind, folder, columns=["input_ids"], batch_size=512, arrays=True)
    ),
    "arrays of 512, shuffled": lambda kind, folder: batches(
        dataset(kind, folder, columns=["input_ids"], batch_size=512, arrays=True, shuffle_seed=1)
    ),
    "datasets": lambda kind, folder: of_datasets(kind, folder, ""),
    "datasets, numpy": lambda kind, folder: of_datasets(kind, folder, "numpy"),
    "pyarrow alone, no rows": pyarrow_alone,
    "loader, documents": lambda kind, folder: documents_loaded(kind, folder, 0),
    "loader, documents, 2 workers": lambda kind, folder: documents_loaded(kind, folder, 2),
    "loader, columns": lambda kind, folder: loaded(kind, folder, 0, False),
    "loader, columns, 2 workers": lambda kind, folder: loaded(kind, folder, 2, False),
    "loader, columns, transform": lambda kind, folder: loaded(kind, folder, 0, False, hashed),
    "loader, columns, transform, 2 workers": lambda kind, folder: loaded(kind, folder, 2, False, hashed),
    "loader, arrays of 512": lambda kind, folder: loaded(kind, folder, 0, True),
    "loader, arrays of 512, 2 workers": lambda kind, folder: loaded(kind, folder, 2, True),
}


def measure_rows(system: str, kind: str, folder: str) -> dict[str, float]:
    import_lazily()
    samples = SYSTEMS[system](kind, folder)
    started, count = time.perf_counter(), 0
    cpu = time.process_time()
    for number in samples:
        count += number
    seconds = time.perf_counter() - started
    del samples  # its workers end
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() - cpu
    return {"rows": count, "rate": count / seconds, "cpu": own + workers.ru_utime + workers.ru_stime, "own": own}


def compare_rows(count: int) -> None:
    with tempfile.TemporaryDirectory() as parent:
        rows = table(count)
        folders = {kind: write(Path(parent) / kind, kind, rows, GROUP) for kind in ("parquet", "arrow")}
        del rows
        best: dict[tuple[str, str], list[float]] = {}
        for _ in range(ROUNDS):
            for kind, folder in folders.items():
                for system in SYSTEMS:
                    found = child("rows", system, kind, folder)
                    read = found["rows"]
                    assert read == (min(count, DATASETS_ROWS) if "datasets" in system else count), (system, found)
                    rate, *costs = best.get((system, kind), [0.0, 1e9, 1e9])
                    now = [found[name] / read * 1e6 for name in ("cpu", "own")]
                    best[system, kind] = [max(rate, found["rate"]), *map(min, costs, now)]
    print(
        f"{count:,} rows of {TOKENS} tokens: thousand rows per second; CPU us per row, and own; times less CPU than "
        "documents\n"
    )
    print("| samples | Parquet | | | | Arrow | | | |\n|---|---|---|---|---|---|---|---|---|")
    for system in SYSTEMS:
        base = "loader, documents" if system.startswith("loader") else "documents"
        cells = []
        for kind in folders:
            rate, cpu, own = best[system, kind]
            cells.append(f"{rate / 1000:,.0f} | {cpu:.2f} | {own:.2f} | {best[base, kind][1] / cpu:.1f} x")
        print(f"| {system} | {' | '.join(cells)} |")


# Resume ------------------------------------------------------------------------------------------------------------


def memory() -> int:
    """Bytes of the process that are not pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def measure_resume(kind: str, folder: str, path: str) -> dict[str, float]:
    import threading

    content = json.loads(Path(path).read_text())
    made = dataset(kind, folder, **content["options"], **({"transform": len_of} if content["documents"] else {}))
    made.load_state_dict(content["state"])
    import_lazily()
    before, peak, done = memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started, cpu = time.perf_counter(), time.process_time()
    next(iter(made))
    found = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    done.set()
    watcher.join()
    return found | {"memory": max(peak[0], memory()) - before}


def import_lazily() -> None:
    """pyarrow imports pandas and its own functions when they are first used, which takes longer than a resume."""
    import pyarrow as pa

    pa.table({"a": np.arange(2)}).take(pa.array(np.arange(2)))["a"].to_numpy()


def len_of(document: Any) -> int:
    return len(document.text)


def state_at(kind: str, folder: str, options: dict[str, Any], documents: bool, rows: int, group: int) -> Any:
    """The state after 99 % of the rows, made from that after the first: rows are documents here."""
    made = dataset(kind, folder, **options, **({"transform": len_of} if documents else {}))
    samples = iter(made)
    next(samples)
    state, place = made.state_dict(), rows * 99 // 100
    if options.get("indexed") is not False:
        return state | {"samples": place} if "samples" in state else with_samples(state, place)
    turn, row = divmod(place, group)
    at = [turn, row, place] if options.get("shuffle_seed") is None else [turn + 1, row]
    return state | {"reader": state["reader"] | {"documents": place, "at": at}}


def with_samples(state: Any, place: int) -> Any:
    from datatrove_ckpt.torch.states import DatasetState

    then = DatasetState.from_json(state)
    return DatasetState(
        then.epoch, then.order, then.input, then.done, then.slot, place, then.batch, then.even
    ).to_json()


def compare_resume(count: int, groups: list[int]) -> None:
    print(f"{count:,} rows of 8 tokens and a text in one file; resume behind 99 %: seconds (of CPU), MB\n")
    heads = [
        f"{kind}, {what}" for what in ("documents of 0.1", "documents", "columns") for kind in ("Parquet", "Arrow")
    ]
    print(f"| group | order | {' | '.join(heads)} |\n|---|---|---|---|---|---|---|---|", flush=True)
    rows = table(count, 8)
    for group in groups:
        with tempfile.TemporaryDirectory() as parent:
            folders = {kind: write(Path(parent) / kind, kind, rows, group) for kind in ("parquet", "arrow")}
            for seed in (None, 1):
                cells = []
                for only in ({"indexed": False}, {}, {"columns": ["input_ids"]}):
                    documents = "columns" not in only
                    options: dict[str, Any] = {"shuffle_seed": seed, **only}
                    for kind, folder in folders.items():
                        state = state_at(kind, folder, options, documents, count, group)
                        path = Path(parent) / "state.json"
                        path.write_text(json.dumps({"state": state, "options": options, "documents": documents}))
                        found = child("resume", kind, folder, path.as_posix())
                        cells.append(f"{found['seconds']:.2f} ({found['cpu']:.2f}), {found['memory'] / 1e6:.0f}")
                order = "shuffled" if seed else "in order"
                print(f"| {group:,} | {order} | {' | '.join(cells)} |", flush=True)


def child(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.training_rows", "child", *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "LOGURU_LEVEL": "WARNING"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["child"]:
        measure = measure_rows if arguments[1] == "rows" else measure_resume
        print(json.dumps(measure(*arguments[2:])))
    elif arguments[:1] == ["resume"]:
        count, *groups = map(int, arguments[1:] or ["4000000"])
        compare_resume(count, groups or [10_000, count])
    else:
        compare_rows(int(arguments[1]) if len(arguments) > 1 else 500_000)


if __name__ == "__main__":
    main(sys.argv[1:])
