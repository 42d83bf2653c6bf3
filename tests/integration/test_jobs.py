"""Hugging Face Jobs that are killed, evicted and reach their timeouts, against the real client of the hub.

``tests/hub/jobs.py`` plays the service: each job is a process with an empty disk. Input, output, logs and mirror are in
a bucket of the fake hub.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from datatrove_ckpt.testing import FakeServer
from tests.commands import Command
from tests.hub import FakeHub
from tests.hub.jobs import Job, Jobs
from tests.yaml_jobs import ENDPOINT, job_yaml

BUCKET = "someone/runs"
IN_FLIGHT = 4
MIRROR_SECONDS = 0.5
TIMEOUT = 100  # seconds; the drain begins 31 s before its end
ROLLOUT = """
import datatrove_ckpt

async def rollout(document, generate):
    assert "/tmp/datatrove-ckpt-" in datatrove_ckpt.__file__, datatrove_ckpt.__file__
    return await generate({"messages": [{"role": "user", "content": document.text}]})
"""
KEY = "a-key-of-the-endpoint-6f1d0c"


@pytest.fixture
def jobs(hub: FakeHub, tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(hub, tmp_path / "jobs")
    yield jobs
    jobs.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "jobs_rollout", raising=False)
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "jobs_rollout.py").write_text(ROLLOUT)
    monkeypatch.chdir(folder)
    return folder


def write_job(hub: FakeHub, url: str, ranks: int, documents: int, run: str = "run", **settings: object) -> None:
    """job.yaml, and its input in the bucket."""
    rows = {
        f"input/{rank:05d}.jsonl": "".join(
            json.dumps({"id": f"{rank} {n}", "text": f"document {rank} {n}"}) + "\n" for n in range(documents)
        ).encode()
        for rank in range(ranks)
    }
    if ("bucket", BUCKET) not in hub.repos:
        hub.put(BUCKET, rows, kind="bucket")
    config = f"{ENDPOINT.replace('URL', url)}, max_concurrent_generations: {IN_FLIGHT}, api_key_env: ENDPOINT_KEY"
    base = f"hf://buckets/{BUCKET}"
    text = job_yaml(config, ranks, f"{base}/input", f"{base}/{run}/output", "jobs_rollout.rollout")
    content = yaml.safe_load(text)
    arguments = content["executor"]["init_args"]
    content["executor"]["class_path"] = "JobsPipelineExecutor"
    del arguments["workers"]
    arguments |= {"logging_dir": f"{base}/{run}/logs", "poll_interval": 0.1, **settings}
    arguments["pipeline"][1]["init_args"] |= {"mirror_seconds": MIRROR_SECONDS, "records_per_chunk": 5}
    Path("job.yaml").write_text(yaml.safe_dump(content))


def written(hub: FakeHub, run: str = "run") -> dict[str, bytes]:
    below = f"{run}/output/"
    return {name.removeprefix(below): data for name, data in hub.files(BUCKET, kind="bucket").items() if below in name}


def ids_of(files: dict[str, bytes]) -> list[str]:
    return [json.loads(line)["id"] for data in files.values() for line in data.splitlines()]


def answer(payload: dict[str, Any], times: int) -> str:
    return f"answer to {payload['messages'][-1]['content']}"


class Ends:
    """For a server: ends the job that asks, so many answers after the last one, each time in the next way."""

    def __init__(
        self, jobs: Jobs, ways: list[str], apart: int, seconds: float = 0.02, stuck: set[str] | None = None
    ) -> None:
        self.jobs, self.again, self.done = jobs, Counter[str](), Counter[str]()
        self._ways, self._apart, self._seconds, self._stuck = ways, apart, seconds, stuck or set()
        self._answers, self._last = 0, dict[str, Job | None]()
        self._lock = threading.Lock()

    def delay(self, payload: dict[str, Any], times: int) -> float:
        question = payload["messages"][-1]["content"]
        job = self.jobs.of(int(question.split()[1]))
        if question in self._last:
            before = self._last[question]
            self.again[before.ended_by if before else "?"] += 1
        self._last[question] = job
        return self._seconds if times or question not in self._stuck else 600.0

    def answer(self, payload: dict[str, Any], times: int) -> str:
        with self._lock:
            self._answers += 1
            if self._ways and self._answers >= self._apart:
                job = self.jobs.of(int(payload["messages"][-1]["content"].split()[1]))
                if job is not None and job.end(self._ways[0], 0.0 if self._ways[0] == "kill" else 20.0):
                    self.done[self._ways.pop(0)] += 1
                    self._answers = 0
        return answer(payload, times)


def test_jobs_that_die_are_started_again_with_what_is_left(
    hub: FakeHub, jobs: Jobs, here: Path, command: Command
) -> None:
    ends = Ends(jobs, ["kill", "evict"], 12)
    with FakeServer(ends.answer, delay=ends.delay) as server:
        write_job(hub, server.url, 4, 12, tasks_per_job=2)
        said = command("run", "job.yaml", code=None)
        assert said.code == 0, said + "\n".join(job.log for job in jobs.all)
        assert ends.done == {"kill": 1, "evict": 1}
        assert len(ids_of(written(hub))) == len({*ids_of(written(hub))}) == 48
        assert not ends.again["evict"]
        assert "48 of 48 documents" in said.out
        assert "no problem: 4 ranks, 48 documents" in command("verify", "job.yaml", "--full")
    for name, data in hub.files(BUCKET, kind="bucket").items():
        assert KEY.encode() not in data, name
        assert hub.token.encode() not in data, name
    for job in jobs.all:
        assert KEY not in json.dumps({**job.spec, "secrets": None}) + job.log


@pytest.mark.slow
def test_a_hundred_ranks_with_killed_evicted_and_timed_out_jobs(
    hub: FakeHub, jobs: Jobs, here: Path, command: Command
) -> None:
    ranks, documents, kills, evictions = 100, 20, 20, 3
    ways = ["kill"] * kills + ["evict"] * evictions
    random.Random(31).shuffle(ways)
    stuck = {f"document {rank} 7" for rank in range(5, ranks, 20)}  # until its job has drained before its timeout
    ends = Ends(jobs, ways, 60, 0.25, stuck)
    with FakeServer(ends.answer, delay=ends.delay) as server:
        write_job(hub, server.url, ranks, documents, tasks_per_job=10, workers=10, timeout=TIMEOUT, max_retries=3)
        said = command("run", "job.yaml", "--pipeline.1.drain_seconds=1", code=None)
        assert said.code == 0, said + jobs.all[-1].log
        asked = server.asked
    repeated = asked.total() - len(asked)
    timed_out = [job for job in jobs.all if "the end of the job's time limit" in job.log and not job.ended_by]
    bucket = hub.repos["bucket", BUCKET]
    size = sum(len(bucket.blobs[one]) for one in bucket.uploads)
    print(
        f"{ranks} ranks in {len(jobs.all)} jobs: {ends.done}, {len(timed_out)} drained before their timeout, "
        f"{jobs.ends}. {len(asked)} questions, {repeated} asked again ({ends.again}), "
        f"{ends.again['kill'] / kills:.1f} per kill. Uploaded: {len(bucket.uploads)} objects, {size} bytes, in "
        f"{len(hub.asked('batch'))} batches."
    )
    assert ends.done == {"kill": kills, "evict": evictions}
    assert len(timed_out) >= len(stuck)
    assert not jobs.ends["timeout", "ERROR"]
    assert len(asked) == ranks * documents
    assert not ends.again["evict"]
    assert ends.again["kill"] <= kills * (IN_FLIGHT + MIRROR_SECONDS * 2 * IN_FLIGHT / 0.25)
    assert ends.again[""] <= len(timed_out) * IN_FLIGHT
    files = written(hub)
    assert len(ids_of(files)) == len({*ids_of(files)}) == ranks * documents
    command("verify", "job.yaml", "--full")
    with FakeServer(answer) as other:
        write_job(hub, other.url, ranks, documents, "calm")
        content = yaml.safe_load(Path("job.yaml").read_text())
        arguments = content["executor"]["init_args"]
        content["executor"] |= {"class_path": "LocalPipelineExecutor"}
        del arguments["poll_interval"]
        arguments |= {"workers": 1, "logging_dir": "logs"}
        arguments["pipeline"][1]["init_args"]["output_writer"]["init_args"]["output_folder"] = "output"
        Path("jobs_rollout.py").write_text(ROLLOUT.replace("    assert", "    # assert"))
        Path("job.yaml").write_text(yaml.safe_dump(content))
        sys.modules.pop("jobs_rollout")
        command("run", "job.yaml")
    assert {path.name: path.read_bytes() for path in Path("output").iterdir()} == files
