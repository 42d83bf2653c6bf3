"""The table of docs/internals/benchmarks.md and README's figures: ``python -m tests.bench.report``
measures them together, in some twelve minutes.

The table, and README's figures, which are taken from it, stand between two comments. Figures of a
busy machine are noise. What counts are ratios of runs that followed each other, so systems run in
turn, each in a fresh process, several times, and medians are printed.
"""

import os
from pathlib import Path

from tests.bench import tables
from tests.bench.measure import ROOT, interleaved, median, mock_server, ratio, run_once, wrong
from tests.bench.systems import Run
from tests.bench.workload import make_input

TABLE = ROOT / "docs/internals/benchmarks.md"
README = ROOT / "README.md"
_NAMES = {"ours": "ours", "bare": "bare loop", "datatrove": "datatrove"}


class Bench:
    """Runs of systems against a server, with checkpoints on disk unless told otherwise."""

    def __init__(self, server, options):
        self._server = server
        self._folder = Path(options.folder)
        self._size = options.size

    def run(self, system, documents, latency=0.0, **settings):
        source = make_input(self._folder, "jsonl", documents, self._size)
        work = f"{self._folder}/work"
        settings = {"checkpoints": f"{work}/checkpoints", **settings}
        run = Run(system, self._server.url, str(source), work, **settings)
        return run_once(self._server, run, latency, documents)

    def compare(self, systems, times, documents, latency, concurrency):
        return interleaved(
            systems,
            times,
            lambda system: self.run(system, documents, latency, concurrency=concurrency),
        )


def write_report(bench, times, count):
    flat = bench.compare(["ours", "datatrove", "bare"], times, count, 0.0, 256)
    waiting = {
        # An ideal minute for both: in ten seconds, how a run begins and ends is half of what is
        # missing.
        256: bench.compare(["ours", "bare"], 1, count * 384 // 100, 0.2, 256)
        | bench.compare(["datatrove"], 1, count * 64 // 100, 0.2, 256),
        1024: bench.compare(["ours", "bare"], 1, count * 1536 // 100, 0.2, 1024),
        5000: bench.compare(["ours", "bare"], 1, count * 625 // 100, 0.2, 5000),
    }
    grown = bench.run("ours", 5 * count, chunk=5 * count, concurrency=5000)
    watched = bench.run("ours-asyncio", count, watch_loop=True)["loop"]
    rows = [*_speed_rows(flat, waiting), *_own_rows(grown, watched)]
    lost = {
        name: wrong(runs) for results in (flat, *waiting.values()) for name, runs in results.items()
    }
    _write_table(rows, f"{os.cpu_count()} cores; requests lost or repeated: {_losses(lost)}")


def _share(results, name, concurrency):
    """Percent of concurrency / latency."""
    return (
        100 * median(results[name], "serving_rate") / (concurrency / 0.2)
        if name in results
        else None
    )


def _speed_rows(flat, waiting):
    def row(what, values, digits):
        return [what, *("" if value is None else f"{value:,.{digits}f}" for value in values)]

    names = ["ours", "datatrove", "bare"]
    figures = [
        ("documents/s, server answers at once", "rate", 0),
        ("CPU s per 1000 documents", "cpu_per_1000", 3),
        ("memory, MB", "memory", 0),
        ("s from the last request to the end of the run", "tail", 2),
    ]
    rows = [
        row(what, [median(flat[name], key) for name in names], digits)
        for what, key, digits in figures
    ]
    for concurrency, results in waiting.items():
        shares = [_share(results, name, concurrency) for name in names]
        rows.append(row(f"% of ideal, server takes 200 ms, {concurrency:,} at once", shares, 0))
    rows.append(
        ["ours divided by this one: documents/s; CPU", ""]
        + [f"{ratio(flat['ours'], flat[name], 'rate'):.1f} x; {ratio(flat['ours'], flat[name], 'us'):.2f} x"
           for name in names[1:]]
    )  # fmt: skip
    return rows


def _own_rows(grown, watched):
    cells = {
        "memory, MB: 100,000 documents, one chunk, 5,000 at once": f"{grown['memory']:.0f}",
        "longest callback, ms: CPU; waiting for the GIL": (
            f"{watched['cpu_ms']:.0f}; {watched['gil_ms']:.0f}"
        ),
    }
    return [[name, cell, "", ""] for name, cell in cells.items()]


def _losses(lost):
    bad = {name: text for name, text in lost.items() if text != "0"}
    return ", ".join(f"{_NAMES[name]} {text}" for name, text in bad.items()) or "none"


def _write_table(rows, note):
    text = f"{tables.markdown(['', 'ours', 'datatrove', 'bare loop'], rows)}\n\nOn {note}.\n"
    print(text)
    replace(TABLE, text)
    replace(README, summary(text))


def measured(path, name="measured"):
    """What stands between the two comments."""
    start, end = _comments(name)
    return path.read_text().partition(start)[2].partition(end)[0]


def _comments(name):
    return f"<!-- {name}: start -->\n", f"<!-- {name}: end -->"


def _cells(table):
    """The cells of each row, by the first."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows}


def summary(table):
    """README's lines, from the text of the table."""
    cells = _cells(table)
    rate, cpu = cells["documents/s, server answers at once"], cells["CPU s per 1000 documents"]
    share = cells["% of ideal, server takes 200 ms, 1,024 at once"]
    cores = table.partition("\n\nOn ")[2].partition(";")[0]
    return (
        f"On {cores}, with a mock server that answers at once: {rate[0]} documents/s (datatrove's runner: {rate[1]})\n"
        f"and {cpu[0]} CPU seconds per 1000 documents ({cpu[1]}). With a server that takes 200 ms and 1,024 requests\n"
        f"in flight: {share[0]} % of the ideal rate. [How this was measured](docs/internals/benchmarks.md).\n"
    )


def write_shares(table):
    """Writes the table of ``tests.bench.throughput``, and README's lines about it."""
    replace(TABLE, f"{table}\n", "shares")
    replace(README, share_summary(table), "shares")


def write_kills(table):
    """Writes the table of kills of ``tests.bench.throughput``."""
    replace(TABLE, f"{table}\n", "kills")


def share_summary(table):
    """README's lines, from the text of the table of shares."""
    cells = _cells(table)
    ours, datatrove = cells["job"].index("ours"), cells["job"].index("datatrove")
    rewriting = cells["rewriting, 8 servers"]
    calls = cells["3 calls in sequence, 8 servers"]
    shuffled = cells["the same, shuffled, 8 servers"]
    return (
        f"On eight simulated GPUs, default settings reach {rewriting[ours]} of the ideal with one call for each document\n"
        f"(datatrove's runner, with a task for each GPU: {rewriting[datatrove]}), {calls[ours]} ({calls[datatrove]}) with three calls in sequence, and\n"
        f"{shuffled[ours]} ({shuffled[datatrove]}) where shuffled rows share documents. Above 1, the KV caches serve more of the prompts than in\n"
        "the ideal. No real GPU was measured. [How this was measured](docs/internals/benchmarks.md).\n"
    )


def replace(path, text, name="measured"):
    start, end = _comments(name)
    page = path.read_text()
    before, found, rest = page.partition(start)
    _, found_end, after = rest.partition(end)
    if not found_end:
        raise SystemExit(
            f"{path} has no lines {start.strip()} and {end}; the table above is not written there."
        )
    path.write_text(before + found + text + found_end + after)


def main():
    parser = tables.parser(__doc__)
    parser.add_argument(
        "--folder",
        default="/tmp/datatrove-ckpt-bench",
        help="inputs and runs; on the disk to measure",
    )
    parser.add_argument("--documents", type=int, default=20_000, help="fewer are for a try")
    parser.add_argument("--size", type=int, default=2000, help="characters per document")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    with mock_server() as server:
        write_report(Bench(server, options), options.repetitions, options.documents)


if __name__ == "__main__":
    main()
