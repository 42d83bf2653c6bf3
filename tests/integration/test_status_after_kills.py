"""What ``status --json`` says after kill -9 at random moments is what was counted from outside."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.testing import FakeServer
from tests.mirrors import Killed


def read(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", str(folder / "checkpoints"), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("kills", [2, 20])
def test_status_tells_the_truth_after_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int) -> None:
    chance = random.Random(kills)
    killed = Killed(tmp_path, str(tmp_path / "remote"), 0.001, kills)
    number = killed.documents
    with FakeServer(delay=killed.delay) as server:
        for attempt in range(1, kills + 1):
            assert killed._run_once(server, chance.randrange(3, 20))
            found = read(tmp_path, capsys)
            (state,) = found["ranks"]
            assert (state["attempts"], state["state"], state["trouble"]) == (attempt, "lost", "lost")
            assert state["attempts_without_a_word"] == list(range(1, attempt + 1))
            assert (state["documents"], state["exact"]) == (finished(tmp_path), True)
        assert not killed._run_once(server, None)
        asked = server.asked
    found = read(tmp_path, capsys)
    totals = found["totals"]
    assert found["is_finished"]
    assert (totals["attempts"], totals["attempts_without_a_word"]) == (kills + 1, kills)
    assert totals["documents"] == totals["committed"]["written"] == number
    assert totals["committed"]["requests"] == len(asked) == 2 * number
    assert totals["committed"]["prompt_tokens"] == sum(len(question.split()) for question in asked)
    # What was sent is at most what the server saw: the last minute of an attempt that was killed is not known.
    assert totals["work"]["sent"] <= asked.total()


def finished(folder: Path) -> int:
    """Documents in output files and journals, counted without our readers."""
    rank = folder / "checkpoints/00000"
    log = rank / "commits.jsonl"
    lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
    committed = [json.loads(line) for line in lines if line.endswith(b"\n")]
    chunks = {commit["chunk_index"] for commit in committed}
    documents = sum(commit["tally"]["read"] for commit in committed)
    for path in rank.glob("chunk_*.jsonl"):
        if int(path.stem.removeprefix("chunk_")) not in chunks:
            documents += path.read_bytes().count(b"\n")
    return documents
