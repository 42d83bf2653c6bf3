"""What ``reshard`` costs and gains: python -m tests.bench.reshard ranks [N] | stragglers [--seconds S]

``ranks``: N tasks have started, each with a chunk that is committed and one that is open. Dealt out to one task more,
which cuts through nearly every file, and to a tenth. ``stragglers``: two of four tasks have ten times the documents.
The run is stopped after half of its time and goes on with eight tasks, and is compared with one that nobody stops. Each
task has four requests in flight, and each request takes S seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.checkpoint.lines import read_lines, seal
from datatrove_ckpt.documents import fingerprint
from datatrove_ckpt.generation.as_read import as_read
from datatrove_ckpt.preflight.reshard.run import reshard
from datatrove_ckpt.readers import JsonlReader, position_state
from datatrove_ckpt.testing import FakeServer
from tests.jobs import runner

COMMAND = [sys.executable, "-m", "datatrove_ckpt"]
JOB = """executor:
  class_path: LocalPipelineExecutor
  init_args:
    tasks: 4
    logging_dir: {folder}/logs
    pipeline:
      - class_path: JsonlReader
        init_args: {{data_folder: {input}}}
      - class_path: InferenceRunner
        init_args:
          rollout_fn: {{class_path: PromptRollout, init_args: {{prompt: "{{text}}"}}}}
          config:
            server_type: endpoint
            model_name_or_path: fake
            endpoint_url: {url}
            max_concurrent_generations: 4
          output_writer:
            class_path: JsonlWriter
            init_args: {{output_folder: {folder}/output, output_filename: "${{rank}}_${{chunk_index}}.jsonl"}}
          checkpoints_local_dir: {folder}/checkpoints
          records_per_chunk: 20
"""


def write_input(folder: Path, sizes: Sequence[int], length: int = 300) -> None:
    folder.mkdir(parents=True)
    for file, size in enumerate(sizes):
        rows = [{"id": f"{file}-{n}", "text": f"text {file}-{n} {'w' * length}"} for n in range(size)]
        (folder / f"{file:05d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure_ranks(tasks: int) -> None:
    def number(payload: dict[str, Any]) -> int:
        return int(payload["messages"][-1]["content"].split()[1].partition("-")[2])

    def status(payload: dict[str, Any], times: int) -> int | None:
        return 400 if number(payload) == 6 else None

    def delay(payload: dict[str, Any], times: int) -> float:
        return 1.0 if number(payload) >= 6 else 0.0

    logger.remove()
    with tempfile.TemporaryDirectory() as place, FakeServer(status=status, delay=delay) as server:
        folder = Path(place)
        write_input(folder / "input", [24] * tasks)
        reader, step = executor(folder, server, tasks).pipeline
        with suppress(Exception):  # the seventh document fails
            step(reader(None, 0, tasks), 0, tasks)
        for rank in range(1, tasks):
            copy_rank(folder, rank, list(JsonlReader(str(folder / "input"))(None, rank, tasks)))
        for after, dry_run in ((tasks + 1, True), (tasks // 10, False)):
            began = time.perf_counter()
            found = reshard(executor(folder, server, tasks), after, dry_run)
            seconds = time.perf_counter() - began
            print(
                f"{tasks} -> {after}{' (dry run)' if dry_run else ''}: {seconds:.1f} s, {found.documents} finished "
                f"documents, {found.answers} answers, {found.moved_documents} documents moved, {found.cuts} cuts",
                flush=True,
            )


def copy_rank(folder: Path, rank: int, documents: list[Document]) -> None:
    """Writes what task 0 has on the disk as another task's, with that one's documents: a thousand take seconds."""
    root = folder / "checkpoints"
    own = layout.rank_folder(root, rank)
    shutil.copytree(layout.rank_folder(root, 0), own)
    shutil.copy(layout.last_chunk_file(root, 0), layout.last_chunk_file(root, rank))
    inputs = [fingerprint(as_read(document).data) for document in documents]
    lines = []
    for commit in read_commits(own / layout.COMMITS).values():
        files = [replace(file, path=file.path.replace("00000_", f"{rank:05d}_", 1)) for file in commit.files]
        for old, new in zip(commit.files, files, strict=True):
            shutil.copy(folder / "output" / old.path, folder / "output" / new.path)
        last = commit.next_ordinal - 1
        position = position_state(documents[last])
        lines.append(seal(replace(commit, files=files, last_input=inputs[last], position=position).to_json()))
    (own / layout.COMMITS).write_bytes(b"".join(lines))
    for index in layout.journal_indices(own):
        path = layout.journal_path(own, index)
        found = [Finished.from_body(line.body) for line in read_lines(path)]
        path.write_bytes(b"".join(replace(one, fingerprint=inputs[one.ordinal]).to_line() for one in found))


def executor(folder: Path, server: FakeServer, tasks: int) -> LocalPipelineExecutor:
    step = runner(folder, server, records_per_chunk=4, config={"max_concurrent_generations": 4})
    return LocalPipelineExecutor(
        [JsonlReader(str(folder / "input")), step], tasks=tasks, logging_dir=str(folder / "logs")
    )


def measure_stragglers(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as place, FakeServer(delay=lambda payload, times: seconds) as server:
        write_input(Path(place) / "input", [60, 600, 60, 600])
        began = time.perf_counter()
        subprocess.run([*COMMAND, "run", job(place, "whole", server)], check=True, stderr=subprocess.DEVNULL)
        alone = time.perf_counter() - began
        print(f"4 tasks to the end: {alone:.1f} s", flush=True)
        asked, name = sum(server.asked.values()), job(place, "dealt", server)
        began = time.perf_counter()
        with subprocess.Popen([*COMMAND, "run", name], stderr=subprocess.DEVNULL) as run:
            time.sleep(alone / 2)
            run.send_signal(signal.SIGTERM)
        stopped = time.perf_counter() - began
        subprocess.run([*COMMAND, "reshard", name, "--tasks", "8"], check=True)
        dealt = time.perf_counter() - began
        subprocess.run([*COMMAND, "run", name, "--executor.tasks=8"], check=True, stderr=subprocess.DEVNULL)
        total = time.perf_counter() - began
        print(f"stopped after {stopped:.1f} s, dealt out after {dealt:.1f} s, done after {total:.1f} s")
        print(f"requests: {asked} and {sum(server.asked.values()) - asked} for {60 * 2 + 600 * 2} documents")


def job(place: str, name: str, server: FakeServer) -> str:
    path = Path(place, f"{name}.yaml")
    path.write_text(JOB.format(folder=f"{place}/{name}", input=f"{place}/input", url=server.url))
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="What reshard costs and gains.")
    parser.add_argument("what", choices=["ranks", "stragglers"])
    parser.add_argument("tasks", nargs="?", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0.5, help="that each request takes")
    given = parser.parse_args()
    measure_ranks(given.tasks) if given.what == "ranks" else measure_stragglers(given.seconds)


if __name__ == "__main__":
    main()
