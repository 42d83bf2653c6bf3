"""What each signal leaves behind: ``python -m tests.bench.signals --tries 20``.

A real job, with four workers or one, gets a signal at a random moment: the process that was started, its process
group, one worker, or the fork server. Five seconds after the job has ended, no process of it may be left. Then the
same command runs again; the output must be that of a job that nothing interrupted, and after a drain no question may
be asked twice. Each line of the table is a signal. Processes are found by a variable in their environment, because
servers have sessions of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from datatrove_ckpt.inference.servers.guardian import process_table
from datatrove_ckpt.testing import FakeServer, outputs

_MARK = "SIGNALS_TRY"
_LEFT_AFTER = 5.0  # seconds
_DOCUMENTS = 10  # of each task
JOB = """
import os, sys
import datatrove.executor
import datatrove_ckpt
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt.readers import JsonlReader

async def ask(document, generate):
    with open(f"pids/{document.id.split()[0]}", "w") as file:
        file.write(str(os.getpid()))
    return (await generate({"messages": [{"role": "user", "content": document.text}]})).text

def main():
    url, executor, workers = sys.argv[1:]
    server = {"server_type": "endpoint", "endpoint_url": url} if url else {"server_type": "dummy"}
    runner = datatrove_ckpt.InferenceRunner(
        ask,
        datatrove_ckpt.InferenceConfig(model_name_or_path="m", max_concurrent_generations=3, **server),
        JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir="checkpoints",
        records_per_chunk=4,
    )
    pipeline = [JsonlReader("input", add_file_path=False), runner]
    package = datatrove_ckpt if executor == "ours" else datatrove.executor
    package.LocalPipelineExecutor(pipeline, tasks=4, workers=int(workers), logging_dir="logs").run()

if __name__ == "__main__":
    main()
"""


class Row(NamedTuple):
    """One line of the table. ``server`` is a launched one, whose questions nobody counts."""

    executor: str
    workers: int
    target: str
    number: signal.Signals
    times: int = 1
    server: bool = False

    @property
    def drains(self) -> bool:
        """Whether nothing may be asked twice."""
        drained = self.number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        promised = self.executor == "ours" or self.workers == 1
        return drained and promised and self.times == 1 and self.target != "fork server" and not self.server


class Try(NamedTuple):
    """How one try ended. ``again`` is None where questions are not counted."""

    code: int
    seconds: float
    left: int
    again: int | None
    equal: bool


def rows() -> Iterator[Row]:
    asks = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
    for workers in (4, 1):
        for number in [*asks, signal.SIGQUIT, signal.SIGUSR2, signal.SIGKILL]:
            yield Row("ours", workers, "parent", number)
        for number in [*asks[:3], signal.SIGKILL]:
            yield Row("ours", workers, "group", number)
        yield Row("ours", workers, "parent", signal.SIGINT, times=2)
        for number in [signal.SIGTERM, signal.SIGQUIT, signal.SIGKILL]:
            yield Row("ours", workers, "parent", number, server=True)
    for number in [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]:
        yield Row("ours", 4, "worker", number)
    yield Row("ours", 4, "worker", signal.SIGKILL, server=True)
    for number in [signal.SIGTERM, signal.SIGKILL]:
        yield Row("ours", 4, "fork server", number)
    for number in [*asks, signal.SIGQUIT, signal.SIGKILL]:
        yield Row("datatrove's", 1, "parent", number)


def processes(mark: str) -> list[int]:
    """Those that have the mark in their environment, and have not ended."""
    found = []
    for process in process_table():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if not process.zombie and f"{_MARK}={mark}\0".encode() in environment + b"\0":
            found.append(process.pid)
    return found


class Folder:
    """One try's job."""

    def __init__(self, folder: Path, row: Row) -> None:
        self.folder, self.row = folder, row
        for name in ("input", "pids"):
            (folder / name).mkdir(parents=True)
        (folder / "job.py").write_text(JOB)
        for task in range(4):
            lines = [{"id": f"{task} {row}", "text": f"question {task} {row}"} for row in range(_DOCUMENTS)]
            (folder / "input" / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(self, url: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "job.py", "" if self.row.server else url, self.row.executor, str(self.row.workers)],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, _MARK: str(self.folder)},
            )

    def targets(self, process: subprocess.Popen[bytes]) -> int:
        """The process to signal; negative for a group."""
        if self.row.target == "worker":
            return int(random.choice(list((self.folder / "pids").iterdir())).read_text())
        if self.row.target == "fork server":
            forked = [other for other in process_table() if other.session == process.pid]
            with_name = {p.pid for p in forked if b"forkserver" in Path(f"/proc/{p.pid}/cmdline").read_bytes()}
            return next(other.parent for other in forked if other.pid in with_name and other.parent in with_name)
        return -process.pid if self.row.target == "group" else process.pid

    def until_it_runs(self) -> None:
        """Until documents are in work, and then a random moment."""
        deadline = time.monotonic() + 60
        while not any(path.read_text() for path in (self.folder / "pids").iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 0.8))


def attempt(row: Row, expected: dict[str, bytes]) -> Try:
    folder = Path(tempfile.mkdtemp(prefix="signals-"))
    job = Folder(folder / "job", row)
    with FakeServer(answer, delay=lambda payload, times: random.uniform(0.05, 0.3)) as server:
        process = job.start(server.url)
        job.until_it_runs()
        began = time.monotonic()
        for number in range(row.times):
            time.sleep(1.2 if number else 0.0)
            if process.poll() is None:
                target = job.targets(process)
                os.killpg(-target, row.number) if target < 0 else os.kill(target, row.number)
        code = process.wait(timeout=120)
        seconds = time.monotonic() - began
        deadline = time.monotonic() + _LEFT_AFTER
        while processes(str(job.folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = processes(str(job.folder))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        again = job.start(server.url)
        assert again.wait(timeout=120) == 0, (folder / "job" / "log").read_text()
        twice = sum(count - 1 for count in server.asked.values())
    written = outputs(job.folder / "output")
    equal = row.server or written == expected
    shutil.rmtree(folder)
    return Try(code, seconds, len(left), twice if row.drains else None, equal)


def answer(payload: dict[str, object], times: int) -> str:
    messages = payload["messages"]
    assert isinstance(messages, list)
    return f"answer to {messages[-1]['content']}"


def undisturbed() -> dict[str, bytes]:
    folder = Path(tempfile.mkdtemp(prefix="signals-"))
    job = Folder(folder / "job", Row("ours", 1, "parent", signal.SIGTERM))
    with FakeServer(answer) as server:
        assert job.start(server.url).wait(timeout=120) == 0, (folder / "job" / "log").read_text()
    written = outputs(job.folder / "output")
    shutil.rmtree(folder)
    return written


def line(row: Row, tries: list[Try]) -> str:
    signalled = f"{row.times} x {row.number.name}" if row.times > 1 else row.number.name
    job = f"{row.executor}, {row.workers}" + (", launched servers" if row.server else "")
    codes = ", ".join(str(code) for code in sorted({one.code for one in tries}))
    twice = [one.again for one in tries if one.again is not None]
    return (
        f"| {job} | {signalled} to the {row.target} | {len(tries)} | {codes} | "
        f"{statistics.median(one.seconds for one in tries):.1f} / {max(one.seconds for one in tries):.1f} | "
        f"{sum(one.left for one in tries)} | {sum(twice) if twice else '-'} | "
        f"{sum(one.equal for one in tries)} |"
    )


def main() -> int:
    """Prints the table. Exit code 1: a process was left, a question asked twice after a drain, or output differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1)))
    parser.add_argument("--only", default="", help='part of a line, such as "ours, 4" or SIGKILL')
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        # nohup and a shell's & ignore them, and jobs would inherit that.
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    expected, bad = undisturbed(), 0
    print("| executor, workers | signal | tries | exit codes | seconds, median / most | left | asked twice | equal |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in rows():
            if options.only not in line(row, [Try(0, 0.0, 0, 0, True)]):
                continue
            tries = list(pool.map(lambda _, row=row: attempt(row, expected), range(options.tries)))
            print(line(row, tries), flush=True)
            bad += sum(one.left + (one.again or 0) + (not one.equal) for one in tries)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
