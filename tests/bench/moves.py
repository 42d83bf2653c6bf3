"""What becomes of a half-finished run that is moved: python -m tests.bench.moves [--kills N] [NAME ...]

Each line is of N runs of 60 documents, typed as people type them. A run is killed with SIGKILL at a random moment, then
moved; the first line is of runs that are not. The move is killed at a random moment, too, and typed again. Then the run
goes to its end, and its documents and requests are counted. How runs of datatrove's own runner go on is in
tests/real/test_migrate.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from datatrove_ckpt.testing import FakeServer
from tests.pages import ROOT
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

COMMAND = [sys.executable, "-m", "datatrove_ckpt"]
SIZES = (17, 3, 25, 15)
_MORE = "          records_per_chunk: 4\n          keep_answers: true\n"
_DELAY = 0.03  # seconds of each request


@dataclass
class Counts:
    """Of all runs of a line.

    Attributes:
        kept: requests that need not be sent again.
        again: requests that were: in flight at a kill, or answered within its last milliseconds.
    """

    kills: int = 0
    kept: int = 0
    again: int = 0
    lost: int = 0
    twice: int = 0


@dataclass
class Moved:
    """One run. ``folder`` holds its job.yaml, input, checkpoints and output."""

    folder: Path
    server: FakeServer
    chance: random.Random
    counts: Counts = field(default_factory=Counts)
    tasks: int = 1
    prompt: str = "Say {text}"

    def start(self, tasks: int) -> None:
        self.folder.mkdir(parents=True)
        self.tasks = tasks
        config = f"{ENDPOINT.replace('URL', self.server.url)}, max_concurrent_generations: 3"
        texts = ([f"text {file} {number}" for number in range(size)] for file, size in enumerate(SIZES))
        data = str(self.folder / "input")  # it stays there: documents have its path in their metadata
        write_job(self.folder, job_yaml(config, tasks, data) + _MORE, *texts)

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def type(self, *arguments: str) -> None:
        """Runs a command to its end.

        Raises:
            AssertionError: its exit code is not 0.
        """
        process = self._spawn(*arguments)
        error = process.communicate()[1]
        assert process.returncode == 0, f"{arguments} ended with {process.returncode}: {error.decode()}"

    def type_killed(self, arguments: tuple[str, ...], is_time: Callable[[], bool]) -> None:
        """Runs a command and kills it, and all that it has started, unless it ends before."""
        process = self._spawn(*arguments)
        while process.poll() is None and not is_time():
            time.sleep(0.005)
        if process.poll() is None:
            self.counts.kills += 1
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def run_killed(self) -> None:
        wanted = self.server.asked.total() + self.chance.randrange(5, sum(SIZES) - 5)
        self.type_killed(("run", "job.yaml", self.with_tasks), lambda: self.server.asked.total() >= wanted)

    def move(self, *arguments: str) -> None:
        """Kills the command once, and then lets it end."""
        end = time.monotonic() + self.chance.uniform(0.3, 2.0)
        self.type_killed(arguments, lambda: time.monotonic() >= end)
        self.type(*arguments)

    @property
    def with_tasks(self) -> str:
        return f"--executor.tasks={self.tasks}"

    def end(self) -> None:
        """Runs to the end, verifies, and counts."""
        before = Counter(self.server.asked)
        self.type("run", "job.yaml", self.with_tasks)
        self.type("verify", "checkpoints", "--full")
        files = (self.folder / "output").glob("*.jsonl")
        found = Counter(json.loads(line)["id"] for file in files for line in file.read_text().splitlines())
        expected = Counter(f"id {number}" for number in range(sum(SIZES)))
        wanted = {self.prompt.replace("{text}", f"text {f} {n}") for f, size in enumerate(SIZES) for n in range(size)}
        again = sum(self.server.asked[text] > before[text] for text in wanted & before.keys())
        self.counts.kept += len(wanted & before.keys()) - again
        self.counts.again += again
        self.counts.lost += (expected - found).total()
        self.counts.twice += (found - expected).total()


def reshard(*tasks: int) -> Callable[[Moved], None]:
    """From each number of tasks to the next one, with a killed run in between."""

    def move(run: Moved) -> None:
        run.start(tasks[0])
        for after in tasks[1:]:
            run.run_killed()
            run.move("reshard", "job.yaml", run.with_tasks, "--tasks", str(after))
            run.tasks = after

    return move


def fork(prompt: str) -> Callable[[Moved], None]:
    def move(run: Moved) -> None:
        run.start(2)
        run.run_killed()
        old, run.folder = run.folder, run.folder.with_name("forked")
        run.folder.mkdir()
        (run.folder / "job.yaml").write_text((old / "job.yaml").read_text().replace("Say {text}", prompt))
        run.prompt = prompt
        run.move("fork", str(old / "checkpoints"), "job.yaml")

    return move


def relocate(run: Moved) -> None:
    run.start(2)
    run.run_killed()
    old, run.folder = run.folder, run.folder.with_name("elsewhere")
    shutil.copytree(old, run.folder)
    shutil.rmtree(old / "checkpoints")
    shutil.rmtree(old / "output", ignore_errors=True)
    run.move("relocate", "checkpoints", "--output", "output")


def stay(run: Moved) -> None:
    run.start(1)
    run.run_killed()


MOVES: dict[str, tuple[str, Callable[[Moved], None]]] = {
    "stay": ("not moved", stay),
    "reshard-4-1": ("4 tasks -> 1", reshard(4, 1)),
    "reshard-1-4": ("1 task -> 4", reshard(1, 4)),
    "reshard-4-7-2": ("4 tasks -> 7 -> 2", reshard(4, 7, 2)),
    "fork-same": ("fork, nothing changed", fork("Say {text}")),
    "fork-prompt": ("fork, another prompt", fork("Tell {text}")),
    "relocate": ("another folder", relocate),
}


def measure(move: Callable[[Moved], None], kills: int) -> Counts:
    """Makes so many runs of a move, each killed at moments of its own."""
    counts = Counts()
    for seed in range(kills):
        with tempfile.TemporaryDirectory() as place, FakeServer(delay=lambda payload, times: _DELAY) as server:
            run = Moved(Path(place, "run"), server, random.Random(seed), counts)
            move(run)
            run.end()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="What becomes of half-finished runs that are moved.")
    parser.add_argument("names", nargs="*", default=list(MOVES), metavar="NAME", help=f"of {', '.join(MOVES)}")
    parser.add_argument("--kills", type=int, default=3, help="runs of each move")
    given = parser.parse_args()
    if unknown := set(given.names) - MOVES.keys():
        parser.error(f"no move is named {', '.join(sorted(unknown))}")
    print("| from, to | runs | kills | documents | requests kept | sent again | lost | twice |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.names:
        title, move = MOVES[name]
        found = measure(move, given.kills)
        documents = given.kills * sum(SIZES)
        numbers = (given.kills, found.kills, documents, found.kept, found.again, found.lost, found.twice)
        print(f"| {title} | {' | '.join(map(str, numbers))} |", flush=True)


if __name__ == "__main__":
    main()
