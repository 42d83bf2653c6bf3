"""Ours beside datatrove's runner, Ray Data and curator: the same documents, the same server, one
kill -9 each.

    python -m tests.bench.peers --python ray=ray-env/bin/python --python
    curator=curator-env/bin/python

Each system runs in an interpreter of its own (``--python NAME=PATH``; else this one). One that
cannot be imported there is a row that says so. What they need beside this package's own
environment, all versions as pip finds them:

    datatrove   pip install aiofiles aiosqlite httpx
    ray         pip install "ray[data]" aiohttp
    curator     pip install bespokelabs-curator

A system runs twice. The first run is left alone: documents/s from the first request to the end of
its work, and CPU seconds of all its processes, from start to end. They are found by an environment
variable that they inherit, because Ray's daemons leave their parents. Their times are read from
/proc: those of the first process when it has ended, those of the others twenty times a second. The
second run is killed (SIGKILL, all processes) when half of the documents are answered, and the same
command starts again: seconds to its first request, requests for documents that were requested
before, and what the output holds in the end, by its id column. A row counts if it holds the answer.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.bench import tables
from tests.bench.measure import ROOT, mock_server, table
from tests.bench.systems import Run
from tests.bench.workload import make_input

_MARK = "DATATROVE_CKPT_BENCH_PEER"
_TICKS = os.sysconf("SC_CLK_TCK")
_ANSWER = "An answer."
PEERS = {
    "ours": ("datatrove_ckpt", ["datatrove-ckpt", "datatrove"]),
    "datatrove": (
        "datatrove.pipeline.inference.run_inference, aiofiles, aiosqlite, httpx",
        ["datatrove", "httpx"],
    ),
    "ray": ("ray.data.checkpoint, aiohttp", ["ray", "aiohttp", "pyarrow"]),
    "curator": ("bespokelabs.curator", ["bespokelabs-curator", "litellm", "datasets"]),
}
"""What is imported, and the distributions whose versions count."""
_VERSIONS = """\
import {}, json, platform
from importlib.metadata import version
print(json.dumps([f"{{name}} {{version(name)}}" for name in {}] + ["Python " + platform.python_version()]))
"""
_HEAD = ["", "documents/s", "CPU s per 1000 documents", "s to the first request", "s to it after the kill",
         "answers paid twice", "rows lost", "rows doubled", "MB on disk at the kill", "MB at the end"]  # fmt: skip


class Tree:
    """A process and all that it starts."""

    def __init__(self, command, log):
        token = uuid.uuid4().hex
        self._mark = f"{_MARK}={token}".encode()
        self._is_member = {}
        self._cpu = {}
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            _MARK: token,
        }
        self.started = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def cpu(self):
        """Seconds, as of the last look."""
        return sum(self._cpu.values())

    def run(self, seconds, until=lambda: False):
        """Kills all when the first process has ended, after ``seconds``, or ``until``.

        Whether it ended by itself.
        """
        ended = None
        try:
            while not ended and time.monotonic() < self.started + seconds and not until():
                time.sleep(0.05)
                self._look()
                ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        finally:
            # Of a zombie, too: it has the time of a process to its end.
            while members := self._look():
                for pid in members:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.process.wait()
        return ended is not None

    def _look(self):
        """Reads the CPU times of those that are there, and returns them, zombies left out."""
        alive = []
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
            with suppress(OSError):  # it has ended
                if pid not in self._is_member:
                    self._is_member[pid] = self._mark in Path(
                        f"/proc/{pid}/environ"
                    ).read_bytes().split(b"\0")
                if self._is_member[pid]:
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    self._cpu[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
                    if fields[0] not in "ZX":
                        alive.append(pid)
        return alive


class Peer:
    """One system, its interpreter, its folder."""

    def __init__(self, name, python, server, options):
        self.name, self.server, self.options = name, server, options
        self.folder = options.folder / "peers" / name
        source = make_input(options.folder, "jsonl", options.documents, 2000)
        run = Run(name, server.url, str(source), str(self.folder), checkpoints=f"{self.folder}/checkpoints",
                  concurrency=options.concurrency, chunk=min(1000, options.documents // 20))  # fmt: skip
        self.command = [python, "-P", str(ROOT / "tests/bench/systems.py"), json.dumps(vars(run))]

    def measure(self):
        documents = self.options.documents
        self._clear()
        whole = self._to_its_end()
        result = {
            "rate": documents / (whole["ended"] - whole["first"]),
            "cpu": whole["cpu"] / documents * 1000,
            "start": whole["first"] - whole["began"],
        }
        self._clear()
        self._killed_in_the_middle()
        result["bytes_at_kill"] = self._bytes()
        self.server.restarted()
        again = self._to_its_end()
        rows = self._rows()
        counts = self.server.counts()
        return {
            **result,
            "resume": again["first"] - again["began"],
            "twice": counts["requests"] - counts["documents"],
            "lost": documents - len(rows),
            "doubled": rows.total() - len(rows),
            "bytes": self._bytes(),
        }

    def _clear(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.server.reset(self.options.latency_ms / 1000)
        subprocess.run(["sync"], check=True)  # dirty pages of the run before are not this one's

    def _to_its_end(self):
        log = self.folder / "log"
        tree = Tree(self.command, log)
        in_time = tree.run(self.options.limit)
        lines = log.read_text(errors="replace").splitlines() or [""]
        if not in_time or tree.process.returncode:
            how = (
                f"exit code {tree.process.returncode}"
                if in_time
                else f"no end in {self.options.limit:g} s"
            )
            raise PeerError(f"{how}: {lines[-1][:200]} (see {log})")
        result = next(line for line in reversed(lines) if line.startswith('{"run"'))
        return {
            **json.loads(result),
            "began": tree.started,
            "cpu": tree.cpu,
            "first": self.server.counts()["first"],
        }

    def _killed_in_the_middle(self):
        tree = Tree(self.command, self.folder / "log")
        if tree.run(self.options.limit, self._half_is_answered) or not self._half_is_answered():
            raise PeerError(f"it was never in the middle (see {self.folder / 'log'})")

    def _half_is_answered(self):
        counts = self.server.counts()
        return bool(counts["requests"] - counts["in_flight"] >= self.options.documents / 2)

    def _rows(self):
        """By id, those that hold the answer."""
        rows = Counter()
        for path in (self.folder / "output").rglob("*.json*"):
            for line in path.read_text().splitlines():
                if _ANSWER in line:
                    rows[json.loads(line)["id"]] += 1
        return rows

    def _bytes(self):
        """Of checkpoints and output.

        Allocated, as ``du`` has it: a preallocated or small file is what it takes.
        """
        files = [
            path for part in ("checkpoints", "output") for path in (self.folder / part).rglob("*")
        ]
        return sum(path.stat().st_blocks * 512 for path in files if path.is_file())


class PeerError(Exception):
    """A run did not go as it must, so there is no figure."""


def versions(name, python):
    """Of what counts in the system's environment; or why it cannot be imported there."""
    command = [python, "-c", _VERSIONS.format(*PEERS[name])]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (process.stdout if not process.returncode else process.stderr).splitlines()
    return list(json.loads(lines[-1])) if not process.returncode else lines[-1]


def row(name, result):
    sizes = [result[key] / 1e6 for key in ("bytes_at_kill", "bytes")]
    return [
        name,
        *(result[key] for key in ("rate", "cpu", "start", "resume", "twice", "lost", "doubled")),
        *sizes,
    ]


def main():
    parser = tables.parser(__doc__)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--systems", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="a system's interpreter"
    )
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--limit", type=float, default=600, help="seconds that a run may take")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/tmp/datatrove-ckpt-bench"),
        help="on the disk to measure",
    )
    options = parser.parse_args()
    pythons = dict(item.split("=", 1) for item in options.python)
    rows, found = [], []
    with mock_server() as server:
        for name in options.systems:
            python = pythons.get(name, sys.executable)
            installed = versions(name, python)
            if isinstance(installed, str):
                rows.append([name, f"not installed: {installed}"])
                continue
            found.append(f"{name}: {', '.join(installed)}")
            print(found[-1], file=sys.stderr, flush=True)
            try:
                rows.append(row(name, Peer(name, python, server, options).measure()))
            except PeerError as error:
                rows.append([name, str(error)])
            print(rows[-1], file=sys.stderr, flush=True)
    machine = f"{os.cpu_count()} cores, {platform.platform()}"
    print(
        f"{options.documents:,} documents of 2 kB, answers after {options.latency_ms:g} ms; {machine}\n"
    )
    print("\n".join(found), end="\n\n")
    table(_HEAD, [[*cells, *[None] * (len(_HEAD) - len(cells))] for cells in rows])


if __name__ == "__main__":
    main()
