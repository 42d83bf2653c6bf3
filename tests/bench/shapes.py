"""Parquet in and out: ``python -m tests.bench.shapes [--rows 20000] [--rounds 3]``.
Two million rows: ``--rows 2000000 --rounds 1 --shape plain --characters 100 --way 0 --way 2 --way 3``.

Tables of two shapes (plain columns; and dates, decimals, nanoseconds, maps, binary, vectors) by each
way, in turn, each time in a process of its own: datatrove's reader and writer; its writer behind our
reader; a run with checkpoints whose rollout sends no request, and one that asks ``server_type:
dummy``, with the start of that server. Rows per second of wall time, CPU and peak memory of this
process, and which columns came out with another type or other values.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench.measure import ROOT, interleaved, median
from tests.bench.systems import cpu_seconds, highest_memory
from tests.bench.tables import markdown, parser

FILES = 4
SHAPES = ("plain", "typed")


def texts(random, count, characters):
    letters = random.integers(97, 123, count * characters, np.uint8).tobytes().decode()
    return [letters[at : at + characters] for at in range(0, len(letters), characters)]


def make(folder, shape, rows, characters):
    random = np.random.default_rng(0)
    count = rows // FILES
    day = datetime.date(2026, 1, 1)
    for number in range(FILES):
        first = number * count
        columns = {
            "id": [f"{row:09d}" for row in range(first, first + count)],
            "text": texts(random, count, characters),
            "number": random.integers(0, 2**40, count),
            "score": random.random(count),
            "lang": random.choice(["de", "en", "fr"], count),
        }
        if shape == "typed":
            times = pa.array(random.integers(0, 2**60, count), pa.timestamp("ns"))
            vectors = pa.array(random.random(count * 16, np.float32))
            columns |= {
                "day": [day + datetime.timedelta(days=row % 3000) for row in range(count)],
                "price": [Decimal(row).scaleb(-2) for row in range(count)],
                "at": times,
                "big": pa.array(random.integers(0, 2**63, count).astype(np.uint64) * 2),
                "tags": pa.array(
                    [[("a", row), ("b", None)] for row in range(count)],
                    pa.map_(pa.string(), pa.int32()),
                ),
                "uuid": pa.array([os.urandom(16) for _ in range(count)], pa.binary(16)),
                "vector": pa.FixedSizeListArray.from_arrays(vectors, 16),
            }
        path = folder / "input" / f"{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=10_000)


async def ask(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})


async def answer_itself(document, generate):
    return document.text[:20]


def of_datatrove(folder, reader=None):
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import ParquetWriter

    documents = (reader or ParquetReader)(str(folder / "input")).run()
    writer = ParquetWriter(str(folder / "output"), "${rank}.parquet", expand_metadata=True)
    for _ in writer.run(documents):
        pass


def mixed(folder):
    from datatrove_ckpt.readers import ParquetReader

    of_datatrove(folder, ParquetReader)


def run(folder, rollout=answer_itself):
    from datatrove.pipeline.writers import ParquetWriter

    from datatrove_ckpt import InferenceConfig, InferenceRunner
    from datatrove_ckpt.readers import ParquetReader

    runner = InferenceRunner(
        rollout,
        InferenceConfig(server_type="dummy", model_name_or_path="m", max_concurrent_generations=64),
        ParquetWriter(str(folder / "output"), "${chunk_index}.parquet", expand_metadata=True),
        checkpoints_local_dir=str(folder / "checkpoints"),
        records_per_chunk=5000,
    )
    runner.run(ParquetReader(str(folder / "input")).run())


def asked(folder):
    run(folder, ask)


WAYS = {
    "datatrove's reader and writer": of_datatrove,
    "our reader, datatrove's writer": mixed,
    "a run without requests": run,
    "a run with `server_type: dummy`": asked,
}


def changed(folder):
    """The columns that did not come back."""
    given = pq.read_table(folder / "input")
    found = [pq.read_table(file) for file in sorted((folder / "output").glob("*.parquet"))]
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
