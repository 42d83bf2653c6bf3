"""What a job of many ranks costs its tools: ``python -m tests.bench.ranks [--ranks 10000] [--chunks
83] [TOOL ...]``.

Rank 0 is real: it ran with a fake server, and was killed in its last chunk. The other ranks have
copies of its files, with their own names, but no request cache. Output files are sparse: they have
names and sizes. Each tool runs once, in a process of its own; of `run`, what it takes to its first
request. ``tests/integration/test_scale.py`` holds it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, verified_body
from datatrove_ckpt.output.output_folder import local_stamps
from datatrove_ckpt.testing import FakeServer
from tests.bench import tables
from tests.bench.measure import ROOT, table

PER_CHUNK = 6
_JOB = """\
executor:
  class_path: LocalPipelineExecutor
  init_args:
    tasks: TASKS
    workers: 1
    logging_dir: logs
    pipeline:
      - class_path: JsonlReader
        init_args: {data_folder: input}
      - class_path: InferenceRunner
        init_args:
          rollout_fn: {class_path: PromptRollout, init_args: {prompt: "{text}"}}
          config: {server_type: endpoint, endpoint_url: "URL", model_name_or_path: fake, max_concurrent_generations: 1}
          output_writer:
            class_path: JsonlWriter
            init_args: {output_folder: output, output_filename: "${rank}_chunk_${chunk_index}.jsonl", compression: null}
          records_per_chunk: 6
          checkpoints_local_dir: checkpoints
"""
_MAIN = (sys.executable, "-m", "datatrove_ckpt")
TOOLS = {
    "status": ["status", "checkpoints"],
    "status --json": ["status", "checkpoints", "--json"],
    "verify": ["verify", "checkpoints"],
    "repair --dry-run": ["repair", "checkpoints", "--dry-run"],
    "doctor": ["doctor", "job.yaml"],
    "run": ["run", "job.yaml"],
}


class Cost(NamedTuple):
    """What a tool took: CPU and wall seconds, and the most memory of its first process, in MB."""

    cpu: float
    seconds: float
    memory: float


def make(folder, ranks, chunks):
    """A job in the middle of its work, below an empty folder."""
    (folder / "input").mkdir()
    rows = [
        json.dumps({"id": f"{n}", "text": f"text {n}"}) for n in range((chunks + 1) * PER_CHUNK)
    ]
    first = folder / "input" / f"{0:06d}.jsonl"
    first.write_text("\n".join(rows) + "\n")
    for rank in range(1, ranks):
        os.link(first, folder / "input" / f"{rank:06d}.jsonl")
    commits = folder / "checkpoints" / "00000" / "commits.jsonl"
    with FakeServer(hold_after=chunks * PER_CHUNK + PER_CHUNK // 2) as server:
        write_job(folder, server.url, ranks)
        process = subprocess.Popen(
            [*_MAIN, "run", "job.yaml"], cwd=folder, env=_environment(), stderr=subprocess.DEVNULL
        )
        while not commits.exists() or commits.read_bytes().count(b"\n") < chunks:
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
        process.wait()
    for rank in range(1, ranks):
        _copy(folder, rank)


def write_job(folder, url, ranks):
    (folder / "job.yaml").write_text(_JOB.replace("TASKS", str(ranks)).replace("URL", url))


def _copy(folder, rank):
    names = re.compile(rb'"000000\.jsonl|"00000_chunk|"shard":\[0')
    real, target = folder / "checkpoints" / "00000", folder / "checkpoints" / f"{rank:05d}"
    target.mkdir()
    last = folder / "checkpoints" / "last_chunk"
    shutil.copyfile(last / "00000.txt", last / f"{rank:05d}.txt")
    own = {
        b'"000000.jsonl': b'"%06d.jsonl' % rank,
        b'"00000_chunk': b'"%05d_chunk' % rank,
        b'"shard":[0': b'"shard":[%d' % rank,
    }
    for path in real.iterdir():
        if path.is_dir() or path.name.startswith("replay"):
            continue
        if path.name != "commits.jsonl":
            shutil.copyfile(path, target / path.name)
            continue
        lines = []
        for line in path.read_bytes().splitlines(keepends=True):
            commit = json.loads(names.sub(lambda found: own[found[0]], verified_body(line) or b""))
            for file in commit["files"]:
                file["stamp"] = _make_sparse(folder / "output" / file["path"], file["size"])
            lines.append(add_checksum(json.dumps(commit, separators=(",", ":")).encode()))
        (target / path.name).write_bytes(b"".join(lines))


def _make_sparse(path, size):
    path.touch()
    os.truncate(path, size)
    return local_stamps(path.stat())[0]


def _environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def measure(folder, tool, ranks):
    """Of a tool, to its end; of ``run``, to its first request, at which it is killed."""
    with FakeServer(hold_after=0) as server, (folder / "said.txt").open("w") as said:
        write_job(folder, server.url, ranks)
        started = time.monotonic()
        process = subprocess.Popen(
            [*_MAIN, *TOOLS[tool]], cwd=folder, env=_environment(), stdout=said, stderr=said
        )
        status, memory = Path(f"/proc/{process.pid}/status"), 0
        while (
            not server.payloads
            and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        ):
            # Not ru_maxrss, which begins with our own memory.
            found = re.search(r"VmHWM:\s*(\d+)", status.read_text())
            memory = int(found[1]) if found else memory
            time.sleep(0.05)
        seconds = time.monotonic() - started
        os.kill(process.pid, signal.SIGKILL)  # no poll: it would reap a tool that has ended
        _, code, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    expected = {"run": (-signal.SIGKILL,), "verify": (3,), "doctor": (0, 1)}.get(tool, (0,))
    assert process.returncode in expected, (
        f"{tool}: {process.returncode}: {(folder / 'said.txt').read_text()[-3000:]}"
    )
    return Cost(usage.ru_utime + usage.ru_stime, seconds, memory / 1024)


def main():
    parser = tables.parser(__doc__)
    parser.add_argument(
        "tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}; all without any"
    )
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--chunks", type=int, default=83)
    parser.add_argument(
        "--folder", type=Path, help="keeps the folders here, and takes those that are here"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-ranks-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        if not any(folder.iterdir()):
            make(folder, arguments.ranks, arguments.chunks)
        costs = {tool: measure(folder, tool, arguments.ranks) for tool in arguments.tools or TOOLS}
    table(
        [f"{arguments.ranks} ranks", *Cost._fields], [[tool, *cost] for tool, cost in costs.items()]
    )


if __name__ == "__main__":
    main()
