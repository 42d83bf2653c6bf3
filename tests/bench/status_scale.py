"""How long ``status`` and ``report`` take for many ranks: python -m tests.bench.status_scale [--minutes N] [RANKS ...]

Makes the folders of a run in its middle, each rank with 80 commits, an hour of minute lines and a journal, in TMPDIR,
and runs the commands on them in a process of its own, three times. The quickest one counts. ``--minutes 1000`` makes
histories as large as those of three days, when older minutes are thinned.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.formatting import byte_size
from tests.rank_folders import ELSEWHERE, failed, minutes, start, write_rank

CHUNKS = 80
MINUTES = 60
TRIES = 3


def make(root: Path, ranks: int, lines: int = MINUTES) -> None:
    """One folder is written, and copied for each rank."""
    now = time.time()
    history = [start(now - lines * 60, host=ELSEWHERE), *minutes(now - lines * 60, lines, 100, 20000)]
    models = [
        write_rank(root / "models", 0, history, chunks=CHUNKS, per_chunk=70, journal=40, tasks=ranks),
        write_rank(root / "models", 1, history, chunks=CHUNKS, per_chunk=70, finished=True, tasks=ranks),
        write_rank(root / "models", 2, [*history, failed(now, "E: x")], chunks=CHUNKS, per_chunk=70, tasks=ranks),
    ]
    for rank in range(ranks):
        model = models[2 if rank % 100 == 99 else rank % 2]
        shutil.copytree(model, layout.rank_folder(root / "checkpoints", rank))


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds of the whole process, and of CPU."""
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - began, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="How long status and report take.")
    parser.add_argument("ranks", nargs="*", type=int, default=[1000, 10000])
    parser.add_argument("--minutes", type=int, default=MINUTES, help="lines of each history")
    given = parser.parse_args()
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), ranks, given.minutes)
            page = Path(folder, "report.html")
            for name, *options in (["status"], ["status", "--json"], ["status", "--all"], ["report", "-o", str(page)]):
                command = [sys.executable, "-m", "datatrove_ckpt", name, f"{folder}/checkpoints", *options]
                seconds, cpu = map(min, zip(*(measure(command) for _ in range(TRIES)), strict=True))
                print(f"{ranks} ranks, {name} {' '.join(options)}: {seconds:.2f} s, {cpu:.2f} s of CPU", flush=True)
            print(f"{ranks} ranks: the report has {byte_size(page.stat().st_size)}", flush=True)


if __name__ == "__main__":
    main()
