"""Fixtures of the tests of training loops."""

from pathlib import Path

import pytest
from loguru import logger

from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.process import signals

# By their seconds, with ``--no-loadscope-reorder``: what takes minutes does not begin last.
_LONG = ("vllm", "training_checkpoints", "slurm", "half_answers", "ways", "quickstart", "release")


def pytest_collection_modifyitems(items):
    places = {f"test_{name}.py": place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture
def warned():
    """The warnings."""
    lines = []
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    yield lines
    logger.remove(sink)


@pytest.fixture(autouse=True)
def _the_tests_go_on(monkeypatch):
    """A process that a signal ends is killed seconds later if threads hold it; here it runs the
    other tests, too.
    """
    monkeypatch.setattr(signals, "_EXIT_SECONDS", 1e6)


@pytest.fixture
def ranks(request):
    from tests.real.training_ranks import Ranks

    return Ranks(request.module.__name__)


@pytest.fixture
def before_copy(monkeypatch):
    """``before_copy(call)`` calls it with each file before that is copied to a remote."""
    put = ObjectStore.put

    def replace(call):
        def watched(store, name, content):
            if isinstance(content, Path):
                call(content)
            put(store, name, content)

        monkeypatch.setattr(ObjectStore, "put", watched)

    return replace
