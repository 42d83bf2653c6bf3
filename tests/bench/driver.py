"""The benchmarks: ``python -m tests.bench.driver COMMAND``; docs/internals/benchmarks.md lists the
commands.

Figures of a busy machine are noise. What counts are ratios of runs that followed each other, so
systems run in turn, each in a fresh process, several times, and medians are printed.
"""

import json
import math
from functools import partial
from pathlib import Path

from tests.bench import tables
from tests.bench.measure import (
    interleaved,
    median,
    mock_server,
    ratio,
    run_once,
    table,
    wrong,
)
from tests.bench.systems import Run
from tests.bench.workload import make_input


class Bench:
    """A server, a folder to work in, and the options of the command line."""

    def __init__(self, server, options):
        self.server = server
        self.options = options
        self.folder = Path(options.folder)

    def run(self, system, documents, latency=0.0, **settings):
        """One run with checkpoints on disk, unless told otherwise, over ``documents`` documents."""
        source = make_input(
            self.folder, "jsonl", settings.pop("input", documents), self.options.size
        )
        settings.setdefault("folder", str(self.folder / "work"))
        settings.setdefault("checkpoints", f"{settings['folder']}/checkpoints")
        run = Run(system, self.server.url, str(source), **settings)
        result = run_once(self.server, run, latency, documents)
        if self.options.json:
            with self.options.json.open("a") as file:
                file.write(json.dumps(result) + "\n")
        return result

    def throughput(self):
        """Documents per second, CPU and memory of each system."""
        options = self.options
        for latency in options.latency:
            for concurrency in options.concurrency:
                count = _documents(options.documents, latency, concurrency, options.seconds)
                one = partial(self._throughput_once, latency / 1000, concurrency, count)
                results = interleaved(options.systems, options.repetitions, one)
                print(
                    f"latency {latency:g} ms, concurrency {concurrency}, {count} documents of {options.size} bytes\n"
                )
                _print_throughput(results, latency / 1000, concurrency)

    def _throughput_once(self, latency, concurrency, count, system):
        # What is 20 times slower need not run 20 times as long: its queues only grow with its
        # documents.
        documents = min(count, 20_000) if system == "datatrove" else count
        return self.run(
            system, documents, latency, input=count, stop_after=documents, concurrency=concurrency
        )

    def report(self):
        """The table of docs/internals/benchmarks.md, and README's figures."""
        from tests.bench.report import write_report

        write_report(self)


def _documents(most, latency_ms, concurrency, seconds):
    """With a latency, what an ideal client does in ``seconds``, or half of that: less would be
    ramp-up and drain.
    """
    ideal = math.ceil(seconds * concurrency / latency_ms * 1000) if latency_ms else 0
    return min(max(most, ideal // 2), ideal) if latency_ms else most


def _print_throughput(results, latency, concurrency):
    ideal = concurrency / latency if latency else None
    ours = results.get("ours")
    rows = []
    for name, some in results.items():
        rates = [ratio(ours, some, key) if ours else None for key in ("rate", "us")]
        share = 100 * median(some, "serving_rate") / ideal if ideal else None
        rows.append([name, median(some, "rate"), share, median(some, "cpu_per_1000"), median(some, "memory"),
                     median(some, "tail"), wrong(some), *rates])  # fmt: skip
    table(["system", "documents/s", "% of ideal", "CPU s/1000", "RSS MB", "s after last request", "lost",
           "ours/it documents/s", "ours/it CPU"], rows)  # fmt: skip


def main():
    parser = tables.parser(__doc__)
    commands = {"throughput": Bench.throughput, "report": Bench.report}
    parser.add_argument("command", choices=commands)
    parser.add_argument(
        "--folder",
        default="/tmp/datatrove-ckpt-bench",
        help="inputs and runs; on the disk to measure",
    )
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=2000, help="characters per document")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--latency", type=float, nargs="+", default=[0, 200], help="ms")
    parser.add_argument(
        "--seconds", type=float, default=10, help="that a run with a latency takes at most, ideally"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256, 1024, 5000])
    parser.add_argument(
        "--systems", nargs="+", default=["ours", "datatrove", "bare"], help="see systems.py"
    )
    parser.add_argument(
        "--json", type=Path, help="add each run's figures to this file, a line of JSON each"
    )
    options = parser.parse_args()
    with mock_server() as server:
        print(f"{options.command}: {commands[options.command].__doc__}\n", flush=True)
        commands[options.command](Bench(server, options))


if __name__ == "__main__":
    main()
