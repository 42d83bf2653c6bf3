"""What a document costs: ``python -m tests.bench.guard [COMMIT]``.
``tests/integration/test_speed.py`` holds it.

CPU time per document, divided by that of a bare loop of aiohttp that sends the same requests, in
turn: a figure that hardly depends on the machine. The median over the rounds counts: what runs
beside a round slows both, and the least of each may be of two rounds.
"""

import statistics
import sys
import tempfile
from operator import truediv
from pathlib import Path

from tests.bench.commits import checkout
from tests.bench.measure import ROOT, interleaved, mock_server, run_once
from tests.bench.systems import Run
from tests.bench.workload import make_input

_DOCUMENTS, _ROUNDS = 10_000, 5


def costs(package=ROOT):
    """Microseconds of CPU time per document in each round: ours, and the bare loop's."""
    with (
        tempfile.TemporaryDirectory(prefix="datatrove-ckpt-guard-") as folder,
        mock_server() as server,
    ):
        source = make_input(Path(folder), "jsonl", _DOCUMENTS, 2000)

        def run(system):
            work = f"{folder}/work"
            one = Run(system, server.url, str(source), work, checkpoints=f"{work}/checkpoints")
            return run_once(server, one, 0.0, _DOCUMENTS, package=package)

        results = interleaved(("ours", "bare-uvloop"), _ROUNDS, run)
    return {system: [result["us"] for result in found] for system, found in results.items()}


def ratio(found):
    return statistics.median(map(truediv, found["ours"], found["bare-uvloop"]))


def main():
    with (
        tempfile.TemporaryDirectory() as folder,
        checkout(*sys.argv[1:] or ["."], Path(folder) / "it") as package,
    ):
        found = costs(package)
    print(
        f"{ratio(found):.2f}:",
        {system: [round(each) for each in us] for system, us in found.items()},
    )


if __name__ == "__main__":
    main()
