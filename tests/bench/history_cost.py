"""What the history costs: ``python -m tests.bench.history_cost [--documents 30000]``.

One run against the mock server, with each part of the history timed inside it: what it adds to each answer and
document, the minute lines, and their writes. The share is that of the CPU that the run took altogether, so the speed of
the machine and what else it does cancel out. What the timing of a call of nothing takes is subtracted.

A run here takes seconds, and has no minute. So its lines come every ``--seconds``, and the share of the lines is
reckoned for one a minute.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loguru import logger

from datatrove_ckpt.checkpoint.history_log import HistoryLog
from datatrove_ckpt.checkpoint.rank_files import RankFiles
from datatrove_ckpt.generation import rank_history
from datatrove_ckpt.generation.rank_history import RankHistory
from tests.bench.measure import mock_server, table
from tests.bench.systems import Run, run_ours
from tests.bench.workload import make_input


class Timed:
    """Replaces a method by itself and a clock of the calling thread's CPU."""

    def __init__(self, owner: type[Any], name: str) -> None:
        self.name = f"{owner.__name__}.{name}"
        self.calls = 0
        self.seconds = 0.0
        method = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.thread_time() - start
                self.calls += 1

        setattr(owner, name, timed)


class Nothing:
    def nothing(self) -> None: ...


def cost_of_clock() -> float:
    """Seconds that a call of nothing seems to take."""
    timed = Timed(Nothing, "nothing")
    for _ in range(20_000):
        Nothing().nothing()
    return timed.seconds / timed.calls


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(folder: Path, url: str, documents: int, seconds: float) -> None:
    rank_history.MINUTE_SECONDS = seconds
    source = make_input(folder / "input", "jsonl", documents, 500)
    run = Run(
        system="ours",
        source=str(source),
        kind="jsonl",
        folder=str(folder),
        url=url,
        concurrency=256,
        checkpoints=str(folder / "checkpoints"),
    )
    clock = cost_of_clock()
    each = [Timed(RankHistory, "answered"), Timed(RankFiles, "_count_finished")]
    lines = [Timed(RankHistory, "progress"), Timed(RankFiles, "note"), Timed(HistoryLog, "sync")]
    work: Callable[[], None] = run_ours(run)
    logger.remove()
    before, started = cpu(), time.monotonic()
    work()
    spent, wall = cpu() - before, time.monotonic() - started
    rows = []
    for part, weight in (*((part, 1.0) for part in each), *((part, seconds / 60) for part in lines)):
        taken = max(0.0, part.seconds - part.calls * clock)
        rows.append([part.name, part.calls, taken / max(1, part.calls) * 1e6, 100 * weight * taken / spent])
    rows.append(["all", "", None, sum(row[3] for row in rows)])
    print(f"{documents} documents in {wall:.1f} s, {spent:.1f} s of CPU\n")
    table(["part", "calls", "us per call", "% of the run's CPU, a line a minute"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=30_000)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="history-cost-"))
    try:
        with mock_server() as server:
            server.reset(0.01)
            measure(folder, server.url, options.documents, options.seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
