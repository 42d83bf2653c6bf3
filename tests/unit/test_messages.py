"""What an interrupted rank says of what is saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from loguru import logger

from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.generation.messages import RankMessages


@pytest.mark.parametrize("full", [False, True])
def test_nothing_is_called_saved_that_is_not(full: bool) -> None:
    said: list[str] = []
    handler = logger.add(said.append, format="{level}: {message}")
    checkpoint = SimpleNamespace(error=StorageFailed("The disk is full.") if full else None)
    shutdown = SimpleNamespace(cause="SIGTERM", seconds=1.0, given_up=0)
    try:
        messages = RankMessages(3, "checkpoints", cast("Any", checkpoint), cast("Any", SimpleNamespace(documents=24)))
        messages.stopped(cast("Any", shutdown))
    finally:
        logger.remove(handler)
    saved = "saved: 24 documents of this run and every answer"
    assert (saved in said[-1]) is not full
    assert ("What was saved before that stays." in said[-1]) is full
    assert [line.partition(":")[0] for line in said] == ["ERROR"] * full + ["WARNING"]
