"""What an interrupted rank says of what is saved."""

from types import SimpleNamespace

import pytest

from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.generation.rank import _Run


@pytest.mark.parametrize("full", [False, True])
def test_nothing_is_called_saved_that_is_not(full, log):
    checkpoint = SimpleNamespace(error=StorageFailed("The disk is full.") if full else None)
    shutdown = SimpleNamespace(cause="SIGTERM", seconds=1.0, given_up=0)
    step = SimpleNamespace(checkpoints_local_dir="checkpoints")
    run = _Run(step, [], None, 3, 4, SimpleNamespace(shutdown=shutdown))
    run._log_stop(checkpoint, 24)
    saved = "saved: 24 documents of this run and every answer"
    assert (saved in log[-1]) is not full
    assert ("What was saved before that stays." in log[-1]) is full
    assert [line.partition(" ")[0] for line in log] == ["ERROR"] * full + ["WARNING"]
