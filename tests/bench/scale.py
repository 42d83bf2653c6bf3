"""The folders of 10,000 ranks in the middle of a run of 10^10 documents, and what our tools do with them.

    python -m tests.bench.scale --folder scale [--ranks 10000] [--documents 10000000000]

Makes the folders (see ``scale_folders``; about a million files, most of them sparse), measures each tool in a process
of its own, and prints tables in Markdown. With strace, it also counts the operations on files: those of the tools per
rank, from two smaller jobs, and those of a rank at work per chunk. ``--keep`` leaves the folder, which a later call
then measures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from datatrove_ckpt.formatting import byte_size
from datatrove_ckpt.testing import FakeServer
from tests.bench.scale_folders import ROOT, Plan, make, write_input, write_job

_COMMAND = [sys.executable, "-m", "datatrove_ckpt"]
_RANK = [sys.executable, "-m", "tests.bench.scale_rank"]

TOOLS = {
    "status": [*_COMMAND, "status", "checkpoints"],
    "status --json": [*_COMMAND, "status", "checkpoints", "--json"],
    "verify": [*_COMMAND, "verify", "checkpoints"],
    "repair --dry-run": [*_COMMAND, "repair", "checkpoints", "--dry-run"],
    "doctor": [*_COMMAND, "doctor", "job.yaml"],
    "run, to its first request": [*_COMMAND, "run", "job.yaml"],
    "one rank resumes, to its first request": [*_RANK, ".", "0"],
}
_TO_FIRST_REQUEST = ("run, to its first request", "one rank resumes, to its first request")

_IN_FLIGHT = 64
"""Requests at once, as in the job's YAML."""
_GROUPS = {
    "opens": ("openat", "open", "creat"),
    "lookups": ("stat", "newfstatat", "lstat", "statx", "access", "faccessat", "faccessat2", "readlink"),
    "listings": ("getdents64", "getdents"),
    "reads": ("read", "pread64"),
    "writes": ("write", "pwrite64", "writev"),
    "syncs": ("fsync", "fdatasync"),
    "names changed": ("rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir"),
    "locks": ("flock", "fcntl"),
}
"""System calls on files, by what they cost on a network file system."""


@dataclass(frozen=True)
class Cost:
    """What one tool took. ``code``: its exit code; None if it was killed after its first request."""

    tool: str
    seconds: float
    cpu_seconds: float
    memory_mb: float
    code: int | None


@dataclass(frozen=True)
class Size:
    """Files of one kind, of all ranks."""

    kind: str
    files: int
    bytes: int


# sizes ---------------------------------------------------------------------------------------------------------------


def sizes(folder: Path) -> list[Size]:
    """Files of the checkpoints and the output, by kind."""
    files: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for top in ("checkpoints", "output"):
        for path, size in _walk(folder / top):
            kind = "output/RANK_chunk_N.jsonl" if top == "output" else _kind(path)
            files[kind] += 1
            total[kind] += size
    return [Size(kind, files[kind], total[kind]) for kind in sorted(files)]


def _walk(folder: Path) -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir():
                yield from ((f"{entry.name}/{path}", size) for path, size in _walk(Path(entry.path)))
            else:
                yield entry.name, entry.stat().st_size


def _kind(path: str) -> str:
    path = re.sub(r"^\d{5,}/", "RANK/", path)
    return re.sub(r"/\d{5,}\.txt$", "/RANK.txt", re.sub(r"chunk_\d+", "chunk_N", path))


# times ---------------------------------------------------------------------------------------------------------------


def measure(folder: Path, plan: Plan, tools: Iterable[str] = TOOLS) -> list[Cost]:
    """Runs each tool once. What resumes is killed at its first request, so the folders stay as they are."""
    return [_measure(folder, plan, tool) for tool in tools]


def _measure(folder: Path, plan: Plan, tool: str) -> Cost:
    with FakeServer(hold_after=0) as server:
        write_job(folder, plan, server.url)
        started = time.monotonic()
        with (folder / "tool.log").open("wb") as log:
            process = subprocess.Popen(
                TOOLS[tool], cwd=folder, stdout=log, stderr=log, start_new_session=True, env=_environment()
            )
            memory = _watch(process.pid, lambda: tool in _TO_FIRST_REQUEST and bool(server.payloads))
            _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)  # else Popen waits for it, too
    if tool in _TO_FIRST_REQUEST and process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"{tool} ended with {process.returncode}: {(folder / 'tool.log').read_text()[-2000:]}")
    code = None if process.returncode == -signal.SIGKILL else process.returncode
    return Cost(tool, seconds, usage.ru_utime + usage.ru_stime, memory / 1024, code)


def _watch(pid: int, enough: Callable[[], bool]) -> int:
    """The most memory that the process has had, in kB. Returns when it has ended; kills it when it has done enough.

    Not ru_maxrss, which begins with the memory of the process that started this one.
    """
    most = 0
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        most = max(most, int(found[1])) if found else most
        if enough():
            os.killpg(pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    return most


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


# operations ----------------------------------------------------------------------------------------------------------


def operations(
    command: Sequence[str], folder: Path, plan: Plan, until_request: bool = False, delay: float = 0.0
) -> Counter[str]:
    """What strace counts while a command runs, by group. Its threads and children are included.

    Args:
        until_request: kill it at its first request.
        delay: seconds until a request is answered.
    """
    report = folder / "strace.txt"
    calls = ",".join(f"?{call}" for group in _GROUPS.values() for call in group)
    traced = ["strace", "-f", "-c", "-qq", "-S", "name", "-e", f"trace={calls}", "-o", str(report), *command]
    with FakeServer(hold_after=0 if until_request else None, delay=lambda payload, times: delay) as server:
        write_job(folder, plan, server.url)
        process = subprocess.Popen(
            traced, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment()
        )
        if until_request:
            while not server.payloads and process.poll() is None:
                time.sleep(0.01)
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)
        process.wait()
    found: Counter[str] = Counter()
    for line in report.read_text().splitlines():
        fields = line.split()
        for group, names in _GROUPS.items():
            if fields and fields[-1] in names:
                found[group] += int(fields[3])
    return found


def operations_per_rank(work: Path, plan: Plan, ranks: int = 10) -> dict[str, dict[str, float]]:
    """Of each tool that looks at all ranks: what one more rank costs it."""
    counted = []
    for number in (ranks, 2 * ranks):
        twin = replace(plan, ranks=number, documents=plan.documents_per_rank * number)
        make(work / str(number), twin)
        found = {}
        for tool, command in TOOLS.items():
            found[tool] = operations(command, work / str(number), twin, tool in _TO_FIRST_REQUEST)
        counted.append(found)
    few, many = counted
    return {tool: {name: (many[tool][name] - few[tool][name]) / ranks for name in _GROUPS} for tool in TOOLS}


def operations_per_chunk(work: Path, plan: Plan, chunks: int = 4) -> dict[str, float]:
    """What one more chunk costs a rank at work: from two runs of one rank, on local disks, with small chunks."""
    counted, per_chunk = [], min(plan.records_per_chunk, 500)
    for number in (chunks, 2 * chunks):
        one = replace(plan, ranks=1, documents=number * per_chunk, records_per_chunk=per_chunk)
        folder = work / f"chunks-{number}"
        folder.mkdir(parents=True)
        write_input(folder, one)
        counted.append(operations([*_RANK, ".", "0"], folder, one))
    return {name: (counted[1][name] - counted[0][name]) / chunks for name in _GROUPS}


def operations_per_second(work: Path, plan: Plan, rate: int = 20, seconds: int = 20) -> dict[str, float]:
    """What a second of work costs a rank that does ``rate`` documents per second, in the middle of a chunk."""
    counted = []
    for length in (seconds, 2 * seconds):
        one = replace(plan, ranks=1, documents=rate * length, records_per_chunk=10 * rate * length)
        folder = work / f"seconds-{length}"
        folder.mkdir(parents=True)
        write_input(folder, one)
        counted.append(operations([*_RANK, ".", "0"], folder, one, delay=_IN_FLIGHT / rate))
    return {name: (counted[1][name] - counted[0][name]) / seconds for name in _GROUPS}


def remote_operations(work: Path, plan: Plan, seconds: float = 20.0) -> dict[str, float]:
    """What one version of a mirror costs, on average, while a rank works with a version per second."""
    requests = 400
    one = replace(plan, ranks=1, documents=requests, records_per_chunk=min(plan.records_per_chunk, requests // 4))
    folder = work / "mirror"
    folder.mkdir(parents=True)
    write_input(folder, one)
    with FakeServer(delay=lambda payload, times: seconds * _IN_FLIGHT / requests) as server:
        write_job(folder, one, server.url)
        mirror = ["--pipeline.1.checkpoints_remote_dir=memory://mirror", "--pipeline.1.mirror_seconds=1"]
        command = [*_RANK, ".", "0", "counts.json", *mirror]
        subprocess.run(command, cwd=folder, capture_output=True, check=True, env=_environment())
    counts: dict[str, int] = json.loads((folder / "counts.json").read_text())
    versions = counts.pop("versions")
    return {kind: number / versions for kind, number in counts.items()}


# report --------------------------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """Everything that was measured. What is None was not."""

    plan: Plan
    sizes: list[Size]
    costs: list[Cost]
    per_rank: dict[str, dict[str, float]] | None = None
    per_chunk: dict[str, float] | None = None
    per_second: dict[str, float] | None = None
    per_version: dict[str, float] | None = None

    def tables(self) -> str:
        """In Markdown, with a line break between the tables."""
        return "\n".join(
            _table(rows) for rows in (self._sizes(), self._costs(), self._per_rank(), self._at_work()) if rows
        )

    def _sizes(self) -> list[list[str]]:
        rows = [["files", "of a rank", "bytes of a rank", "in all", "bytes in all"]]
        ranks = self.plan.ranks
        for one in self.sizes:
            each = [f"{one.files / ranks:,.0f}", f"{one.bytes / ranks:,.0f}"] if one.files >= ranks else ["", ""]
            rows.append([f"`{one.kind}`", *each, f"{one.files:,}", byte_size(one.bytes)])
        return rows

    def _costs(self) -> list[list[str]]:
        head = ["", "seconds", "CPU seconds", "memory, MB", "exit code"]
        rows = [[f"{one.seconds:.1f}", f"{one.cpu_seconds:.1f}", f"{one.memory_mb:,.0f}"] for one in self.costs]
        codes = ["killed" if one.code is None else str(one.code) for one in self.costs]
        return [head, *([one.tool, *row, code] for one, row, code in zip(self.costs, rows, codes, strict=True))]

    def _per_rank(self) -> list[list[str]]:
        if self.per_rank is None:
            return []
        rows = [[tool, *(f"{counts[name]:.0f}" for name in _GROUPS)] for tool, counts in self.per_rank.items()]
        return [["operations for each rank", *_GROUPS], *rows]

    def _at_work(self) -> list[list[str]]:
        rows = [[f"{name}, of a second", f"{number:.1f}"] for name, number in (self.per_second or {}).items()]
        rows += [[f"{name}, of a chunk", f"{number:.1f}"] for name, number in (self.per_chunk or {}).items()]
        rows += [
            [f"{name}, of a version of a mirror", f"{number:.1f}"] for name, number in (self.per_version or {}).items()
        ]
        return [["a rank at work", "operations"], *rows] if rows else []


def _table(rows: list[list[str]]) -> str:
    ruler = ["---"] * len(rows[0])
    return "".join("| " + " | ".join(row) + " |\n" for row in (rows[0], ruler, *rows[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=(__doc__ or "").splitlines()[0])
    for field in fields(Plan):
        kind = int if isinstance(field.default, int) else float
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "datatrove-ckpt-scale")
    parser.add_argument("--keep", action="store_true", help="leave the folder; if it is there, measure what it holds")
    parser.add_argument("--no-operations", action="store_true", help="count no operations (which needs strace)")
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--json", type=Path, help="a file that gets all figures")
    options = parser.parse_args()
    plan = Plan(**{field.name: getattr(options, field.name) for field in fields(Plan)})
    folder, started = options.folder / "job", time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {what}", file=sys.stderr, flush=True)

    if not folder.exists():
        make(folder, plan, say)
    say("sizes")
    found = Findings(plan, sizes(folder), [])
    for tool in options.tools:
        say(tool)
        found.costs += measure(folder, plan, [tool])
        print(found.costs[-1], file=sys.stderr, flush=True)
    if not options.no_operations and shutil.which("strace"):
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            say("operations")
            found.per_rank = operations_per_rank(Path(work) / "ranks", plan)
            found.per_chunk = operations_per_chunk(Path(work) / "chunks", plan)
            found.per_second = operations_per_second(Path(work), plan)
            found.per_version = remote_operations(Path(work), plan)
    print(found.tables(), end="")
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=1))
    if not options.keep:
        say("removing the folder")
        shutil.rmtree(options.folder)
    say("done")


if __name__ == "__main__":
    main()
