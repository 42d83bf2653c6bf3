"""Starts of servers and wall time of a job of many small tasks, with ``reuse_servers`` and without, in one run.

    python -m tests.bench.warm_servers --tasks 20 --workers 2 --start-seconds 5

Each task asks a server for four answers. The server needs some seconds to start, as one that loads a model does. The
executor is a fresh process for each of the two jobs; its end, with no server left, is part of the time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner, LocalPipelineExecutor
from datatrove_ckpt.testing import outputs

ROOT = Path(__file__).parents[2]
_DOCUMENTS = 4  # of each task

SERVER = """
import http.server, json, os, pathlib, sys, time
with (pathlib.Path(__file__).parent / "starts").open("a") as starts:
    starts.write(f"{os.getpid()}\\n")
time.sleep(float(next(part for part in sys.argv if part.startswith("--start-seconds=")).partition("=")[2]))
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        self.answer({"choices": [{"message": {"content": f"answer to {asked}"}, "finish_reason": "stop"}], "usage": {}})
    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


async def ask(document: Document, generate: Any) -> Any:
    return await generate({"messages": [{"role": "user", "content": document.text}]})


def run_job(folder: Path, tasks: int, workers: int, start_seconds: float, reuse: bool) -> None:
    """One job, in this process."""
    flags = {"server_script": str(folder / "server.py"), "start-seconds": start_seconds}
    config = InferenceConfig("custom", "m", model_kwargs=flags, reuse_servers=reuse)
    writer = JsonlWriter(str(folder / "output"), "${rank}_${chunk_index}.jsonl", compression=None)
    step = InferenceRunner(ask, config, writer, checkpoints_local_dir=str(folder / "checkpoints"))
    reader = JsonlReader(str(folder / "input"), add_file_path=False)
    LocalPipelineExecutor([reader, step], tasks=tasks, workers=workers, logging_dir=str(folder / "logs")).run()


def measure(folder: Path, tasks: int, workers: int, start_seconds: float, reuse: bool) -> tuple[int, float]:
    """How many servers a job in a fresh process started, and its seconds.

    Raises:
        SystemExit: the job failed, or left a server.
    """
    (folder / "input").mkdir(parents=True)
    for task in range(tasks):
        rows = [{"text": f"{task}-{index}", "id": f"{task}-{index}"} for index in range(_DOCUMENTS)]
        (folder / "input" / f"{task:04d}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "server.py").write_text(SERVER)
    command = [sys.executable, "-m", "tests.bench.warm_servers", "--tasks", str(tasks), "--workers", str(workers)]
    command += ["--start-seconds", str(start_seconds), "--job", str(folder), *([] if reuse else ["--cold"])]
    began = time.monotonic()
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{process.stderr}\nThe job failed with exit code {process.returncode}.")
    servers = (folder / "starts").read_text().split()
    while left := [pid for pid in servers if Path("/proc", pid).exists()]:
        if time.monotonic() - began > 600:
            raise SystemExit(f"The job left servers: {left}")
        time.sleep(0.01)
    return len(servers), time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start-seconds", type=float, default=5.0)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = (given.tasks, given.workers, given.start_seconds)
    if given.job is not None:
        return run_job(given.job, *shape, reuse=not given.cold)
    with tempfile.TemporaryDirectory() as temporary:
        found = {}
        for name, reuse in (("reuse_servers: false", False), ("reuse_servers: true", True)):
            found[name] = measure(Path(temporary, str(reuse)), *shape, reuse)
        equal = outputs(Path(temporary, "True/output")) == outputs(Path(temporary, "False/output"))
    print(f"{given.tasks} tasks, {given.workers} workers, a server needs {given.start_seconds:g} s to start\n")
    print("| | servers started | seconds |\n|---|---|---|")
    for name, (starts, seconds) in found.items():
        print(f"| {name} | {starts} | {seconds:.1f} |")
    print(f"\noutputs are {'equal' if equal else 'DIFFERENT'}")
    return None if equal else sys.exit(1)


if __name__ == "__main__":
    main()
