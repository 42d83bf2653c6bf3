"""Fixtures of the tests of training loops."""

from pathlib import Path

import pytest
from loguru import logger

from datatrove_ckpt.common.object_store import ObjectStore


@pytest.fixture
def warned():
    """The warnings."""
    lines = []
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    yield lines
    logger.remove(sink)


@pytest.fixture
def before_copy(monkeypatch):
    """``before_copy(call)`` calls it before each file is copied to a remote."""
    put = ObjectStore.put

    def replace(call):
        def watched(store, name, content):
            if isinstance(content, Path):
                call()
            put(store, name, content)

        monkeypatch.setattr(ObjectStore, "put", watched)

    return replace
