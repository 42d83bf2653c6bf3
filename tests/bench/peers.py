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
    "ours": "datatrove_ckpt",
    "datatrove": "datatrove.pipeline.inference.run_inference, aiofiles, aiosqlite, httpx",
    "ray": "ray.data.checkpoint, aiohttp",
    "curator": "bespokelabs.curator",
}
"""What is imported."""
_HEAD = ["", "documents/s", "CPU s per 1000 documents", "s to the first request", "s to it after the kill",
         "answers paid twice", "rows lost", "rows doubled"]  # fmt: skip


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


class PeerError(Exception):
    """A run did not go as it must, so there is no figure."""


def import_error(name, python):
    """The last line of what the interpreter says if it cannot import the system, else ""."""
    command = [python, "-c", f"import {PEERS[name]}"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return process.stderr.splitlines()[-1] if process.returncode else ""


def row(name, result):
    keys = ("rate", "cpu", "start", "resume", "twice", "lost", "doubled")
    return [name, *(result[key] for key in keys)]


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
    rows = []
    with mock_server() as server:
        for name in options.systems:
            python = pythons.get(name, sys.executable)
            if error := import_error(name, python):
                rows.append([name, f"not installed: {error}"])
                continue
            try:
                rows.append(row(name, Peer(name, python, server, options).measure()))
            except PeerError as error:
                rows.append([name, str(error)])
            print(rows[-1], file=sys.stderr, flush=True)
    machine = f"{os.cpu_count()} cores, {platform.platform()}"
    print(
        f"{options.documents:,} documents of 2 kB, answers after {options.latency_ms:g} ms; {machine}\n"
    )
    table(_HEAD, [[*cells, *[None] * (len(_HEAD) - len(cells))] for cells in rows])


if __name__ == "__main__":
    main()
