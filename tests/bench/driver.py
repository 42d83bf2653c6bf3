"""The benchmarks: ``python -m tests.bench.driver COMMAND``; docs/benchmarks.md lists the commands.

Figures of a busy machine are noise. What counts are ratios of runs that followed each other, so systems run in turn,
each in a fresh process, several times, and medians are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench import tables
from tests.bench.measure import (
    MockServer,
    Result,
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

_MOST_FOR_DATATROVE = 100_000


class Bench:
    """A server, a folder to work in, and the options of the command line."""

    def __init__(self, server: MockServer, options: argparse.Namespace) -> None:
        self.server = server
        self.options = options
        self.folder = Path(options.folder)

    def run(self, system: str, documents: int, latency: float = 0.0, size: int = 0, **settings: Any) -> Result:
        """One run with checkpoints on disk, unless told otherwise, over ``documents`` documents."""
        kind = settings.pop("kind", "jsonl")
        keep = settings.pop("keep", False)
        source = make_input(self.folder, kind, settings.pop("input", documents), size or self.options.size)
        settings.setdefault("folder", str(self.folder / "work"))
        settings.setdefault("checkpoints", f"{settings['folder']}/checkpoints")
        run = Run(system, self.server.url, str(source), kind=kind, **settings)
        result = run_once(self.server, run, latency, documents, keep)
        if self.options.json:
            with self.options.json.open("a") as file:
                file.write(json.dumps(result) + "\n")
        return result

    def throughput(self) -> None:
        """Documents per second, CPU and memory of each system."""
        options = self.options
        for latency in options.latency:
            for concurrency in options.concurrency:
                count = _documents(options.documents, latency, concurrency, options.seconds)
                one = partial(self._throughput_once, latency / 1000, concurrency, count)
                results = interleaved(options.systems, options.repetitions, one)
                print(f"latency {latency:g} ms, concurrency {concurrency}, {count} documents of {options.size} bytes\n")
                _print_throughput(results, latency / 1000, concurrency)

    def _throughput_once(self, latency: float, concurrency: int, count: int, system: str) -> Result:
        # What is 20 times slower need not run 20 times as long: its queues only grow with its documents.
        documents = min(count, 20_000) if system == "datatrove" else count
        return self.run(system, documents, latency, input=count, stop_after=documents, concurrency=concurrency)

    def checkpoint_cost(self) -> None:
        """What checkpoints cost, by where they are and what the output is."""
        count = self.options.documents
        places: dict[str, str | None] = {
            "off": None,
            "tmpfs": "/dev/shm/datatrove-ckpt-bench",
            "disk": str(self.folder / "work/checkpoints"),
        }
        rows = []
        for latency in self.options.latency:
            for output in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet"):
                one = partial(
                    self._at_place,
                    places,
                    output,
                    latency / 1000,
                    _documents(count, latency, 256, self.options.seconds),
                )
                results = interleaved(places, self.options.repetitions, one)
                for place, some in results.items():
                    off = results["off"]
                    rows.append(
                        [f"{latency:g}", output, place, median(some, "rate"), median(some, "us"),
                         ratio(some, off, "us"), ratio(some, off, "wall"), median(some, "tail"), wrong(some)]
                    )  # fmt: skip
        shutil.rmtree("/dev/shm/datatrove-ckpt-bench", ignore_errors=True)
        table(
            ["latency ms", "output", "checkpoints", "documents/s", "CPU us/document", "CPU on/off", "wall on/off",
             "s after last request", "lost"],
            rows,
        )  # fmt: skip

    def _at_place(self, places: dict[str, str | None], output: str, latency: float, count: int, place: str) -> Result:
        return self.run("ours", count, latency, checkpoints=places[place], output=output)

    def mirror(self) -> None:
        """What a mirror costs, by how often it is made; to a folder, or to --remote."""
        base = self.options.remote or str(self.folder / "work/remote")
        for latency in self.options.latency:
            count = _documents(self.options.documents, latency, 256, self.options.seconds)
            often: dict[str, dict[str, Any]] = {"off": {}}
            for seconds in self.options.mirror_seconds:
                often[f"{seconds:g}"] = {"remote": base, "mirror_seconds": seconds}
            one = partial(self._mirror_once, often, latency / 1000, count)
            results = interleaved(often, self.options.repetitions, one)
            rows = []
            for name, some in results.items():
                off = results["off"]
                sent = [None] * 4
                if name != "off":
                    sent = [median(some, key) for key in ("mirror_share", "bytes_per_document", "puts", "versions")]
                rows.append([f"{latency:g}", name, median(some, "rate"), median(some, "us"), ratio(some, off, "us"),
                             ratio(some, off, "wall"), *sent, median(some, "tail"), wrong(some)])  # fmt: skip
            header = ["latency ms", "mirrored every s", "documents/s", "CPU us/document", "CPU on/off", "wall on/off"]
            header += ["% of CPU in mirror", "bytes mirrored/document", "puts", "versions", "s after last request"]
            table([*header, "lost"], rows)

    def _mirror_once(self, often: dict[str, dict[str, Any]], latency: float, count: int, name: str) -> Result:
        settings = dict(often[name])
        if "://" in settings.get("remote", ""):
            settings["remote"] += f"/{secrets.token_hex(4)}"  # an empty one
        result = self.run("ours", count, latency, **settings)
        if name != "off":
            result["mirror_share"] = 100 * result["mirror_cpu"] / result["cpu"]
            result["bytes_per_document"] = result["mirrored"] / count
        return result

    def resume(self) -> None:
        """Seconds from the moment that the server is ready to the first request, all but 1000 documents done."""
        for kind in self.options.kinds:
            rows = []
            measured: dict[int, float] = {}
            for count in self.options.counts:
                done = self._finished_checkpoint(count, kind)
                reckoned = self.options.extrapolate and count > _MOST_FOR_DATATROVE
                systems = ("ours", "cold") if reckoned else ("ours", "cold", "datatrove")
                results = interleaved(systems, self.options.repetitions, partial(self._resume_once, count, kind, done))
                for name, some in results.items():
                    rows.append([count, kind, name, median(some, "after_ready"), median(some, "cpu"),
                                 median(some, "memory"), median(some, "memory_of_imports"), wrong(some)])  # fmt: skip
                if reckoned:
                    seconds = _extrapolated(measured, count)
                    rows.append([count, kind, "datatrove, reckoned from fewer", seconds, *[None] * 4])
                else:
                    measured[count] = median(results["datatrove"], "after_ready")
            header = [
                "documents",
                "input",
                "system",
                "s to first request",
                "CPU s of the run",
                "RSS MB",
                "of which imports",
                "lost",
            ]
            table(header, rows)

    def _finished_checkpoint(self, count: int, kind: str) -> Path:
        """Ours, made by running it over all but 1000 documents, asking nothing. Kept for further calls."""
        kept = self.folder / f"finished-{kind.replace('.', '-')}-{count}"
        if not kept.exists():
            self.run("ours", count - 1000, kind=kind, input=count, stop_after=count - 1000, drop=True)
            shutil.copytree(self.folder / "work/checkpoints", kept)
        return kept

    def _resume_once(self, count: int, kind: str, done: Path, name: str) -> Result:
        checkpoints = self.folder / "work/checkpoints"
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        if name == "ours":
            shutil.copytree(done, checkpoints)
            (checkpoints / "00000/replay.sqlite3").touch()  # a run that ended removes it, one that was killed does not
        elif name == "datatrove":
            (checkpoints / "last_chunk").mkdir(parents=True)
            (checkpoints / "last_chunk/00000.txt").write_text(str((count - 1000) // 1000 - 1))
        system = "ours" if name == "cold" else name
        # A cold start is over with its first request, whatever it would continue to do.
        limit = 1000 if name == "cold" else None
        return self.run(system, 1000, kind=kind, input=count, stop_after=limit, keep=True,
                        ready_after=self.options.ready_after if system == "ours" else 0.0)  # fmt: skip

    def growth(self) -> None:
        """Cost per document and memory, by number of documents; chunks of 100,000, concurrency 5000."""
        rows = []
        for count in self.options.counts:
            some = [self.run("ours", count, chunk=100_000, concurrency=5000) for _ in range(self.options.repetitions)]
            rows.append([count, median(some, "rate"), median(some, "us"), median(some, "memory"),
                         median(some, "memory_of_imports"), median(some, "tail"), wrong(some)])  # fmt: skip
        table(["documents", "documents/s", "CPU us/document", "RSS MB", "of which imports", "s after last request",
               "lost"], rows)  # fmt: skip

    def long(self) -> None:
        """Documents of 200 kB."""
        self._compare(2000, size=200_000)

    def rollouts(self) -> None:
        """16 rollouts per document."""
        self._compare(2000, rollouts=16)

    def _compare(self, count: int, **settings: Any) -> None:
        results = interleaved(
            self.options.systems, self.options.repetitions, lambda system: self.run(system, count, **settings)
        )
        _print_throughput(results, 0.0, 256)

    def loop_health(self) -> None:
        """The longest time the event loop was blocked."""
        # The first number is of documents in all, the second of documents in a chunk.
        cases: dict[str, tuple[int, dict[str, Any]]] = {
            "normal, 200 ms, concurrency 256": (5000, {"latency": 0.2}),
            "normal, 200 ms, concurrency 1024": (20_000, {"latency": 0.2, "concurrency": 1024}),
            "saturated, latency 0": (20_000, {}),
            "publishing 100,000, gzip": (120_000, {"chunk": 100_000, "output": "jsonl.gz"}),
            "publishing 100,000, Parquet": (120_000, {"chunk": 100_000, "output": "parquet"}),
            "documents of 200 kB": (2000, {"size": 200_000}),
            "documents of 200 kB, 200 ms": (2000, {"size": 200_000, "latency": 0.2}),
        }
        rows = []
        for name, (count, settings) in cases.items():
            # Callbacks of uvloop cannot be watched.
            result = self.run("ours-asyncio", count, watch_loop=True, **settings)
            loop = result["loop"]
            worst = "; ".join(f"{c['cpu_ms']:g}/{c['gil_ms']:g} {c['what']}" for c in loop["callbacks"][:3])
            rows.append([name, loop["gap_ms"], loop["gaps_above_20_ms"], loop["cpu_ms"], loop["gil_ms"], worst])
        table(["case", "longest gap ms", "gaps > 20 ms", "longest callback, CPU ms", "waiting for the GIL ms",
               "worst callbacks (CPU/GIL ms)"], rows)  # fmt: skip

    def report(self) -> None:
        """The table of docs/benchmarks.md, README's figures, and results.svg."""
        from tests.bench.report import write_report

        write_report(self)

    def profile(self) -> None:
        """Where ours spends its time: by thread, and the dearest functions of each."""
        from tests.bench.profile_table import print_profile

        folder, count = self.folder / "profile", self.options.documents
        for latency, concurrency in ((0.0, 256), (0.2, 5000)):
            print(f"latency {1000 * latency:g} ms, concurrency {concurrency}\n")
            one = partial(self.run, "ours", count, latency, concurrency=concurrency, profile=str(folder))
            print_profile(folder, count, one)


def _extrapolated(measured: dict[int, float], count: int) -> float:
    """Along the line through the two largest counts: datatrove reads everything again, so its cost is linear."""
    (few, some), (many, more) = sorted(measured.items())[-2:]
    return more + (more - some) / (many - few) * (count - many)


def _documents(most: int, latency_ms: float, concurrency: int, seconds: float) -> int:
    """With a latency, what an ideal client does in ``seconds``, or half of that: less would be ramp-up and drain."""
    ideal = math.ceil(seconds * concurrency / latency_ms * 1000) if latency_ms else 0
    return min(max(most, ideal // 2), ideal) if latency_ms else most


def _print_throughput(results: dict[str, list[Result]], latency: float, concurrency: int) -> None:
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


def main() -> None:
    parser = tables.parser(__doc__)
    commands = {
        "throughput": Bench.throughput, "checkpoint-cost": Bench.checkpoint_cost, "resume": Bench.resume,
        "growth": Bench.growth, "long": Bench.long, "rollouts": Bench.rollouts, "loop-health": Bench.loop_health,
        "profile": Bench.profile, "report": Bench.report, "mirror": Bench.mirror,
    }  # fmt: skip
    parser.add_argument("command", choices=commands)
    parser.add_argument("--folder", default="/tmp/datatrove-ckpt-bench", help="inputs and runs; on the disk to measure")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=2000, help="characters per document")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--latency", type=float, nargs="+", default=[0, 200], help="ms")
    parser.add_argument("--seconds", type=float, default=10, help="that a run with a latency takes at most, ideally")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256, 1024, 5000])
    parser.add_argument("--mirror-seconds", type=float, nargs="+", default=[1, 5], help="mirror: how often")
    parser.add_argument("--remote", help="mirror: an fsspec URL instead of a folder")
    parser.add_argument("--systems", nargs="+", default=["ours", "datatrove", "bare"], help="see systems.py")
    parser.add_argument("--kinds", nargs="+", default=["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
    parser.add_argument("--million", action="store_true", help="resume and growth: also 1,000,000 documents")
    parser.add_argument("--ready-after", type=float, default=0.0, help="resume: seconds our server takes to be ready")
    parser.add_argument("--extrapolate", action="store_true", help="resume: reckon datatrove's 1,000,000 from fewer")
    parser.add_argument("--json", type=Path, help="add each run's figures to this file, a line of JSON each")
    options = parser.parse_args()
    options.counts = [10_000, 100_000, *([1_000_000] if options.million else [])]
    with mock_server() as server:
        print(f"{options.command}: {commands[options.command].__doc__}\n", flush=True)
        commands[options.command](Bench(server, options))


if __name__ == "__main__":
    main()
