"""The table of docs/internals/benchmarks.md and README's figures: measured together, in some twelve
minutes.

The table, and README's figures, which are taken from it, stand between two comments.
"""

import os

from tests.bench import tables
from tests.bench.measure import ROOT, interleaved, median, ratio, wrong

TABLE = ROOT / "docs/internals/benchmarks.md"
README = ROOT / "README.md"
_NAMES = {"ours": "ours", "bare": "bare loop", "datatrove": "datatrove"}


def write_report(bench):
    # Fewer than 20,000 are for a try.
    repetitions, count = bench.options.repetitions, bench.options.documents
    flat = _compare(bench, 0.0, 256, count, ["ours", "datatrove", "bare"], repetitions)
    waiting = {
        # An ideal minute for both: in ten seconds, how a run begins and ends is half of what is
        # missing.
        256: _compare(bench, 0.2, 256, count * 384 // 100, ["ours", "bare"], 1)
        | _compare(bench, 0.2, 256, count * 64 // 100, ["datatrove"], 1),
        1024: _compare(bench, 0.2, 1024, count * 1536 // 100, ["ours", "bare"], 1),
        5000: _compare(bench, 0.2, 5000, count * 625 // 100, ["ours", "bare"], 1),
    }
    cost = {
        0.0: _cost(bench, 0.0, count, repetitions),
        0.2: _cost(bench, 0.2, count * 64 // 100, 1),
    }
    grown = bench.run("ours", 5 * count, chunk=5 * count, concurrency=5000)
    watched = bench.run("ours-asyncio", count, watch_loop=True)["loop"]
    rows = [*_speed_rows(flat, waiting), *_own_rows(cost, grown, watched)]
    lost = {
        name: wrong(runs) for results in (flat, *waiting.values()) for name, runs in results.items()
    }
    _write_table(rows, f"{os.cpu_count()} cores; requests lost or repeated: {_losses(lost)}")


def _compare(bench, latency, concurrency, count, systems, times):
    settings = {"concurrency": concurrency}
    return interleaved(systems, times, lambda system: bench.run(system, count, latency, **settings))


def _cost(bench, latency, count, times):
    def one(place):
        return bench.run(
            "ours", count, latency, **({"checkpoints": None} if place == "off" else {})
        )

    return interleaved(("off", "on"), times, one)


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
    rows = [
        row(
            "documents/s, server answers at once", [median(flat[name], "rate") for name in names], 0
        ),
        row("CPU s per 1000 documents", [median(flat[name], "cpu_per_1000") for name in names], 3),
        row("memory, MB", [median(flat[name], "memory") for name in names], 0),
        row(
            "s from the last request to the end of the run",
            [median(flat[name], "tail") for name in names],
            2,
        ),
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


def _own_rows(cost, grown, watched):
    cpu, wall = (
        ratio(cost[0.0]["on"], cost[0.0]["off"], "us"),
        ratio(cost[0.2]["on"], cost[0.2]["off"], "wall"),
    )
    return [
        [
            "checkpoints on, divided by off: CPU; time at 200 ms",
            f"{cpu:.2f} x; {wall:.3f} x",
            "",
            "",
        ],
        [
            "memory, MB: 100,000 documents, one chunk, 5,000 at once",
            f"{grown['memory']:.0f}",
            "",
            "",
        ],
        [
            "longest callback, ms: CPU; waiting for the GIL",
            f"{watched['cpu_ms']:.0f}; {watched['gil_ms']:.0f}",
            "",
            "",
        ],
    ]


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
