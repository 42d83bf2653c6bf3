"""What a document costs: CPU time as a ratio to a fixed piece of pure Python work, which is measured in the same runs.

The CPU time of a busy machine varies by half, the ratio by a tenth. ``python -m tests.bench.commits A B`` says more.
``PYTHONPATH=CHECKOUT`` measures the package of another checkout.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

from tests.bench.measure import ROOT, mock_server, run_once
from tests.bench.systems import Run
from tests.bench.workload import make_input

DOCUMENTS = 5000
MOST = 0.5
"""What a document may cost, in pieces of the reference work."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_document_costs_no_more_than_it_did(tmp_path: Path) -> None:
    package = Path(os.environ.get("PYTHONPATH", "").partition(os.pathsep)[0] or ROOT)
    source = make_input(tmp_path, "jsonl", DOCUMENTS, size=2000)
    with mock_server() as server:
        folder = str(tmp_path / "work")
        run = Run("ours", server.url, str(source), folder, checkpoints=f"{folder}/checkpoints", reference=True)
        results = [run_once(server, run, 0, DOCUMENTS, package=package) for _ in range(5)]
    assert all(result["counted_right"] for result in results)
    costs = []
    for result in results:
        seconds, times = result["reference"].values()
        costs.append((result["cpu"] - seconds) / DOCUMENTS / (seconds / times))
    print(f"a document costs {statistics.median(costs):.3f} times the reference work: {sorted(costs)}")
    assert statistics.median(costs) < MOST
