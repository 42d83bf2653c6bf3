"""What ``status --json`` says after kill -9 at random moments is what was counted from outside."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.testing import FakeServer

REPOSITORY = Path(__file__).parents[2]
RUN = """
import sys
from pathlib import Path
from tests.jobs import documents, writer
from tests.mirrors import ask_twice
from datatrove_ckpt import InferenceConfig, InferenceRunner

folder, url, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = InferenceConfig("endpoint", "fake", endpoint_url=url, max_concurrent_generations=8)
step = InferenceRunner(
    ask_twice, config, writer(folder), checkpoints_local_dir=str(folder / "checkpoints"), records_per_chunk=7
)
step.run(documents(number))
"""


class Rank:
    """One rank, in processes of their own."""

    def __init__(self, folder: Path, documents: int) -> None:
        self.log = folder / "log"
        self._folder, self._documents = folder, documents
        self._left = 0
        self._process: subprocess.Popen[bytes] | None = None

    def delay(self, payload: dict[str, Any], times: int) -> float:
        """For the server: kills the process before the answer that might finish it, however busy the machine is."""
        self._left -= 1
        if self._left <= 0 and self._process is not None:
            self._process.kill()
            self._process = None
        return 0.001

    def run(self, server: FakeServer, kill_after: int | None = None) -> int:
        """The exit code of one attempt. ``kill_after``: a number of requests."""
        argv = [sys.executable, "-c", RUN, str(self._folder), server.url, str(self._documents)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=log, stderr=log)
        if kill_after is not None:
            self._left, self._process = kill_after, process
        return process.wait()


def read(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", str(folder / "checkpoints"), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("kills", [2, 20])
def test_status_tells_the_truth_after_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int) -> None:
    chance = random.Random(kills)
    number = 12 * kills
    rank = Rank(tmp_path, number)
    with FakeServer(delay=rank.delay) as server:
        for attempt in range(1, kills + 1):
            assert rank.run(server, chance.randrange(3, 20)) == -signal.SIGKILL
            found = read(tmp_path, capsys)
            (state,) = found["ranks"]
            assert (state["attempts"], state["state"], state["trouble"]) == (attempt, "lost", "lost")
            assert state["attempts_without_a_word"] == list(range(1, attempt + 1))
            assert (state["documents"], state["exact"]) == (finished(tmp_path), True)
        assert rank.run(server) == 0, rank.log.read_text()[-3000:]
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
