"""Thousands of lives in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def one_collection_for_all_lives() -> Iterator[None]:
    """Each life would begin with a full collection (see ``collector.py``), and these take longer than the lives."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
