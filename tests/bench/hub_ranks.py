"""The ranks of ``tests.bench.hub``: one process each, forked from one that has all imports, so that 100 fit in memory.

    python -m tests.bench.hub_ranks '{"system": "ours", "ranks": 100, ...}'

Each rank runs its step as an executor's task does, and leaves ``results/RANK.json``.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datatrove_ckpt.output.hub_pace import CommitPace, History

_MODULES = {"ours": "datatrove_ckpt.runner", "datatrove": "datatrove.pipeline.inference.run_inference"}
SYSTEMS = tuple(_MODULES)
DOCUMENTS = 4
"""Of a chunk."""


@dataclass(frozen=True)
class Job:
    """What the ranks do. ``chunk_seconds`` and ``commit_seconds`` are the hub's: ``speed`` of them in a real one."""

    system: str
    ranks: int
    chunks: int
    output: str
    server: str
    folder: str
    chunk_seconds: float
    commit_seconds: float
    speed: float

    def path(self, *parts: str) -> Path:
        return Path(self.folder, *parts)


def expected(ranks: int, chunks: int) -> Iterator[str]:
    """The ids of all documents."""
    return (f"{rank}-{number}" for rank in range(ranks) for number in range(chunks * DOCUMENTS))


def _documents(job: Job, rank: int) -> Iterator[Any]:
    """Each knows how long it takes: half as long to half as long again as the others."""
    from datatrove.data import Document

    chance = random.Random(rank)
    for name in expected(job.ranks, job.chunks):
        if name.startswith(f"{rank}-"):
            pause = chance.uniform(0.5, 1.5) * job.chunk_seconds / job.speed / DOCUMENTS
            yield Document(f"text of {name}", name, metadata={"pause": pause})


async def ask(document: Any, generate: Callable[[dict[str, Any]], Any]) -> Any:
    """The rollout."""
    await asyncio.sleep(document.metadata["pause"])
    return await generate({"messages": [{"role": "user", "content": document.text}]})


def _step(job: Job, rank: int) -> Any:
    from datatrove.pipeline.writers import ParquetWriter

    writer = ParquetWriter(job.output, "${rank}_${chunk_index}.parquet", max_file_size=-1)
    more: dict[str, Any] = {}
    if job.system == "ours":
        from datatrove_ckpt import InferenceConfig, InferenceRunner

        more["hub_commit_seconds"] = job.commit_seconds / job.speed
        _hurry(job.speed)
    else:
        from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner

        writer.HF_BASE_DELAY /= job.speed  # its 12 retries within four minutes, of the hub's

    # One request at a time: chunks end one after another, a ``chunk_seconds`` apart, as a GPU's do.
    config = InferenceConfig(
        server_type="endpoint", model_name_or_path="fake", endpoint_url=job.server, max_concurrent_generations=1
    )
    checkpoints = str(job.path("checkpoints"))
    return InferenceRunner(ask, config, writer, checkpoints_local_dir=checkpoints, records_per_chunk=DOCUMENTS, **more)


def _hurry(speed: float) -> None:
    """Ranks wait for their turn by the hub's clock."""
    from datatrove_ckpt.output.hub_pace import CommitPace

    by_its_clock = CommitPace.seconds_until_turn

    def seconds_until_turn(pace: CommitPace, history: History, waited: int = 0, ends: bool = False) -> float:
        return by_its_clock(pace, history, waited, ends) / speed

    CommitPace.seconds_until_turn = seconds_until_turn  # type: ignore[method-assign]


def _run_rank(job: Job, rank: int) -> dict[str, Any]:
    began = time.monotonic()
    error = ""
    try:
        _step(job, rank).run(_documents(job, rank), rank, job.ranks)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        traceback.print_exc()
    return {"rank": rank, "error": error, "seconds": time.monotonic() - began}


def _end_with_parent() -> None:
    """Linux ends this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _fork(job: Job, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    _end_with_parent()
    code = 1
    try:
        log = os.open(job.path("logs", f"{rank:05d}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        result = _run_rank(job, rank)
        job.path("results", f"{rank:05d}.json").write_text(json.dumps(result))
        code = 1 if result["error"] else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError


def main() -> None:
    _end_with_parent()
    job = Job(**json.loads(sys.argv[1]))
    for name in ("logs", "results", "tmp"):
        job.path(name).mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(job.path("tmp"))
    modules = ["datatrove.pipeline.writers", "huggingface_hub.hf_api", "huggingface_hub.hf_file_system"]
    modules += ["pyarrow.parquet", _MODULES[job.system]]
    for module in modules:  # once, instead of in each rank
        import_module(module)
    pids = [_fork(job, rank) for rank in range(job.ranks)]
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
