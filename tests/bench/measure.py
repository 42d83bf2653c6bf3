"""Runs systems against the mock server, in turn, and reckons medians from what they and the server
report.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from tests.bench.systems import cpu_seconds
from tests.bench.tables import markdown

ROOT = Path(__file__).parents[2]


class MockServer:
    """The mock server's process, seen from outside."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def reset(self, latency, longest=None):
        longest = latency if longest is None else longest
        self._get(f"/reset?latency-ms={latency * 1000}-{longest * 1000}")

    def counts(self):
        return self._get("/count")

    def wait(self, answers, seconds):
        """
        Raises:
            TimeoutError: there were not so many in this time.
        """
        self._get(f"/wait?answers={answers}", seconds)

    def _get(self, path, seconds=60):
        # A proxy in the environment is never meant for it.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=seconds) as response:
            return dict(json.load(response))


@contextmanager
def mock_server():
    command = [sys.executable, "-m", "tests.bench.mock_server"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield MockServer(int(process.stdout.readline()))
        finally:
            process.terminate()


def run_once(server, run, latency, documents, package=ROOT):
    """One run in a fresh process, in an empty folder, of the package in the checkout
    ``package``.
    """
    # The folder holds the output, the checkpoints, and whose output it is.
    shutil.rmtree(run.folder, ignore_errors=True)
    Path(run.folder).mkdir(parents=True)
    server.reset(latency)
    # Dirty pages of the run before are not this one's business.
    subprocess.run(["sync"], check=True)
    command = [sys.executable, "-P", str(ROOT / "tests/bench/systems.py"), json.dumps(vars(run))]
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"}
    before = cpu_seconds(resource.RUSAGE_CHILDREN)
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    whole = cpu_seconds(resource.RUSAGE_CHILDREN) - before
    if process.returncode:
        raise SystemExit(
            f"{process.stderr}\n{run.system} failed with exit code {process.returncode}: {run}"
        )
    result = json.loads(process.stdout.splitlines()[-1])
    counts = server.counts()
    wall = result["ended"] - result["started"]
    return {
        **result,
        "documents": documents,
        "wall": wall,
        "rate": documents / wall,
        "cpu_per_1000": result["cpu"] / documents * 1000,
        "whole_cpu_per_1000": whole / documents * 1000,
        "us": result["cpu"] / documents * 1e6,
        "tail": result["ended"] - counts["last"],
        "serving_rate": documents / (result["ended"] - counts["first"]),
        "lost": documents - counts["requests"],
        "counted_right": counts["by_times_asked"] == {"1": documents},
    }


def interleaved(names, repetitions, one):
    """A, B, C, C, B, A, A, ...: what disturbs the machine for a while disturbs all alike."""
    names = list(names)
    results = {name: [] for name in names}
    for turn in range(repetitions):
        for name in reversed(names) if turn % 2 else names:
            results[name].append(one(name))
    return results


def median(results, key):
    return statistics.median(result[key] for result in results)


def ratio(some, others, key):
    """The median of the ratios of runs that followed each other."""
    return statistics.median(a[key] / b[key] for a, b in zip(some, others, strict=True))


def wrong(results):
    """Requests lost (+) or repeated (-), or documents asked the wrong number of times; "0" when all
    was right.
    """
    if all(result["counted_right"] for result in results):
        return "0"
    return ", ".join(str(result["lost"]) if result["lost"] else "mixed" for result in results)


def table(header, rows):
    print(f"{markdown(header, rows)}\n", flush=True)
