"""A job on a cluster: what its workers import, and its life as a test sees it.

Documents are asked about at a counting server in the test's process, which holds every request after the first few
until it is told to go on. So "in the middle" is an exact place: all requests that may be in flight are in flight.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer, outputs
from tests.real.slurm_cluster import Cluster, Watched, processes, until

DOCUMENTS = 24  # per task
IN_FLIGHT = 4  # per task
HELD = 10  # so many requests are answered, later ones wait
DRAIN_SECONDS = 3.0  # less than the cluster's KillWait
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

if os.environ.get("TEST_WITHOUT_LOCKS"):

    def _no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = _no_locks


async def rollout(document: Any, generate: Any) -> Any:
    return await generate({"messages": [{"role": "user", "content": document.text}]})


def answer(payload: dict[str, Any], times: int) -> str:
    return f"answer to {payload['messages'][-1]['content']}"


def counting_server(held: int = HELD) -> FakeServer:
    return FakeServer(answer, delay=lambda payload, times: 0.02, hold_after=held)


def make_input(folder: Path, tasks: int) -> Path:
    for task in range(tasks):
        rows = [{"id": f"{task} {n}", "text": f"document {task} {n}"} for n in range(DOCUMENTS)]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def pipeline(folder: Path, url: str, **settings: Any) -> list[Any]:
    """Reader and runner of the job in ``folder``: input/ there, and output/, checkpoints/, logs/ to come."""
    config = InferenceConfig("endpoint", "fake", endpoint_url=url, max_concurrent_generations=IN_FLIGHT)
    runner = InferenceRunner(
        rollout,
        settings.pop("config", config),
        JsonlWriter(str(folder / "output"), "${rank}_chunk_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir=str(folder / "checkpoints"),
        records_per_chunk=7,
        **{"drain_seconds": DRAIN_SECONDS, **settings},
    )
    return [JsonlReader(str(folder / "input"), add_file_path=False), runner]


class Job:
    """One job array, from its submission to its end.

    Attributes:
        lives: worker processes that were seen to run.
    """

    def __init__(self, cluster: Cluster, folder: Path, server: FakeServer, tasks: int = 1) -> None:
        self.cluster = cluster
        self.folder = folder
        self.server = server
        self.tasks = tasks
        self.id = ""
        make_input(folder / "input", tasks)

    def submit(self, **changes: Any) -> None:
        """Through datatrove, as a user does."""
        steps = pipeline(self.folder, self.server.url, **changes.pop("runner", {}))
        settings: dict[str, Any] = {"time": "00:10:00", "partition": "low", "qos": "", **changes}
        settings["sbatch_args"] = {"open-mode": "append", **settings.get("sbatch_args", {})}
        executor = SlurmPipelineExecutor(steps, self.tasks, logging_dir=str(self.folder / "logs"), **settings)
        executor.run()
        self.id = executor.job_id

    def state(self, index: int = 0) -> str:
        return self.cluster.show("job", f"{self.id}_{index}").get("JobState", "")

    def until_held(self, ranks: int | None = None) -> None:
        """Everything is in flight that may be."""
        expected = HELD + IN_FLIGHT * (self.tasks if ranks is None else ranks)
        until(lambda: self.asked() >= expected, 60, self.describe)

    def asked(self) -> int:
        return sum(self.server.asked.values())

    def workers(self, index: int = 0) -> list[Watched]:
        """The processes that run our code in an array task, one on each node."""

        def is_it(argv: list[str], environ: dict[str, str]) -> bool:
            mine = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
            program = argv[1] if len(argv) > 1 else ""
            return mine == (self.id, str(index)) and program.endswith("launch_pickled_pipeline")

        return [Watched(pid) for pid in until(lambda: processes(is_it), 30, self.describe)]

    def worker(self, index: int = 0) -> Watched:
        """The process that runs our code in an array task of one node."""
        (only,) = self.workers(index)
        return only

    def until_ended(self, *states: str, indices: int | None = None, seconds: float = 60) -> None:
        """Waits for the end of all array tasks, which is to be one of ``states``."""
        for index in range(self.tasks if indices is None else indices):
            until(lambda index=index: self.state(index) in ENDED, seconds, self.describe)
            assert self.state(index) in (states or ("COMPLETED",)), self.describe()

    def until_logged(self, text: str) -> None:
        """Waits for a line of any task, in any life."""
        logs = self.folder / "logs/slurm_logs"
        until(lambda: any(text in log.read_text() for log in logs.iterdir()), 60, self.describe)

    def is_complete(self, rank: int = 0) -> bool:
        """Marked complete by datatrove."""
        return (self.folder / f"logs/completions/{rank:05d}").exists()

    def describe(self) -> str:
        logs = [path for path in (self.folder / "logs").rglob("*") if path.suffix in (".out", ".log")]
        texts = [f"--- {path.relative_to(self.folder)}\n{path.read_text()[-5000:]}" for path in sorted(logs)]
        queue = self.cluster.command("squeue", "-o", "%i %T %r %R")
        return "\n".join([f"{self.asked()} requests", queue, str(self.cluster.show("job", f"{self.id}_0")), *texts])

    def check(self, event: str, lives: int, seconds: float | None = None, complete: str = "", at_most: int = 0) -> None:
        """The output is that of an undisturbed run, and so many requests were sent again; says it in a line."""
        assert outputs(self.folder / "output") == undisturbed(self.folder, self.tasks)
        assert all(map(self.is_complete, range(self.tasks))), self.describe()
        documents = self.tasks * DOCUMENTS
        again = self.asked() - documents
        took = "" if seconds is None else f"{seconds:.1f} s"
        print(f"\n| {event} | {lives} | {documents} | {again} | {took} | {complete or 'yes'} |", end="")
        assert len(self.server.asked) == documents
        assert 0 <= again <= at_most, self.describe()


def undisturbed(folder: Path, tasks: int) -> dict[str, bytes]:
    """The output of the same pipeline, with nothing in its way."""
    other = folder / "undisturbed"
    (other / "input").parent.mkdir()
    (other / "input").symlink_to(folder / "input")
    with FakeServer(answer) as server:
        reader, runner = pipeline(other, server.url)
        for rank in range(tasks):
            runner.run(reader.run(None, rank, tasks), rank, tasks)
    return outputs(other / "output")


class Stopwatch:
    """Seconds from an event to the end of a process."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def until_gone(self, process: Watched, seconds: float = 30) -> float:
        process.wait(seconds)
        return time.monotonic() - self._start
