"""The benchmark of data loaders runs, and its figures are those of the orders that it measures.

Needs torch and torchdata: ``uv pip install -e .[torch]``. MosaicML Streaming needs an environment of its own.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.bench.loader_systems import quality
from tests.bench.loaders import measured, table

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def test_both_systems_are_measured(tmp_path: Path) -> None:
    found = measured(tmp_path, 2000, 10, None, ["ours, columns", "datasets, in order"])
    for figures in found.values():
        assert (figures["rows"], figures["distinct"], figures["exact"]) == (2000, 2000, True)
    assert found["ours, columns"]["files in a batch"] > 8
    assert found["datasets, in order"]["displacement"] == 0
    lines = table(found).splitlines()
    print("\n".join(lines))
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| ours, columns", "| datasets, in order"]


def test_quality_of_a_uniform_order_and_of_none() -> None:
    order = list(range(10_000))
    assert quality(order, 10) == {
        "displacement": 0,
        "neighbours": 1,
        "files in a batch": pytest.approx(1.03, abs=0.02),
    }
    random.Random(0).shuffle(order)
    mixed = quality(order, 10)
    assert mixed["displacement"] == pytest.approx(1 / 3, abs=0.01)
    assert mixed["neighbours"] == pytest.approx(0.02, abs=0.01)
    assert mixed["files in a batch"] > 9
