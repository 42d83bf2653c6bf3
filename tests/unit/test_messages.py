"""What an interrupted rank says of what is saved."""

from types import SimpleNamespace

import pytest

from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.generation.rank import RankMessages


@pytest.mark.parametrize("full", [False, True])
def test_nothing_is_called_saved_that_is_not(full, log):
    checkpoint = SimpleNamespace(error=StorageFailed("The disk is full.") if full else None)
    shutdown = SimpleNamespace(cause="SIGTERM", seconds=1.0, given_up=0)
    progress = SimpleNamespace(own=SimpleNamespace(documents=24))
    messages = RankMessages(3, "checkpoints", checkpoint, progress)
    messages.stopped(shutdown)
    saved = "saved: 24 documents of this run and every answer"
    assert (saved in log[-1]) is not full
    assert ("What was saved before that stays." in log[-1]) is full
    assert [line.partition(" ")[0] for line in log] == ["ERROR"] * full + ["WARNING"]
