"""What share of the engines' ideal a job gets, on simulated engines in virtual time:
``python -m tests.bench.throughput [--jobs TEXT ...] [--against COMMIT]``.

The ideal is the time that the engines take if all requests are in their queues from the start. It
is no upper bound: such engines preempt requests and forget prefixes. Shares are the ideal's time
divided by a system's. The load of this machine changes none.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.bench import tables
from tests.bench.commits import checkout
from tests.bench.measure import ROOT
from tests.bench.throughput_jobs import JOBS


def run(job, system, seed, at_once=None, package=ROOT):
    """The result of one run. ``at_once``: None: the system's default."""
    arguments = json.dumps([job, system, seed, at_once])
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
        raise SystemExit(f"{process.stderr}\n{system} failed with exit code {process.returncode}")
    result = dict(json.loads(process.stdout.splitlines()[-1]))
    print(f"{job}: {system} {at_once or ''}: {result}", file=sys.stderr, flush=True)
    return result


def row(name, seed, before, systems):
    job = JOBS[name]
    ideal = run(name, "ideal", seed)["seconds"]

    def share(*arguments, **options):
        return ideal / run(name, *arguments, **options)["seconds"]

    cells = {"ours": share("ours", seed) if "ours" in systems else None}
    if "before" in systems:
        cells["before"] = share("ours", seed, package=before)
    if "best" in systems:
        cells["best"] = max(share("ours", seed, number, package=before) for number in job.best)
    if "loop" in systems:
        cells["loop"] = share("loop", seed)
    if "datatrove" in systems:
        cells["datatrove"] = share("datatrove", seed) if job.servers == 1 else None
    return [name, *cells.values()]


def main():
    parser = tables.parser(__doc__)
    parser.add_argument("--jobs", nargs="*", default=[""], help="parts of their names; all")
    parser.add_argument("--against", default="HEAD", metavar="COMMIT", help="for `before`, `best`")
    parser.add_argument(
        "--systems", nargs="*", default=["ours", "before", "best", "loop", "datatrove"]
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="datatrove-ckpt-commit-"))
        before = stack.enter_context(checkout(options.against, Path(folder) / "before"))
        names = [name for name in JOBS if any(part in name for part in options.jobs)]
        rows = [row(name, options.seed, before, options.systems) for name in names]
    print(tables.markdown(["share of the ideal", *options.systems], rows))


if __name__ == "__main__":
    main()
