"""The field's chain of jobs on a real Slurm of two nodes, against a fake hub, with a preemption in the middle.

    pytest tests/real/test_chain.py -s

prints the card's statistics beside the rows in the repository and the server's own count.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datatrove_ckpt.testing import FakeServer
from tests.hub import FakeHub
from tests.kept import until_kept
from tests.real import chain_job
from tests.real.cluster_job import HELD, IN_FLIGHT, counting_server
from tests.real.slurm_cluster import Cluster, until

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # it may install Slurm
ROWS = 24  # per task
SOURCE, TARGET = "org/source", "org/rewritten"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "slurm").mkdir()
    with Cluster(tmp_path / "slurm") as running:
        yield running


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with counting_server() as running:
        yield running


@pytest.fixture
def hub_with_input(hub: FakeHub) -> FakeHub:
    files = {}
    for task in range(chain_job.TASKS):
        rows = [{"id": f"{task} {row}", "text": f"document {task} {row} " + "x " * row} for row in range(ROWS)]
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=5)
        files[f"data/{task}.parquet"] = buffer.getvalue()
    hub.put(SOURCE, files)
    hub.create_repo(TARGET)
    return hub


class Chain:
    """The three jobs, from their submission to their end."""

    def __init__(self, cluster: Cluster, folder: Path, server: FakeServer) -> None:
        self.cluster, self.folder, self.server = cluster, folder, server
        self.array = self.monitor = self.card = ""

    def submit(self, hub: FakeHub) -> None:
        script = str(Path(chain_job.__file__))
        environment = self.cluster.environment() | hub.environment(self.folder / "huggingface")
        command = [sys.executable, script, str(self.folder), self.server.url, SOURCE, TARGET]
        done = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr
        self.array, self.monitor, self.card = done.stdout.split()[-3:]

    def preempt(self) -> None:
        """Once all requests are in flight that may be, a job above all others takes both nodes."""
        until(lambda: len(self.server.payloads) >= HELD + IN_FLIGHT * chain_job.TASKS, 300, self.describe)
        until_kept(self.folder / "checkpoints", HELD)
        high = ["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
        self.cluster.command(*high)
        logs = self.folder / "inference/slurm_logs"
        until(lambda: sum("SIGTERM" in log.read_text() for log in logs.iterdir()) == 2, 240, self.describe)
        self.server.release()

    def until_ended(self) -> None:
        jobs = [*(f"{self.array}_{index}" for index in range(chain_job.TASKS)), self.monitor + "_0", self.card + "_0"]
        for job in jobs:
            until(
                lambda job=job: self.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 400, self.describe
            )
            assert self.state(job) == "COMPLETED", f"{job} of {jobs}: {self.state(job)}\n{self.describe()}"

    def state(self, job: str) -> str:
        return self.cluster.show("job", job).get("JobState", "")

    def describe(self) -> str:
        logs = sorted(path for path in self.folder.rglob("*.out") if "huggingface" not in path.parts)
        texts = [f"--- {path.relative_to(self.folder)}\n{path.read_text()[-4000:]}" for path in logs]
        queue = self.cluster.command("squeue", "-o", "%i %j %T %r %R")
        return "\n".join([f"{len(self.server.payloads)} requests", queue, *texts])


def rows_in_footers(hub: FakeHub) -> int:
    found = hub.files(TARGET)
    return sum(
        pq.read_metadata(io.BytesIO(content)).num_rows for name, content in found.items() if name.endswith(".parquet")
    )


def of_card(card: str) -> dict[str, str]:
    """The table of the card's statistics."""
    return dict(re.findall(r"^\| ([A-Z][^|]+?) \| ([^|]+?) \|$", card, re.MULTILINE))


def test_the_card_after_a_preempted_array_has_the_numbers_of_the_repository_and_of_the_server(
    cluster: Cluster, tmp_path: Path, server: FakeServer, hub_with_input: FakeHub
) -> None:
    hub, documents = hub_with_input, chain_job.TASKS * ROWS
    chain = Chain(cluster, tmp_path, server)
    chain.submit(hub)
    chain.preempt()
    chain.until_ended()

    assert rows_in_footers(hub) == documents
    assert set(server.asked.values()) == {1}, "asked again"
    assert len(server.asked) == documents
    prompt = sum(len(question.split()) for question in server.asked)
    completion = prompt + 2 * documents  # "answer to " and the question
    stats: list[dict[str, Any]] = [
        entry["stats"] for entry in json.loads((tmp_path / "inference/stats.json").read_text())
    ]
    assert stats[0]["documents"]["total"] == documents
    assert [stats[1][name]["total"] for name in ("prompt_tokens", "completion_tokens")] == [prompt, completion]
    readme = hub.files(TARGET)["README.md"].decode()
    card = of_card(readme)
    print(
        f"\ncard {card}; {rows_in_footers(hub)} rows in the repository; {len(server.payloads)} requests at the server"
    )
    print(f"{len(hub.commits(TARGET))} commits of {len(hub.files(TARGET))} files")
    assert card["Documents processed"] == str(documents)
    assert card["Total prompt tokens"] == f"{prompt:,}"
    assert card["Total completion tokens"] == f"{completion:,}"
    watched = "".join(log.read_text() for log in (tmp_path / "monitor/slurm_logs").iterdir())
    assert f"/{documents} documents" in watched, watched  # it saw the job at work
    assert "restarts=1" in " ".join(
        f"{key.lower()}={value}" for key, value in cluster.show("job", f"{chain.array}_0").items()
    )
