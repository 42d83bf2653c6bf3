"""What the ends of tasks cost: ``python -m tests.bench.barrier [--documents 3200] [--tasks 1 10
40]``.

The same documents, as one task and as several, overlapping and in turn, over a server that answers
after as long as the document says. The lengths have a long tail, as those of reasoning models.
"ideal": all places of the server are always taken.
"""

import json
import random
import tempfile
import time
from pathlib import Path

from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner, LocalPipelineExecutor
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer
from tests.bench import tables
from tests.bench.measure import table

AT_ONCE = 64
"""Requests in flight."""


async def ask(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})


def run(server, folder, tasks, ranks_at_once, seconds):
    """Returns the seconds of a job, in which each document must have been asked once."""
    server.asked.clear()
    config = InferenceConfig(
        "endpoint", "fake", endpoint_url=server.url, max_concurrent_generations=AT_ONCE
    )
    folder.mkdir()
    input_folder = folder / "input"
    input_folder.mkdir()
    size = -(-len(seconds) // tasks)
    for first in range(0, len(seconds), size):
        rows = enumerate(seconds[first : first + size], first)
        lines = [json.dumps({"id": f"{n}", "text": f"{n} {length:.3f}"}) for n, length in rows]
        (input_folder / f"{first:05d}.jsonl").write_text("\n".join(lines) + "\n")
    name = "${rank}_chunk_${chunk_index}.jsonl"
    writer = JsonlWriter(str(folder / "output"), name, compression=None)
    step = InferenceRunner(ask, config, writer, checkpoints_local_dir=str(folder / "checkpoints"))
    executor = LocalPipelineExecutor(
        [JsonlReader(str(input_folder)), step],
        tasks,
        workers=1,
        start_method="fork",
        ranks_at_once=ranks_at_once,
        logging_dir=str(folder / "logs"),
    )
    began = time.monotonic()
    executor.run()
    took = time.monotonic() - began
    assert list(server.asked.values()) == [1] * len(seconds)
    return took


def measure(documents, cases, longest=10.0):
    """The seconds of each case, a number of tasks and how many of them run at once; first the
    ideal.
    """
    chance = random.Random(0)
    seconds = [
        longest * min(1.0, max(0.025, chance.lognormvariate(-2.5, 0.8))) for _ in range(documents)
    ]
    found = [sum(seconds) / AT_ONCE]
    with FakeServer(delay=_seconds_of) as server, tempfile.TemporaryDirectory() as name:
        for tasks, at_once in cases:
            found.append(run(server, Path(name, f"{tasks}-{at_once}"), tasks, at_once, seconds))
    return found


def _seconds_of(payload, times):
    return float(payload["messages"][0]["content"].split()[1])


def main():
    parser = tables.parser(__doc__)
    parser.add_argument("--documents", type=int, default=3200)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 10, 40])
    options = parser.parse_args()
    cases = [(tasks, at_once) for at_once in (32, 1) for tasks in options.tasks]
    ideal, *seconds = measure(options.documents, cases)
    rows = [["ideal", "", ideal]]
    rows += [[*case, took] for case, took in zip(cases, seconds, strict=True)]
    table(["tasks", "ranks at once", "seconds"], rows)


if __name__ == "__main__":
    main()
