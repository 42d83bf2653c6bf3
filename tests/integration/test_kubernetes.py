"""A Job of Kubernetes from its first pod to its last: evicted, lost with their nodes, wrong, broken.

``tests/kubernetes_loop.py`` plays the control loop from what ``datatrove-ckpt k8s`` prints. A folder, mounted as a
volume, plays the bucket with input, output, logs and mirror.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.testing import FakeServer, outputs
from tests.commands import Command
from tests.kubernetes_loop import Cluster, Pod
from tests.yaml_jobs import ENDPOINT, job_yaml, write_tasks

RANKS = 3
WORKERS = 3
IN_FLIGHT = 8
SETTINGS = """\
          checkpoints_remote_dir: BUCKET/mirror
          mirror_seconds: 0.02
          records_per_chunk: 7
kubernetes:
  image: an-image
  volumes: {bucket: BUCKET}
  backoff: 1
  workers: 3
"""
ROLLOUT = """
async def rollout(document, generate):
    first = await generate({"messages": [{"role": "user", "content": document.text}]})
    return [first, await generate({"messages": [{"role": "user", "content": document.text + " again"}]})]
"""


class Job:
    """The job, in ``folder/here``; its bucket is ``folder/bucket``."""

    def __init__(self, folder: Path, url: str, documents: int) -> None:
        self.bucket, here = folder / "bucket", folder / "here"
        here.mkdir()
        write_tasks(self.bucket, RANKS, documents)
        (here / "k8s_rollout").mkdir()
        (here / "k8s_rollout/__init__.py").write_text(ROLLOUT)
        config = f"{ENDPOINT.replace('URL', url)}, max_concurrent_generations: {IN_FLIGHT}"
        config += ", server_patience_seconds: 0.2"
        text = job_yaml(config, RANKS, "BUCKET/input", "BUCKET/output", "k8s_rollout.rollout")
        text = text.replace("logging_dir: logs", "logging_dir: BUCKET/logs") + SETTINGS
        (here / "job.yaml").write_text(text.replace("BUCKET", str(self.bucket)))
        self.questions = {
            f"document {r} {n}{end}" for r in range(RANKS) for n in range(documents) for end in ("", " again")
        }
        self.documents = documents
        self._folder = folder

    def manifests(self, command: Command, *changes: str) -> str:
        return command("k8s", "job.yaml", *changes).out

    def undisturbed(self, command: Command) -> dict[str, bytes]:
        """The output of a run of all ranks in this process, without pods."""
        other = self._folder / "undisturbed"
        moved = {
            "--executor.logging_dir": "logs",
            "--pipeline.1.output_writer.output_folder": "output",
            "--pipeline.1.checkpoints_remote_dir": "mirror",
            "--pipeline.1.checkpoints_local_dir": "checkpoints",
        }
        command("run", "job.yaml", *(f"{name}={other}/{folder}" for name, folder in moved.items()))
        return outputs(other / "output")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "k8s_rollout", raising=False)
    return tmp_path


def answer(payload: dict[str, Any]) -> str:
    return f"answer to {payload['messages'][-1]['content']}"


class Evictions:
    """For a server: evicts the pod that asks, each time so many answers after the last eviction, in turn.

    Attributes:
        again: questions that a later pod sent again, by what ended the pod before.
        done: evictions, by kind.
    """

    APART = 9

    def __init__(self, folder: Path, number: int, *kinds: str) -> None:
        self._claims = folder / "bucket/logs/claims"
        self.cluster: Cluster | None = None
        self.again, self.done = Counter[str](), Counter[str]()
        self._left = number
        self._kinds = itertools.cycle(kinds)
        self._kind = next(self._kinds, "")
        self._answers = 0
        self._last: dict[str, Any] = {}

    def pod_of(self, question: str) -> Pod:
        """The pod that asks it: its task is claimed by the pod's process."""
        assert self.cluster is not None
        rank = int(question.split()[1])
        mark = max(self._claims.glob(f"{rank:05d}-*"))
        owner = json.loads(mark.read_text())[0]
        pods = [*self.cluster.active.values(), *self.cluster.cut_off]
        return next(pod for pod in pods if pod.process.pid == int(owner[8:16], 16))

    def delay(self, payload: dict[str, Any], times: int) -> float:
        question = payload["messages"][-1]["content"]
        pod = self.pod_of(question)
        if (before := self._last.get(question)) is not None:
            assert before is not pod, "asked twice by one pod"
            self.again[before.ended_by] += 1
        self._last[question] = pod
        return 0.02

    def answer(self, payload: dict[str, Any], times: int) -> str:
        question = payload["messages"][-1]["content"]
        self._answers += 1
        assert self.cluster is not None
        is_next = self._left > 0 and self._answers >= self.APART
        if is_next and self.cluster.end(self.pod_of(question).index, self._kind):
            self.done[self._kind] += 1
            self._kind, self._answers, self._left = next(self._kinds), 0, self._left - 1
        return answer(payload)


@pytest.mark.slow
@pytest.mark.parametrize("evictions", [3, 30])
def test_evicted_pods_write_what_an_undisturbed_run_writes(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch, evictions: int
) -> None:
    evicted = Evictions(folder, evictions, "eviction", "node lost", "spot")
    with FakeServer(evicted.answer, delay=evicted.delay) as server:
        job = Job(folder, server.url, 15 + 3 * evictions)
        monkeypatch.chdir(folder / "here")
        cluster = evicted.cluster = Cluster(folder / "pods", job.manifests(command))
        cluster.run()
        assert cluster.succeeded == {*range(WORKERS)}, cluster.logs[-1]
        assert evicted.done.total() == evictions
        assert {code for why, code, _ in cluster.exits if why} == {143, 137}
        assert {action for why, _, action in cluster.exits if why} == {"Ignore"}
        assert server.asked.keys() == job.questions
        assert server.asked.total() - len(job.questions) == evicted.again.total()
        assert not evicted.again["eviction"]
        assert not evicted.again["spot"], "a pod that drains loses no answer"
        # Besides those in flight: what was answered since the last upload
        assert evicted.again["node lost"] <= evicted.done["node lost"] * (IN_FLIGHT + 2 * Evictions.APART)
        written = outputs(job.bucket / "output")
        assert len(written) == RANKS * -(-job.documents // 7)
        command("run", "job.yaml")
        stats = json.loads((job.bucket / "logs/stats.json").read_text())[-1]["stats"]
        assert stats["documents_processed"]["total"] == RANKS * job.documents, "of all pods"
        command("verify", "job.yaml", "--full")
    with FakeServer(lambda payload, times: answer(payload)) as other:
        Path("job.yaml").write_text(Path("job.yaml").read_text().replace(server.url, other.url))
        assert job.undisturbed(command) == written


@pytest.mark.slow
def test_what_follows_from_an_exit_code_is_what_the_job_says(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(payload: dict[str, Any], times: int) -> int | None:
        return {"0": None, "1": 400, "2": 503}[payload["messages"][-1]["content"].split()[1]]

    with FakeServer(status=status) as server:
        job = Job(folder, server.url, 5)
        monkeypatch.chdir(folder / "here")
        cluster = Cluster(folder / "pods", job.manifests(command))
        cluster.run()
        assert [path.name for path in (job.bucket / "logs/completions").iterdir()] == ["00000"]
        # A rejected document costs no worker; a server that is away costs one for each attempt of the task.
        assert cluster.exits["", 1, "Count"] == 2, cluster.logs
        assert cluster.exits.keys() <= {("", 0, "Succeed"), ("", 1, "Count"), ("", 3, "FailIndex")}
        assert cluster.failed, "the Job is not complete"

        other = Cluster(folder / "pods", job.manifests(command, "--pipeline.1.records_per_chunk=5"))
        other.run()
        assert other.is_failed
        assert ("", 2, "FailJob") in other.exits, other.logs
        assert {code for _, code, _ in other.exits} <= {0, 2, 143}  # 0: the others had all tasks at that moment


@pytest.mark.slow
def test_a_pod_ends_after_drain_seconds_although_a_server_does_not_answer(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = "document 0 7 again"
    evicted = Evictions(folder, 0)

    def delay(payload: dict[str, Any], times: int) -> float:
        if payload["messages"][-1]["content"] != hanging or times:
            return evicted.delay(payload, times)
        assert evicted.cluster is not None
        assert evicted.cluster.end(evicted.pod_of(hanging).index, "spot")
        return 4.0

    with FakeServer(evicted.answer, delay=delay) as server:
        Job(folder, server.url, 10)
        monkeypatch.chdir(folder / "here")
        times = ("--pipeline.1.drain_seconds=1", "--kubernetes.grace_seconds=21")
        cluster = evicted.cluster = Cluster(folder / "pods", command("k8s", "job.yaml", *times).out)
        cluster.run()
        assert cluster.exits == {("spot", 143, "Ignore"): 1, ("", 0, "Succeed"): WORKERS}
        assert {question: times for question, times in server.asked.items() if times > 1} == {hanging: 2}


@pytest.mark.slow
def test_a_pod_whose_node_only_seemed_lost_keeps_its_tasks_where_locks_work(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    evicted = Evictions(folder, 1, "cut off")
    with FakeServer(evicted.answer, delay=evicted.delay) as server:
        job = Job(folder, server.url, 60)
        monkeypatch.chdir(folder / "here")
        cluster = evicted.cluster = Cluster(folder / "pods", job.manifests(command))
        cluster.run()
        (lost,) = cluster.cut_off
        lost.process.send_signal(signal.SIGCONT)
        assert lost.process.wait(60) == 0
        lost.close()
        assert cluster.succeeded == {*range(WORKERS)}
        assert set(server.asked.values()) == {1}
        command("verify", "job.yaml", "--full")
        ids = [json.loads(line)["id"] for file in outputs(job.bucket / "output").values() for line in file.splitlines()]
        assert len(ids) == len({*ids}) == RANKS * job.documents
