"""Compares the speed of two commits: ``python -m tests.bench.commits A B [--documents 20000
--rounds 5]``.

Each commit gets a git worktree of its own in a temporary folder. A folder with a checkout stands
for itself, so ``.`` is what is not committed yet. Both run with this interpreter, its packages and
this folder's mock server, in turn: A, B, B, A, A, ... Both must have what ``systems.py`` uses.
Ratios are those of a round, and of all rounds the median, the lowest and the highest: an absolute
figure of a busy machine says nothing. Bytecodes are counted once, and grow with the CPU time.
"""

import statistics
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tests.bench import tables
from tests.bench.measure import ROOT, interleaved, mock_server, run_once, table, wrong
from tests.bench.systems import Run
from tests.bench.workload import make_input

_FIGURES = {
    "documents/s while busy": "serving_rate",
    "CPU s per 1000 documents": "cpu_per_1000",
    "the same, start-up included": "whole_cpu_per_1000",
}
_COUNTED = (300, 900)  # documents: what a start executes is in both


@contextmanager
def checkout(commit, folder):
    """A worktree of ``commit`` in ``folder``, removed afterwards."""
    if (Path(commit) / "datatrove_ckpt").is_dir():
        yield Path(commit).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def compare(commits, documents, rounds):
    """The results of each commit's runs, in the order of the rounds; bytecodes per document."""
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="datatrove-ckpt-commits-"))
        )
        sides = dict(zip("AB", commits, strict=True))
        packages = {
            side: stack.enter_context(checkout(commit, folder / side))
            for side, commit in sides.items()
        }
        work = str(folder / "work")
        server = stack.enter_context(mock_server())
        run = Run("ours", server.url, "", work, checkpoints=f"{work}/checkpoints")

        def result(side, documents, **settings):
            source = make_input(folder, "jsonl", documents, 2000)
            changed = replace(run, source=str(source), **settings)
            return run_once(server, changed, 0.0, documents, package=packages[side])

        def bytecodes(side):
            few, more = (result(side, number, count_bytecodes=True) for number in _COUNTED)
            return (more["bytecodes"] - few["bytecodes"]) / (_COUNTED[1] - _COUNTED[0])

        counts = [bytecodes(side) for side in sides]
        return interleaved("AB", rounds, lambda side: result(side, documents)), counts


def main():
    parser = tables.parser(__doc__)
    parser.add_argument(
        "commits", nargs=2, metavar="COMMIT", help="A and B: commits, or folders with a checkout"
    )
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results, counts = compare(options.commits, options.documents, options.rounds)
    a, b = results.values()
    rows = []
    for name, key in _FIGURES.items():
        ratios = [after[key] / before[key] for before, after in zip(a, b, strict=True)]
        middle = [statistics.median(result[key] for result in side) for side in (a, b)]
        rows.append([name, *middle, statistics.median(ratios), min(ratios), max(ratios)])
    rows.append(["bytecodes per document", *counts, counts[1] / counts[0], None, None])
    rows.append(["requests lost", wrong(a), wrong(b), None, None, None])
    print(
        f"A: {options.commits[0]}, B: {options.commits[1]}; {options.documents} documents, {options.rounds} rounds\n"
    )
    table(["", "A", "B", "B/A", "lowest", "highest"], rows)


if __name__ == "__main__":
    main()
