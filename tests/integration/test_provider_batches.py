"""Provider batches: the same bytes as without them, and each answer is paid for once."""

from __future__ import annotations

import asyncio
import random

import pytest

from datatrove_ckpt.errors import DocumentFailed
from datatrove_ckpt.generation import provider_passes
from tests.jobs import ask, documents, letters, rows, runner
from tests.provider import FAILED, FakeProvider

BATCHES = {"provider_batches": True}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(provider_passes, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(provider_passes, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(provider_passes, "LIST_LAG_SECONDS", 0.3)


async def three(document, generate):
    """Two requests at one time, and a third with their answers."""
    async def one(text):
        return (await generate({"messages": [{"role": "user", "content": text}]})).text

    first, second = await asyncio.gather(one(document.text), one(f"again {document.text}"))
    return await one(f"{first} {second}")


def test_a_run_with_batches_has_the_output_of_one_without(tmp_path):
    with FakeProvider() as provider:
        runner(tmp_path / "online", provider, three).run(documents(5))
        online = len(provider.payloads)
        runner(tmp_path / "batch", provider, three, config=BATCHES).run(documents(5))
    assert len(provider.payloads) == online == 15
    assert rows(tmp_path / "batch") == rows(tmp_path / "online")
    assert len(provider.billed) == 15
    assert set(provider.billed.values()) == {1}
    assert len(provider.batches) == 2
