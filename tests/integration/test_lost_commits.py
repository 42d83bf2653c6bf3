"""Lost commits of a finished rank are damage, whatever proves them: nobody is advised to delete its output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from datatrove_ckpt.testing import FakeServer, outputs
from tests.integration.test_output_check import Call, call, follow_advice, job
from tests.kept import content_of

__all__ = ["call", "job"]  # fixtures


def cut_log(job: Path, lines: int) -> None:
    log = job / "checkpoints" / "00000" / "commits.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:lines]))


def forget_last_chunk(job: Path) -> None:
    shutil.rmtree(job / "checkpoints" / "last_chunk")


def forget_documents(job: Path) -> None:
    """As an earlier release left it."""
    path = job / "checkpoints" / "00000" / "shard.json"
    shard = content_of(path) | {"version": 1}
    del shard["documents"]
    path.write_text(json.dumps(shard))


@pytest.mark.matrix
@pytest.mark.parametrize("lines", [0, 2])
@pytest.mark.parametrize(
    ("forget", "proof"),
    [(forget_last_chunk, "shard.json says that this finished rank has read 5."), (forget_documents, "last_chunk")],
)
def test_lost_commits_of_a_finished_rank_are_damage_and_the_advice_works(
    job: Path, call: Call, server: FakeServer, forget: Callable[[Path], None], proof: str, lines: int
) -> None:
    assert call("run", "job.yaml")[0] == 0
    before = outputs(job / "output")
    cut_log(job, lines)
    forget(job)
    asked = server.asked.total()
    code, said = call("run", "job.yaml")
    assert (code, server.asked.total()) == (1, asked)
    assert f"00000/commits.jsonl holds {lines} commits" in said
    assert proof in said
    assert "elete" not in said
    assert f"repair {job}/checkpoints --logging-dir {job}/logs, then run the same" in said
    assert outputs(job / "output") == before
    follow_advice(said, call)
    assert outputs(job / "output") == before
    assert call("verify", "checkpoints", "--full")[0] == 0
