"""What share of the engines' ideal a job gets, on simulated engines in virtual time:
``python -m tests.bench.throughput [--jobs TEXT ...] [--against COMMIT] [--results FILE]``.

The ideal is the time that the engines take if all requests are in their queues from the start. It
is no upper bound: such engines preempt requests and forget prefixes. Shares are the ideal's time
divided by a system's. The load of this machine changes none.

ours       default settings
before     the same at ``--against``
datatrove  see ``throughput_run.py``

A second table (``--jobs killed``) is about kills of a client or a server, with answers of 8,000
tokens. Each cell has two figures: with ``half_answers: false``, and with the default.

seconds   from the first request to the last answer
tokens/s  of the kept answers
twice     tokens that were generated and are in no answer, for each kill
mean      length of the kept answers, divided by the true mean

What has missed its goal, or is more than 2 % slower than before, is listed below the tables.
``--write`` also writes the tables to docs/internals/benchmarks.md, and README's lines.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from tests.bench import report, tables
from tests.bench.commits import checkout
from tests.bench.measure import ROOT
from tests.bench.throughput_jobs import JOBS, KILLS
from tests.bench.throughput_kills import MOST_TWICE

SYSTEMS = ("ours", "before", "datatrove")
KILL_COLUMNS = ["", "seconds", "tokens/s", "tokens twice a kill", "mean"]
_SLOWER = 0.98
_ACCURACY = 0.01


@dataclass
class Results:
    """Runs what ``path`` has no result of, and appends it there."""

    seed: int
    before: Path
    path: Path | None
    _known: dict[str, dict] = field(default_factory=dict)

    def __post_init__(self):
        if self.path is not None and self.path.exists():
            for line in self.path.read_text().splitlines():
                name, result = json.loads(line)
                self._known[name] = result

    def seconds(self, job, system):
        return self.of(job, system)["seconds"]

    def of(self, job, system):
        name = json.dumps([job, system, self.seed])
        if name not in self._known:
            self._known[name] = self._run(job, system)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(f"{json.dumps([name, self._known[name]])}\n")
        result = self._known[name]
        print(f"{job}: {system}: {result}", file=sys.stderr, flush=True)
        return result

    def _run(self, job, system):
        package = self.before if system == "before" else ROOT
        system = "ours" if system == "before" else system
        arguments = json.dumps([job, system, self.seed])
        with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-throughput-") as folder:
            # The other commit's package, with this one's tests.
            Path(folder, "datatrove_ckpt").symlink_to(Path(package, "datatrove_ckpt"))
            path = f"{folder}{os.pathsep}{ROOT}"
            environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
            process = subprocess.run(
                [sys.executable, "-P", str(ROOT / "tests/bench/throughput_run.py"), arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        if process.returncode:
            raise SystemExit(f"{process.stderr}\n{system}: exit code {process.returncode}: {job}")
        return dict(json.loads(process.stdout.splitlines()[-1]))


def shares(name, results, systems):
    """The share of the ideal of each system."""
    job = JOBS[name]
    ideal = results.seconds(name, "ideal")
    found = {}
    for system in systems:
        if system != "datatrove" or (job.death is None and len(job.models) == 1):
            found[system] = ideal / results.seconds(name, system)
    return found


def kill_row(name, results):
    """The cells of a row of the table of kills: each is that without continuing, and ours."""
    runs = [results.of(name, system) for system in ("false", "ours")]
    kept = KILLS[name].answers
    figures = [
        [f"{run['seconds']:,.0f}" for run in runs],
        [f"{kept * run['mean'] / run['seconds']:,.0f}" for run in runs],
        [f"{run['twice']:,.0f}" for run in runs],
        [f"{run['mean'] / run['true_mean']:.3f}" for run in runs],
    ]
    return [name, *("/".join(pair) for pair in figures)]


def _missed_by_kills(name, results):
    result = results.of(name, "ours")
    if result["twice"] > MOST_TWICE:
        yield f"{name}: {result['twice']:,.0f} tokens are generated twice; {MOST_TWICE:,} are allowed"
    if abs(result["mean"] / result["true_mean"] - 1) > _ACCURACY:
        yield f"{name}: answers have {result['mean']:,.0f} tokens, not {result['true_mean']:,.0f}"


def _missed(name, found):
    ours = round(found.get("ours", 0.0), 3)
    if "ours" in found and ours < JOBS[name].goal:
        yield f"{name}: {ours}, and its goal is {JOBS[name].goal}"
    if "ours" in found and ours < _SLOWER * found.get("before", 0.0):
        yield f"{name}: {ours}, and before {found['before']:.3f}"


def main():
    parser = tables.parser(__doc__)
    parser.add_argument("--jobs", nargs="*", default=[""], help="parts of their names; all")
    parser.add_argument("--against", default="HEAD", metavar="COMMIT", help="for `before`")
    parser.add_argument("--systems", nargs="*", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="of this commit: what it has is not run again"
    )
    parser.add_argument(
        "--write", action="store_true", help="tables with all jobs and systems, to the docs"
    )
    options = parser.parse_args()
    names = _chosen(JOBS, options.jobs)
    kills = _chosen(KILLS, options.jobs)
    is_whole = len(names) in (0, len(JOBS)) and len(kills) in (0, len(KILLS))
    if options.write and not (is_whole and set(options.systems) == set(SYSTEMS)):
        parser.error("--write: needs all jobs of a table, and all systems")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="datatrove-ckpt-commit-"))
        before = stack.enter_context(checkout(options.against, Path(folder) / "before"))
        results = Results(options.seed, before, options.results)
        threads = stack.enter_context(ThreadPoolExecutor(options.processes))
        found = list(threads.map(lambda name: shares(name, results, options.systems), names))
        rows = [
            [name, *(f"{row[system]:.2f}" if system in row else None for system in options.systems)]
            for name, row in zip(names, found, strict=True)
        ]
        _show(["job", *options.systems], rows, report.write_shares if options.write else None)
        rows = list(threads.map(lambda name: kill_row(name, results), kills))
        _show(KILL_COLUMNS, rows, report.write_kills if options.write else None)
    missed = chain(
        *map(_missed, names, found), *(_missed_by_kills(name, results) for name in kills)
    )
    for line in missed:
        print(f"\n{line}")


def _chosen(jobs, parts):
    return [name for name in jobs if any(part in name for part in parts)]


def _show(header, rows, write):
    if not rows:
        return
    table = tables.markdown(header, rows)
    print(f"{table}\n")
    if write is not None:
        write(table)


if __name__ == "__main__":
    main()
