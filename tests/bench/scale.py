"""The folders of 10,000 ranks in the middle of a run of 10^10 documents, and what our tools do with them.

    python -m tests.bench.scale --folder scale [--ranks 10000] [--documents 10000000000]

Makes the folders (see ``scale_folders``; about a million files, most of them sparse), measures each tool in a process
of its own, and prints tables in Markdown. ``--keep`` leaves the folder, which a later call then measures.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from datatrove_ckpt.formatting import byte_size
from datatrove_ckpt.testing import FakeServer
from tests.bench import tables
from tests.bench.scale_folders import ROOT, Plan, make, write_job

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


# report --------------------------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """Everything that was measured. What is None was not."""

    plan: Plan
    sizes: list[Size]
    costs: list[Cost]

    def tables(self) -> str:
        """In Markdown, with a line break between the tables."""
        return "\n\n".join(tables.markdown(rows[0], rows[1:]) for rows in (self._sizes(), self._costs()))

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


def main() -> None:
    parser = tables.parser(__doc__)
    tables.add_fields(parser, Plan())
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "datatrove-ckpt-scale")
    parser.add_argument("--keep", action="store_true", help="leave the folder; if it is there, measure what it holds")
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
    print(found.tables())
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=1))
    if not options.keep:
        say("removing the folder")
        shutil.rmtree(options.folder)
    say("done")


if __name__ == "__main__":
    main()
