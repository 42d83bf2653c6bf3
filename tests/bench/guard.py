"""What a document costs: ``python -m tests.bench.guard [COMMIT]``. ``tests/integration/test_speed.py`` holds it.

CPU time of this process per document, divided by that of a bare loop of aiohttp that sends the same requests, in turn:
a figure that hardly depends on the machine. Only with nothing beside it: a busy core slows the two differently.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from tests.bench.commits import checkout
from tests.bench.measure import ROOT, interleaved, mock_server, run_once
from tests.bench.systems import Run
from tests.bench.workload import make_input

_DOCUMENTS, _ROUNDS = 10_000, 5


def costs(package: Path = ROOT) -> list[float]:
    """The ratio in each round."""
    with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-guard-") as folder, mock_server() as server:
        source = make_input(Path(folder), "jsonl", _DOCUMENTS, 2000)

        def run(system: str) -> dict[str, float]:
            work = f"{folder}/work"
            one = Run(system, server.url, str(source), work, checkpoints=f"{work}/checkpoints")
            return run_once(server, one, 0.0, _DOCUMENTS, package=package)

        results = interleaved(("ours", "bare-uvloop"), _ROUNDS, run)
    return [ours["us"] / bare["us"] for ours, bare in zip(*results.values(), strict=True)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, checkout(*sys.argv[1:] or ["."], Path(folder) / "it") as package:
        found = costs(package)
    print(f"{statistics.median(found):.2f} (" + ", ".join(f"{ratio:.2f}" for ratio in found) + ")")


if __name__ == "__main__":
    main()
