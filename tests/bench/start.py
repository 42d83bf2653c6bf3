"""What a start costs: ``python -m tests.bench.start [--tasks 200] [--rounds 9]``.

import         CPU of importing our runner, divided by that of datatrove's: the median of pairs
               of processes
status         CPU of ``status JOB.yaml`` of a finished job
opened         how often a second ``run`` opens a task's commits.jsonl; needs strace
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.bench import tables
from tests.bench.measure import ROOT, interleaved, median, ratio, table
from tests.bench.systems import cpu_seconds
from tests.yaml_jobs import job_yaml, write_tasks

_OURS = "datatrove_ckpt.runner"
_THEIRS = "datatrove.pipeline.inference.run_inference"
_COMMAND = [sys.executable, "-m", "datatrove_ckpt"]


def cost(command, folder=ROOT):
    """CPU of a command and its children."""
    before = cpu_seconds(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return {"cpu": cpu_seconds(resource.RUSAGE_CHILDREN) - before}


def import_costs(rounds):
    return interleaved(
        [_OURS, _THEIRS], rounds, lambda name: cost([sys.executable, "-c", f"import {name}"])
    )


def opened(folder):
    """By the path of a commits.jsonl, how often a run of the job opens it."""
    trace = folder / "trace"
    strace = ["strace", "-f", "-e", "trace=open,openat", "-o", str(trace)]
    cost([*strace, *_COMMAND, "run", "job.yaml"], folder)
    return Counter(re.findall(r'"([^"]*/commits\.jsonl)".* = \d', trace.read_text()))


def main():
    parser = tables.parser(__doc__)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    ours, theirs = import_costs(options.rounds).values()
    rows = [["import, ours by datatrove's", ratio(ours, theirs, "cpu")]]
    with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-start-") as name:
        folder = Path(name)
        job = job_yaml("server_type: dummy, model_name_or_path: m", tasks=options.tasks)
        (folder / "job.yaml").write_text(job)
        write_tasks(folder, options.tasks, 1)
        cost([*_COMMAND, "run", "job.yaml"], folder)
        status = [cost([*_COMMAND, "status", "job.yaml"], folder) for _ in range(options.rounds)]
        rows.append([f"status of {options.tasks} tasks, CPU s", median(status, "cpu")])
        rows.append(["opened", max(opened(folder).values())])
    table(["", ""], rows)


if __name__ == "__main__":
    main()
