"""A run to report of: ranks in processes of their own, killed three times, one of them slow, some requests refused.

    python -m tests.real.report_job FOLDER [--documents N] [--tasks N] [--unfinished]

also writes the report, and pictures of it: FOLDER/report.html, light.png, dark.png, print.png, phone.png. A minute of
the history is half a second long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from datatrove_ckpt.testing import FakeServer
from tests.real.chromium import Chromium, install

KILLS = 3
SLOW = 2  # the rank whose documents take seven times as long
_ROLLOUT = """\
from datatrove_ckpt.generation import rank_history

rank_history.MINUTE_SECONDS = 0.5


async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})
"""


def make_job(folder: Path, url: str, tasks: int, documents: int) -> Path:
    """Writes input, rollout and configuration. Returns the YAML file."""
    (folder / "input").mkdir(parents=True)
    (folder / "half_seconds.py").write_text(_ROLLOUT)
    for task in range(tasks):
        kind = "slow" if task == SLOW else "fast"
        kinds = {3: "bad", 5: "busy"}
        texts = [
            f"{kinds.get(number % 40, kind)} {task} {number} {'word ' * (number % 90)}" for number in range(documents)
        ]
        rows = [{"id": f"{task} <b>{number}</b>", "text": text} for number, text in enumerate(texts)]
        (folder / "input" / f"{task:02d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "server_type": "endpoint",
        "model_name_or_path": "fake",
        "endpoint_url": url,
        "max_concurrent_generations": 4,
    }
    runner: dict[str, Any] = {
        "rollout_fn": "half_seconds.rollout",
        "config": config | {"max_concurrent_generations": 4},
        "output_writer": {"class_path": "JsonlWriter", "init_args": {
            "output_folder": str(folder / "output"),
            "output_filename": "${rank}_${chunk_index}.jsonl",
            "compression": None,
        }},
        "checkpoints_local_dir": str(folder / "checkpoints"),
        "records_per_chunk": 10,
        "skip_bad_requests": True,
    }  # fmt: skip
    executor = {
        "pipeline": [
            {"class_path": "JsonlReader", "init_args": {"data_folder": str(folder / "input")}},
            {"class_path": "InferenceRunner", "init_args": runner},
        ],
        "tasks": tasks,
        "workers": tasks,
        "logging_dir": str(folder / "logs"),
    }
    job = folder / "job.yaml"
    content = {"executor": {"class_path": "LocalPipelineExecutor", "init_args": executor}}
    job.write_text(yaml.safe_dump(content))
    return job


class Endpoint(FakeServer):
    """Answers slowly to one rank, refuses some documents, and is busy at the first request of others."""

    def __init__(self) -> None:
        super().__init__(delay=self._seconds, status=self._refusal)

    def _seconds(self, payload: Any, times: int) -> float:
        text = payload["messages"][-1]["content"]
        return 1.5 if text.startswith("slow") else 0.1 + len(text) % 10 / 50

    def _refusal(self, payload: Any, times: int) -> int | None:
        text = payload["messages"][-1]["content"]
        return 400 if text.startswith("bad") else 503 if text.startswith("busy") and not times else None


def run_and_kill(folder: Path, server: Endpoint, tasks: int, documents: int, unfinished: bool = False) -> Path:
    """Runs the job with three kills, and then to its end, or nearly. Returns the YAML file."""
    job = make_job(folder, server.url, tasks, documents)
    whole = tasks * documents
    for number in range(KILLS + 1):
        process = subprocess.Popen(
            [sys.executable, "-m", "datatrove_ckpt", "run", str(job)],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if number < KILLS or unfinished:
            asked = len(server.payloads) + whole // (KILLS + 3)
            while len(server.payloads) < asked:
                assert process.poll() is None, "the job has ended before its time"
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        else:
            assert process.wait() == 0
    return job


async def take_pictures(folder: Path) -> None:
    """Of folder/report.html."""
    looks: dict[str, dict[str, Any]] = {"light": {}, "dark": {"dark": True}, "phone": {"width": 400}}
    with tempfile.TemporaryDirectory() as profile:
        async with Chromium(Path(profile)) as browser:
            for name, look in {**looks, "print": {"width": 760, "media": "print"}}.items():
                await browser.open(folder / "report.html", **look)
                (folder / f"{name}.png").write_bytes(await browser.picture())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=150)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--unfinished", action="store_true")
    given = parser.parse_args()
    with Endpoint() as server:
        job = run_and_kill(given.folder, server, given.tasks, given.documents, given.unfinished)
    report = str(given.folder / "report.html")
    prices = ["--price-per-gpu-hour=2.50", "--price-per-million-tokens=0.15,0.60"]
    subprocess.run([sys.executable, "-m", "datatrove_ckpt", "report", str(job), "-o", report, *prices], check=True)
    install()
    asyncio.run(take_pictures(given.folder))


if __name__ == "__main__":
    main()
