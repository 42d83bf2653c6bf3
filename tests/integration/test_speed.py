"""A guard: a document may not cost much more CPU time than it does. See ``tests/bench/guard.py``."""

from __future__ import annotations

import statistics

import pytest

from tests.bench.guard import costs

MOST = 1.45


@pytest.mark.alone
def test_a_document_costs_no_more_cpu_time_than_it_did() -> None:
    found = costs()
    assert statistics.median(found) <= MOST, found
