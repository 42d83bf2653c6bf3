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

    def __init__(self, jobs: Jobs, ways: list[str], apart: int, seconds: float = 0.02) -> None:
        self.jobs, self.again, self.done = jobs, Counter[str](), Counter[str]()
        self._ways, self._apart, self._seconds = ways, apart, seconds
        self._answers, self._last = 0, dict[str, Job | None]()
        self._lock = threading.Lock()

    def delay(self, payload: dict[str, Any], times: int) -> float:
        question = payload["messages"][-1]["content"]
        job = self.jobs.of(int(question.split()[1]))
        if question in self._last:
            before = self._last[question]
            self.again[before.ended_by if before else "?"] += 1
        self._last[question] = job
        return self._seconds

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
        write_job(hub, server.url, 4, 12, tasks_per_job=2, max_retries=0)
        said = command("run", "job.yaml", code=None)
        assert said.code == 0, said + "\n".join(job.log for job in jobs.all)
        assert ends.done == {"kill": 1, "evict": 1}
        assert len(ids_of(written(hub))) == len({*ids_of(written(hub))}) == 48
        assert not ends.again["evict"]
        assert "48 of 48 documents" in said.out
        assert "hf://buckets/someone/runs/run/logs/checkpoints" in command("verify", "job.yaml", "--full")
    for name, data in hub.files(BUCKET, kind="bucket").items():
        assert KEY.encode() not in data, name
        assert hub.token.encode() not in data, name
    for job in jobs.all:
        assert KEY not in json.dumps({**job.spec, "secrets": None}) + job.log
