"""Fixtures of the tests of training loops."""

import pytest
from loguru import logger

from datatrove_ckpt.mirror import object_store


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
    put_file = object_store.Effects.put_file

    def replace(call):
        def put(effects, fs, path, file):
            call()
            put_file(effects, fs, path, file)

        monkeypatch.setattr(object_store.Effects, "put_file", put)

    return replace
