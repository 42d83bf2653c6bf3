"""Ours beside other projects: the same rows, the same server, one ``kill -9`` each.

    python -m tests.bench.peers

Each has an environment of its own, which is made (tests/real/environment.py), and runs twice. The
first run is left alone: CPU of all its processes, start and imports included. The second is killed,
all its processes, once the server has given half of the answers; the same command starts again.

    in flight     rows that were asked for, and whose answer no process had read at the kill: any
                  project pays for them again, and has as many as it fills of its places
    paid twice    rows whose answer had been read, and that were asked for again
    lost, doubled rows of the output, by their number, that hold an answer

A project that cannot be installed, fails, or does not end in time, is a row that says so.
"""

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from datatrove_ckpt.inference.servers.guardian import descendants
from tests.bench import tables
from tests.bench.measure import ROOT, mock_server, table
from tests.bench.systems import SYSTEMS, Run, cpu_seconds
from tests.bench.workload import make_input
from tests.real.environment import peer_python

PEERS = {
    "ours": [f"datatrove-ckpt=={version('datatrove-ckpt')}"],
    "datatrove": ["datatrove==0.10.1", "aiofiles", "aiosqlite", "httpx", "orjson", "xxhash"],
    "ray": ["ray[data]==2.60.0", "aiohttp"],
    "curator": ["bespokelabs-curator==0.1.31"],
    "litellm": ["litellm[caching,proxy]==1.108.7"],  # 1.109 has no disk cache
    "data-designer": ["data-designer==0.9.7"],
    "distilabel": ["distilabel[openai]==1.5.3", "requests"],
}
"""What is installed."""
_HEAD = ["", "version", "CPU ms a row", "in flight", "paid twice", "lost", "doubled"]
_CHUNK = 100
"""Rows of what is saved as one, where a project has such a setting."""
_LATENCY = (0.5, 1.5)  # seconds; longer than it takes the slowest to read an answer
_PR_SET_CHILD_SUBREAPER = 36
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "NEMO_TELEMETRY_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TELEMETRY_ENABLED": "false",
}


class PeerError(Exception):
    """A run did not go as it must, so there is no figure."""


class Peer:
    """One project, its interpreter, its folder."""

    def __init__(self, name, python, server, options):
        self.server = server
        self.options = options
        self.folder = options.folder / name
        self._others = {process.pid for process in descendants(os.getpid())}
        source = make_input(options.folder, "jsonl", options.rows, 2000)
        run = Run(name, server.url, str(source), str(self.folder), checkpoints=f"{self.folder}/checkpoints",
                  concurrency=options.places, chunk=_CHUNK)  # fmt: skip
        script = "systems.py" if name in SYSTEMS else "peer_systems.py"
        self._command = [python, "-P", str(ROOT / "tests/bench" / script), json.dumps(vars(run))]

    def clear(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.server.reset(*_LATENCY)

    def start(self):
        environment = {
            **os.environ,
            **_QUIET,
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
        }
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                self._command, env=environment, cwd=self.folder, stdout=log, stderr=log
            )

    def end(self):
        """Kills all at once; whose parent ended is our child, then."""
        while left := {one.pid for one in descendants(os.getpid())} - self._others:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def run(self, what):
        """To its end, in the time that it has."""
        process = self.start()
        try:
            code = process.wait(self.options.limit)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{what} did not end in {self.options.limit} s") from None
        finally:
            self.end()
        if code:
            raise PeerError(f"{what} failed with exit code {code}, see {self.folder}/log")

    def run_to_half(self):
        self.start()
        try:
            self.server.wait(self.options.rows // 2, self.options.limit)
        except TimeoutError:
            raise PeerError(f"no half in {self.options.limit} s") from None
        finally:
            self.end()

    def answered(self):
        """By number, the rows of the output that hold an answer."""
        rows = Counter()
        for path in (self.folder / "output").rglob("*.json*"):
            rows.update(re.findall(r"#(\d+)# .*is about a river", path.read_text()))
        return rows


def measure(peer, cells):
    """Appends what is measured, as far as it comes.

    Raises:
        PeerError: a run did not go as it must.
    """
    rows = peer.options.rows
    peer.clear()
    before = cpu_seconds(resource.RUSAGE_CHILDREN)
    peer.run("the first run")
    cells.append((cpu_seconds(resource.RUSAGE_CHILDREN) - before) / rows * 1000)
    peer.clear()
    peer.run_to_half()
    cells.append(peer.server.counts()["unanswered"])
    peer.run("the run after the kill")
    cells.append(peer.server.counts()["asked_after_their_answer"])
    answered = peer.answered()
    cells += [rows - len(answered), answered.total() - len(answered)]


def main():
    parser = tables.parser(__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--places", type=int, default=64, help="requests at once")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a run may take")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    folder = Path(tempfile.gettempdir(), "datatrove-ckpt-peers")
    parser.add_argument("--folder", type=Path, default=folder, help="with logs, on the disk to use")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    table_rows = []
    with mock_server() as server:
        for name in options.peers:
            number = PEERS[name][0].partition("==")[2]
            cells = [name, number]
            try:
                python = sys.executable
                if name != "ours":
                    python = peer_python(name, number, *PEERS[name])
                measure(Peer(name, python, server, options), cells)
            except PeerError as error:
                cells.append(str(error))
            except subprocess.CalledProcessError:
                cells.append("could not be installed")
            print(cells, file=sys.stderr, flush=True)
            table_rows.append([*cells, *[None] * (len(_HEAD) - len(cells))])
    print(
        f"{datetime.now(UTC):%Y-%m-%d}: {options.rows:,} rows, {options.places} places, chunks of "
        f"{_CHUNK} rows, answers after {_LATENCY[0]} to {_LATENCY[1]} s; {os.cpu_count()} cores\n"
    )
    table(_HEAD, table_rows)


if __name__ == "__main__":
    main()
