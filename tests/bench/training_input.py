"""Input of a training loop: ``python -m tests.bench.training_input [--rows 100000] [--rounds 3]``.

The same Parquet files (token rows of many lengths, texts, labels) read in batches by each way, in
turn, each time in a process of its own. Rows a second are those of the second epoch, of one core's
time, system time included; memory is the peak above that of the imports and the opened input. A
resume is exact if a new process with the saved state gives the rest of the rows, of 36,000 at least
(``STOP``). ``pip install
grain litdata webdataset``; without a library its row is empty.

``--texts`` instead: 40,000 rows with an id and a text (450 bytes) as Parquet, Arrow and JSON Lines,
ours and ``datasets.iter(batch)``, in turn, each time in a fork of a process with all imports: us of
CPU a row of the opening and the first epoch, and of later ones, and their ratio, round by round;
then the medians. Two rounds take a minute.

Rows become numpy arrays and texts, except with "(arrow)". litdata and webdataset read
files of their own, made before. torchdata.nodes reads the stream of ``datasets``.
"""

import hashlib
import importlib.util
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from loguru import logger

from tests.bench.measure import ROOT, interleaved, median
from tests.bench.systems import cpu_seconds, highest_memory
from tests.bench.tables import markdown, parser

OFFLINE = {"HF_HUB_OFFLINE": "1", "DATATROVE_CKPT_CACHE": ""}
COLUMNS = ["input_ids", "text", "label"]
FILES, BATCH, STOP, WINDOW = 8, 512, 70, 65_000
"""``WINDOW``: rows as many as 128 MB hold, for those that count rows."""


def make(folder, rows):
    random = np.random.default_rng(0)
    words = [
        "".join(map(chr, random.integers(97, 123, size))) for size in random.integers(2, 11, 20_000)
    ]
    (folder / "parquet").mkdir()
    for number in range(FILES):
        count = rows // FILES
        lengths = np.minimum(2048, random.lognormal(5.2, 0.8, count).astype(np.int32) + 1)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = (random.zipf(1.2, ends[-1]) % 50_000).astype(np.int32)
        texts = [
            " ".join(words[word] for word in row) for row in random.zipf(1.3, (count, 100)) % 20_000
        ]
        columns = [
            pa.ListArray.from_arrays(ends, ids),
            pa.array(texts),
            pa.array(random.integers(0, 10, count)),
        ]
        pq.write_table(
            pa.table(columns, COLUMNS), folder / f"parquet/{number}.parquet", row_group_size=10_000
        )
    for library, write in COPIES.items():
        if importlib.util.find_spec(library):
            table = pq.read_table(folder / "parquet").to_pylist()
            write(
                folder, (row | {"input_ids": np.array(row["input_ids"], np.int32)} for row in table)
            )


def write_litdata(folder, rows):
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder / "litdata"), chunk_bytes="16MB")
    for number, row in enumerate(rows):
        writer[number] = row
    writer.done()
    writer.merge()


def write_webdataset(folder, rows):
    from webdataset import ShardWriter

    (folder / "webdataset").mkdir()
    with ShardWriter(str(folder / "webdataset/%d.tar"), maxcount=25_000, verbose=0) as writer:
        for number, row in enumerate(rows):
            files = dict(zip(("npy", "txt", "cls"), map(row.get, COLUMNS), strict=True))
            writer.write({"__key__": str(number)} | files)


COPIES = {"litdata": write_litdata, "webdataset": write_webdataset}


class Ours:
    def __init__(self, folder, shuffled):
        from datatrove_ckpt.torch import ReaderDataset

        self.input = ReaderDataset.from_folder(str(folder / "parquet"))
        if shuffled:
            self.input = self.input.shuffle(seed=1)
        self.input = self.input.batch(BATCH)
        self.state, self.load = self.input.state_dict, self.input.load_state_dict

    def epoch(self, number):
        self.input.set_epoch(number)
        return iter(self.input)


class HuggingFace:
    def __init__(self, folder, shuffled, kind):
        import datasets

        files, cache = str(folder / "parquet/*.parquet"), str(folder / "cache")
        self.input = datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=True, cache_dir=cache
        )
        if shuffled:
            self.input = self.input.shuffle(seed=1, buffer_size=WINDOW)
        self.input = self.input.with_format(kind) if kind else self.input
        self.state, self.load = self.input.state_dict, self.input.load_state_dict

    def epoch(self, number):
        self.input.set_epoch(number)
        return iter(self.input.iter(BATCH))


class Raw:
    def __init__(self, folder, shuffled):
        self.files = [pq.ParquetFile(path) for path in sorted((folder / "parquet").iterdir())]
        self.shuffled = shuffled

    def epoch(self, number):
        for batch in (
            self.windows(number)
            if self.shuffled
            else (b for f in self.files for b in f.iter_batches(BATCH))
        ):
            ids, texts, labels = batch.columns
            ends = ids.offsets.to_numpy()
            rows = np.split(ids.values.to_numpy()[ends[0] : ends[-1]].copy(), ends[1:-1] - ends[0])
            texts = texts.to_numpy(zero_copy_only=False).tolist()
            yield dict(zip(COLUMNS, (rows, texts, labels.to_numpy().copy()), strict=True))

    def windows(self, number):
        """Row groups in any order; of as many as a window holds, the rows in any order."""
        random = np.random.default_rng(number)
        groups = [(file, group) for file in self.files for group in range(file.num_row_groups)]
        groups = [groups[place] for place in random.permutation(len(groups))]
        while groups:
            window = []
            while groups and (not window or sum(one.num_rows for one in window) + 10_000 <= WINDOW):
                file, group = groups.pop()
                window.append(file.read_row_group(group))
            table = pa.concat_tables(window).combine_chunks()
            del window
            order = random.permutation(table.num_rows)
            for first in range(0, len(order), BATCH):
                yield table.take(order[first : first + BATCH]).combine_chunks().to_batches()[0]


class Grain:
    def __init__(self, folder, shuffled):
        from grain.experimental import ParquetIterDataset, WindowShuffleIterDataset

        made = ParquetIterDataset(sorted(map(str, (folder / "parquet").iterdir())))
        self.input = (
            WindowShuffleIterDataset(made, window_size=WINDOW, seed=1) if shuffled else made
        )

    def epoch(self, _):
        self.rows = iter(self.input)
        if hasattr(self, "then"):
            self.rows.set_state(self.then)
        return batched(self.rows)

    def state(self):
        return self.rows.get_state()

    def load(self, state):
        self.then = state


class LitData:
    def __init__(self, folder, shuffled):
        from litdata import StreamingDataset

        self.input = StreamingDataset(str(folder / "litdata"), shuffle=shuffled)

    def epoch(self, _):
        self.given = 0
        rows = (row for row in self.input)  # iter() of its iterator would begin again
        for batch in batched(rows):
            self.given += len(batch["label"])
            yield batch

    def state(self):
        return self.input.state_dict(self.given, num_workers=1, batch_size=BATCH)

    def load(self, state):
        self.input.load_state_dict(state)


class WebDataset:
    def __init__(self, folder, shuffled):
        from webdataset import WebDataset

        files = sorted(map(str, (folder / "webdataset").iterdir()))
        self.input = WebDataset(files, shardshuffle=len(files) if shuffled else False)
        if shuffled:
            self.input = self.input.shuffle(WINDOW)
        self.input = self.input.decode()

    def epoch(self, _):
        files = ("npy", "txt", "cls")
        return batched(
            dict(zip(COLUMNS, map(sample.get, files), strict=True)) for sample in self.input
        )


class Nodes:
    def __init__(self, folder, shuffled):
        from torchdata.nodes import Batcher, IterableWrapper, Loader

        source = HuggingFace(folder, shuffled, "numpy").input
        self.input = Loader(Batcher(IterableWrapper(source), BATCH, drop_last=False))
        self.state, self.load = self.input.state_dict, self.input.load_state_dict

    def epoch(self, _):
        for rows in self.input:
            yield {name: [row[name] for row in rows] for name in COLUMNS}


def batched(rows):
    while taken := [*itertools.islice(rows, BATCH)]:
        yield {name: [row[name] for row in taken] for name in COLUMNS}


WAYS = {
    "rows": Ours,
    "pyarrow": Raw,
    "`datasets.iter(batch)`": partial(HuggingFace, kind=None),
    "(numpy)": partial(HuggingFace, kind="numpy"),
    "(arrow)": partial(HuggingFace, kind="arrow"),
    "grain": Grain,
    "litdata": LitData,
    "torchdata.nodes": Nodes,
    "webdataset": WebDataset,
}


def digest(batches):
    found = hashlib.blake2b()
    for batch in batches:
        for ids, text in zip(batch["input_ids"], batch["text"], strict=True):
            found.update(f"{len(ids)} {ids[-1]} {text}".encode())
    return found.hexdigest()


def child(way, folder, shuffled, task):
    made, saved = WAYS[way](Path(folder), shuffled == "True"), Path(folder, "state")
    if task == "measure":
        import pandas  # noqa: F401 (pyarrow imports it with the first array)

        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = highest_memory()
        for _ in made.epoch(0):
            pass
        began = cpu_seconds()
        rows = sum(len(batch["label"]) for batch in made.epoch(1))
        used = cpu_seconds() - began
        result = {"rate": rows / used, "mib": highest_memory() - before}
    elif not hasattr(made, "state"):
        result = "none"
    elif task == "stop":
        batches = made.epoch(0)
        list(itertools.islice(batches, STOP))
        saved.write_bytes(pickle.dumps(made.state()))
        result = digest(batches)
    else:
        made.load(pickle.loads(saved.read_bytes()))
        result = digest(made.epoch(0))
    print(json.dumps(result), flush=True)
    os._exit(0)  # as by a kill: nothing is cleaned up


def make_texts(folder, rows=40_000):
    random = np.random.default_rng(0)
    words = random.integers(97, 123, (20_000, 7)).astype(np.uint8)
    for kind in OPENED:
        (folder / kind).mkdir()
    for number in range(4):
        count = rows // 4
        drawn = words[random.zipf(1.3, (count, 62)) % len(words)].reshape(count, -1)
        texts = [row.tobytes().decode() for row in drawn]
        ids = [f"document-{number * count + row}" for row in range(count)]
        table = pa.table({"id": ids, "text": texts})
        pq.write_table(table, folder / f"parquet/{number}.parquet")
        with pa.ipc.new_stream(folder / f"arrow/{number}.arrow", table.schema) as stream:
            stream.write_table(table, 1000)
        lines = [json.dumps(row) + "\n" for row in table.to_pylist()]
        (folder / f"json/{number}.jsonl").write_text("".join(lines))


OPENED = {"parquet": ".parquet", "arrow": ".arrow", "json": ".jsonl"}
"""Formats of texts, by datasets' names, with the ends of their files."""


def texts_costs(library, folder, kind, shuffled, batch):
    """Returns us of CPU a row of the opening with the first epoch, and of a later epoch."""
    import datasets

    from datatrove_ckpt.torch import ReaderDataset

    began = cpu_seconds()
    if library == "ours":
        rows = ReaderDataset.from_folder(folder / kind)
        batches = (rows.shuffle(seed=1) if shuffled else rows).batch(batch)
    else:
        files = f"{folder}/{kind}/*{OPENED[kind]}"
        rows = datasets.load_dataset(kind, data_files=files, split="train", streaming=True)
        rows = rows.shuffle(seed=1, buffer_size=WINDOW) if shuffled else rows
        batches = rows.iter(batch)
    seconds = []
    for number in range(7):
        (batches if library == "ours" else rows).set_epoch(number)
        read = sum(len(made["text"]) for made in batches)
        seconds.append(cpu_seconds() - began)
        began = cpu_seconds()
        if library != "ours":
            batches = rows.iter(batch)
    return {"first": seconds[0] / read * 1e6, "later": min(seconds[1:]) / read * 1e6}


def forked(call):
    """Returns a call's result in a process of its own, which has the imports of this process."""
    pipe, result = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(result, json.dumps(call()).encode())
        finally:
            os._exit(0)
    os.close(result)
    with os.fdopen(pipe, "rb") as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text)


def measure_texts(folder, rounds):
    os.environ |= OFFLINE
    import datasets
    import pandas  # noqa: F401 (an import is no part of the opening)

    from datatrove_ckpt.torch import ReaderDataset  # noqa: F401

    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # a second of each epoch, without CPU time
    make_texts(folder)
    logger.remove()
    variants = [*itertools.product(OPENED, (False, True), (64, 512))]
    found = {variant: [] for variant in variants}
    for number in range(rounds):
        for kind, shuffled, batch in variants:
            costs = {}
            for library in ("ours", "datasets")[:: 1 if number % 2 else -1]:
                costs[library] = forked(
                    partial(texts_costs, library, folder, kind, shuffled, batch)
                )
            figures = {}
            for key in ("first", "later"):
                ours, others = (costs[library][key] for library in ("ours", "datasets"))
                figures |= {key: ours, f"{key} datasets": others, f"{key} x": ours / others}
            found[kind, shuffled, batch].append(figures)
            name = f"{kind}, {'shuffled' if shuffled else 'ordered'}, {batch}"
            shown = ", ".join(f"{key} {figure:.2f}" for key, figure in figures.items())
            print(f"round {number + 1} of {rounds}: {name}: {shown}", flush=True)
    rows = []
    for (kind, shuffled, batch), costs in found.items():
        figures = [f"{median(costs, key):.2f}" for key in costs[0]]
        rows.append([kind, "shuffled" if shuffled else "ordered", str(batch), *figures])
    header = ["us of CPU a row", "", "batch", "first", "datasets", "x", "later", "datasets", "x"]
    print(markdown(header, rows), flush=True)


def run(way, folder, shuffled, task):
    command = [sys.executable, "-m", "tests.bench.training_input", way, str(folder)]
    command += [str(shuffled), task]
    environment = os.environ | OFFLINE
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        print(f"{way}, shuffled {shuffled}, {task}: {process.stderr}", file=sys.stderr)
        return None
    return json.loads(process.stdout.splitlines()[-1])


def main():
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=200_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--texts", action="store_true")
    given = options.parse_args()
    rows = {way: [way] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.texts:
            measure_texts(folder, given.rounds)
            return
        make(folder, given.rows)
        for shuffled in (False, True):
            found = interleaved(
                WAYS, given.rounds, lambda way, s=shuffled: run(way, folder, s, "measure")
            )
            for way in WAYS:
                stop, rest = (run(way, folder, shuffled, task) for task in ("stop", "resume"))
                numbers = [one for one in found[way] if one]
                for key in ("rate", "mib"):
                    rows[way].append(median(numbers, key) if numbers else None)
                rows[way].append(stop == rest and stop not in (None, "none"))
    header = ["rows/s", "MiB", "resume exact"]
    shuffled = [f"{name}, shuffled" for name in header]
    print(markdown(["", *header, *shuffled], rows.values()))


if __name__ == "__main__":
    child(*sys.argv[1:]) if len(sys.argv) == 5 and not sys.argv[1].startswith("-") else main()
