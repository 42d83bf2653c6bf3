"""The number of tasks is the run's, not the rank's: ranks on nodes of their own compare themselves with all others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.mirror.object_store import ObjectStore
from datatrove_ckpt.testing import FakeServer
from tests.jobs import documents, runner


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


class Nodes:
    """Each rank runs on an empty disk; mirror and output are shared. datatrove would skip the ranks that are done."""

    def __init__(self, folder: Path, server: FakeServer) -> None:
        self.folder = folder
        self.mirror = folder / "mirror"
        self.server = server

    def run(self, rank: int, tasks: int, **changes: Any) -> None:
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        self.server.asked.clear()
        step = runner(self.folder, self.server, checkpoints_remote_dir=str(self.mirror), mirror_seconds=1000, **changes)
        step.run(documents(12)[rank::tasks], rank, tasks)


@pytest.fixture
def nodes(tmp_path: Path, server: FakeServer) -> Nodes:
    return Nodes(tmp_path, server)


@pytest.mark.matrix
@pytest.mark.parametrize("kept", [True, False], ids=["job.json", "of an earlier release"])
def test_another_number_of_tasks_is_refused_though_the_finished_rank_is_on_another_node(
    nodes: Nodes, kept: bool
) -> None:
    nodes.run(0, 1)
    if not kept:
        (nodes.mirror / "job.json").unlink()
    for rank in (1, 2, 3):
        with pytest.raises(CheckpointMismatch, match="tasks: 1 -> 4") as refused:
            nodes.run(rank, 4, accept_changes=True)
        assert not nodes.server.asked
    assert str(nodes.mirror) in str(refused.value)
    assert "Go on with 1 task (--executor.tasks=1), or choose another checkpoints_local_dir" in str(refused.value)
    assert "`datatrove-ckpt reshard WHAT --tasks 4` deals what is left out to 4 tasks." in str(refused.value)


def test_another_model_is_refused_unless_it_is_accepted(nodes: Nodes) -> None:
    nodes.run(0, 2)
    other: dict[str, Any] = {"config": {"model_name_or_path": "other"}}
    with pytest.raises(CheckpointMismatch, match=r'\(task 0\) were made by another run:\n  model: "fake" -> "other"'):
        nodes.run(1, 2, **other)
    assert not nodes.server.asked
    nodes.run(1, 2, accept_changes=True, **other)
    nodes.run(1, 2, **other)
    accepted = json.loads((nodes.mirror / "job.json").read_text())["accepted_changes"]
    assert [(change["field"], change["old"], change["new"]) for change in accepted] == [("model", "fake", "other")]


def test_a_rank_that_starts_reads_one_object_and_not_those_of_the_others(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = ObjectStore.read

    def noted(store: ObjectStore, name: str, most: int) -> bytes | None:
        read.append(f"{store.url}/{name}".removeprefix(f"{nodes.mirror}/"))
        return original(store, name, most)

    for rank in (0, 1):
        nodes.run(rank, 3)
    monkeypatch.setattr(ObjectStore, "read", noted)
    nodes.run(2, 3)
    assert [name for name in read if not name.startswith("00002/")] == ["shares.json", "job.json"]


def test_ranks_that_hold_nothing_refuse_nobody(nodes: Nodes) -> None:
    shutil.rmtree(nodes.folder / "checkpoints", ignore_errors=True)
    step = runner(nodes.folder, nodes.server, checkpoints_remote_dir=str(nodes.mirror), mirror_seconds=1000)
    step.run([], 0, 1)
    nodes.run(1, 4)
    assert json.loads((nodes.mirror / "job.json").read_text())["tasks"] == 4
