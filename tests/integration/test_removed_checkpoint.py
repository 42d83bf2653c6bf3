"""A checkpoint that is deleted while its run is on: the message says so, and promises nothing that is not true."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.errors import CkptError, StorageFailed
from datatrove_ckpt.testing import FakeServer
from tests.jobs import documents, runner


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["", "00000", "00000/run.json"])
def test_a_checkpoint_that_is_deleted_during_its_run(tmp_path: Path, name: str) -> None:
    removed = tmp_path / "checkpoints" / name

    def answer(payload: dict[str, Any], times: int) -> str:
        if payload["messages"][-1]["content"] == "text 2":
            removed.unlink() if removed.is_file() else shutil.rmtree(removed, ignore_errors=True)
        return "yes"

    with FakeServer(answer) as server, pytest.raises(CkptError) as caught:
        runner(tmp_path, server, config={"max_concurrent_generations": 1}).run(documents(6))
    own = caught.value
    assert isinstance(own, StorageFailed)
    assert str(tmp_path / "checkpoints") in str(own)
    assert "It was removed or moved during the run" in str(own)
    assert "everything saved so far is kept" not in str(own)


def test_sqlite_names_another_cause(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="It was removed"), explained("write to", tmp_path / "gone" / "database"):
        raise sqlite3.OperationalError("attempt to write a readonly database")
    with pytest.raises(StorageFailed, match="Make it writable"), explained("write to", tmp_path / "database"):
        raise sqlite3.OperationalError("attempt to write a readonly database")
