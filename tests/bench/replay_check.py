"""Measures the CPU of the replay check: ``python -m tests.bench.replay_check [--documents 20000
--rounds 5]``.

Runs without and with the check follow each other, at latency 0: A, B, B, A, A, ... A's median of the CPU time
is compared with B's; the ratio of a round is shown, too.
"""

import statistics
import tempfile
from pathlib import Path

from tests.bench import tables
from tests.bench.measure import interleaved, mock_server, run_once, table, wrong
from tests.bench.systems import Run
from tests.bench.workload import make_input


def compare(documents, rounds):
    """The results of the runs without (A) and with (B) the check, in the order of the rounds."""
    with (
        tempfile.TemporaryDirectory(prefix="datatrove-ckpt-replay-") as name,
        mock_server() as server,
    ):
        folder = Path(name)
        source = make_input(folder, "jsonl", documents, 2000)
        work = str(folder / "work")

        def one(side):
            run = Run("ours", server.url, str(source), work, checkpoints=f"{work}/checkpoints")
            run.replay_check = side == "B"
            result = run_once(server, run, 0.0, documents)
            recorded = Path(work, "checkpoints", "recorded")
            result["recorded"] = len([*recorded.glob("*.json")]) if recorded.exists() else 0
            return result

        return interleaved("AB", rounds, one)


def main():
    parser = tables.parser(__doc__)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    without, checked = compare(options.documents, options.rounds).values()
    rows = []
    for name, key in (("CPU s", "cpu"), ("documents/s", "serving_rate")):
        ratios = [b[key] / a[key] for a, b in zip(without, checked, strict=True)]
        middle = [statistics.median(result[key] for result in side) for side in (without, checked)]
        rows.append([name, *middle, statistics.median(ratios), min(ratios), max(ratios)])
    rows.append(
        [
            "recorded documents",
            *(side[0]["recorded"] for side in (without, checked)),
            None,
            None,
            None,
        ]
    )
    rows.append(["requests lost", wrong(without), wrong(checked), None, None, None])
    table(["", "without", "with", "ratio", "lowest", "highest"], rows)


if __name__ == "__main__":
    main()
