"""Parquet in and out: ``python -m tests.bench.shapes [--rows 20000] [--rounds 3]``.
Two million rows: ``--rows 2000000 --rounds 1 --shape plain --characters 100``.

Tables of two shapes (plain columns; and dates, decimals, nanoseconds, maps, binary, vectors) by each
way, in turn, each time in a process of its own. Without a run: datatrove's reader and writer, and
ours. Runs with checkpoints: with a rollout that sends no request, and with one that asks
``server_type: dummy``, whose start counts.

Rows per second of wall time, CPU and peak memory of this process, and which columns came out with
another type or other values.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from decimal import Decimal
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench.measure import ROOT, interleaved, median
from tests.bench.systems import cpu_seconds, highest_memory
from tests.bench.tables import markdown, parser

FILES = 4
CHUNK = 5000
AT_ONCE = 64
SHAPES = ("plain", "typed")


def texts(random, count, characters):
    letters = random.integers(97, 123, count * characters, np.uint8).tobytes().decode()
    return [letters[at : at + characters] for at in range(0, len(letters), characters)]


def make(folder, shape, rows, characters):
    random = np.random.default_rng(0)
    size = rows // FILES
    day = datetime.date(2026, 1, 1)
    for number in range(FILES):
        first = number * size
        columns = {
            "id": [f"{row:09d}" for row in range(first, first + size)],
            "text": texts(random, size, characters),
            "number": random.integers(0, 2**40, size),
            "score": random.random(size),
            "lang": random.choice(["de", "en", "fr"], size),
        }
        if shape == "typed":
            times = pa.array(random.integers(0, 2**60, size), pa.timestamp("ns"))
            vectors = pa.array(random.random(size * 16, np.float32))
            columns |= {
                "day": [day + datetime.timedelta(days=row % 3000) for row in range(size)],
                "price": [Decimal(row).scaleb(-2) for row in range(size)],
                "at": times,
                "big": pa.array(random.integers(0, 2**63, size).astype(np.uint64) * 2),
                "tags": pa.array(
                    [[("a", row), ("b", None)] for row in range(size)],
                    pa.map_(pa.string(), pa.int32()),
                ),
                "uuid": pa.array([os.urandom(16) for _ in range(size)], pa.binary(16)),
                "vector": pa.FixedSizeListArray.from_arrays(vectors, 16),
            }
        path = folder / "input" / f"{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=10_000)


async def ask(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})


async def answer_itself(document, generate):
    return document.text[:20]


def of_datatrove(folder):
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import ParquetWriter

    documents = ParquetReader(str(folder / "input")).run()
    writer = ParquetWriter(str(folder / "output"), "${rank}.parquet", expand_metadata=True)
    for _ in writer.run(documents):
        pass


def ours(folder):
    """As a run reads rows and writes chunks, without what keeps them until their chunk is full."""
    from datatrove_ckpt.output.chunk_writing import ChunkWriter
    from datatrove_ckpt.output.document_codec import encode
    from datatrove_ckpt.output.file_managers import StagedFiles
    from datatrove_ckpt.output.file_names import FileNames
    from datatrove_ckpt.readers import ParquetReader

    writer = writer_to(folder)
    writing = ChunkWriter(writer, 0, FileNames(writer, 0))
    documents = ParquetReader(str(folder / "input")).run()
    for index in count():
        chunk = [*enumerate(map(encode, islice(documents, CHUNK)))]
        if not chunk:
            return
        writing.write(StagedFiles(folder / "output", writer.output_mg), index, chunk)


def writer_to(folder):
    from datatrove.pipeline.writers import ParquetWriter

    return ParquetWriter(str(folder / "output"), "${chunk_index}.parquet", expand_metadata=True)


def run(folder, rollout=answer_itself):
    from datatrove_ckpt import InferenceConfig, InferenceRunner
    from datatrove_ckpt.readers import ParquetReader

    config = InferenceConfig("dummy", "m", max_concurrent_generations=AT_ONCE)
    checkpoints = str(folder / "checkpoints")
    step = InferenceRunner(
        rollout,
        config,
        writer_to(folder),
        checkpoints_local_dir=checkpoints,
        records_per_chunk=CHUNK,
    )
    step.run(ParquetReader(str(folder / "input")).run())


WAYS = {
    "datatrove's reader and writer": of_datatrove,
    "our reader and writer": ours,
    "a run without requests": run,
    "a run with `server_type: dummy`": partial(run, rollout=ask),
}


def changed(folder):
    """The columns that did not come back."""
    given = pq.read_table(folder / "input")
    found = [pq.read_table(file) for file in sorted((folder / "output").rglob("*.parquet"))]
    output = pa.concat_tables(found, promote_options="permissive").sort_by("id")
    return [
        name
        for name in given.column_names
        if name not in output.column_names or not output[name].equals(given[name])
    ]


def child(way, name):
    import datatrove.pipeline.readers  # noqa: F401
    import pandas  # noqa: F401 (pyarrow imports it with the first array)

    import datatrove_ckpt.runner  # noqa: F401

    folder = Path(name)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        (Path(own) / "input").symlink_to(folder / "input")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before, began, cpu = highest_memory(), time.perf_counter(), cpu_seconds()
        WAYS[way](Path(own))
        found = {"seconds": time.perf_counter() - began, "cpu": cpu_seconds() - cpu}
        found["mib"] = highest_memory() - before
        print(json.dumps(found | {"changed": changed(Path(own))}), flush=True)


def measured(way, folder):
    command = [sys.executable, "-m", "tests.bench.shapes", way, str(folder)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        return {"failed": process.stderr.strip().splitlines()[-1][:100]}
    return json.loads(process.stdout.splitlines()[-1])


def main():
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=20_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--characters", type=int, default=600, help="of a text")
    options.add_argument("--shape", choices=SHAPES, action="append", help="one of both")
    options.add_argument("--way", type=int, action="append", help="from 0; all unless said")
    given = options.parse_args()
    ways = dict([*WAYS.items()][number] for number in given.way or range(len(WAYS)))
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for shape in given.shape or SHAPES:
            folder = Path(name, shape)
            make(folder, shape, given.rows, given.characters)
            found = interleaved(
                ways, given.rounds, lambda way, folder=folder: measured(way, folder)
            )
            for way, results in found.items():
                if failed := results[0].get("failed"):
                    lines.append([shape, way, None, None, None, failed])
                    continue
                rate, micros = (
                    given.rows / median(results, "seconds"),
                    median(results, "cpu") / given.rows * 1e6,
                )
                other = ", ".join(results[0]["changed"])
                lines.append([shape, way, rate, micros, median(results, "mib"), other])
    print(markdown(["shape", "way", "rows/s", "us CPU/row", "MiB", "changed"], lines))


if __name__ == "__main__":
    child(*sys.argv[1:]) if len(sys.argv) == 3 and sys.argv[1] in WAYS else main()
