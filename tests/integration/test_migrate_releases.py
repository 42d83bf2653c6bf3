"""Folders that datatrove's own runner of releases 0.8.0 and 0.9.0 left when it was killed. Eleven documents in chunks
of four, of which the first ten are finished. Those of 0.10 are made by each test that needs one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from datatrove_ckpt.testing import FakeServer
from tests.integration.test_migrate import Call, call, expected, folder, write_yaml, written

__all__ = ["call", "folder"]  # pytest finds these fixtures here

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("release", ["0_8_0", "0_9_0"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_killed_run_of_an_older_release_goes_on(folder: Path, call: Call, release: str, in_place: bool) -> None:
    shutil.copytree(DATA / f"datatrove_{release}", folder, dirs_exist_ok=True)
    with FakeServer() as server:
        write_yaml(folder, server.url, "checkpoints" if in_place else "ours")
        code, out, error = call("migrate", "job.yaml", "--from", "checkpoints", "--json", "--lacking-are-dropped")
        assert code == 0, error
        (rank,) = json.loads(out)["ranks"]
        assert [(chunk["finished"], chunk["written"]) for chunk in rank["chunks"]] == [(True, 4), (True, 3), (False, 2)]
        assert json.loads(out)["made_with"]["same_settings"], "executor.json tells the model"
        code, _, error = call("run", "job.yaml")
        assert code == 0, error
        assert [text.split(" answer")[0] for text in server.asked] == ["first text 10 twice", "second text 10 twice"]
        assert written(folder) == expected(11)
        assert call("verify", "job.yaml", "--full")[0] == 0
