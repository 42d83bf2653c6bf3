"""A real Slurm, real jobs through datatrove's executor, and everything that a cluster does to them.

    pytest tests/real/test_slurm.py -s

prints a line per case: event, lives, documents, requests sent again, seconds from the event to the end of the process,
and whether the rank was marked complete at that moment. In the end it always is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.inference.server import free_port
from datatrove_ckpt.testing import FakeServer
from tests.real import two_part_vllm
from tests.real.slurm_cluster import Cluster, until
from tests.real.slurm_job import DOCUMENTS, HELD, IN_FLIGHT, Job, Stopwatch, counting_server

pytestmark = pytest.mark.timeout(300)  # the first one may install Slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def cluster(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster with nothing on it, and an environment that reaches it."""
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    yield slurm
    slurm.cancel_all()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with counting_server() as running:
        yield running


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path, server: FakeServer) -> Job:
    return Job(cluster, tmp_path, server)


def preempt(cluster: Cluster) -> None:
    """A job above all others takes both nodes, and ends at once."""
    cluster.command("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")


def test_a_plain_array(cluster: Cluster, tmp_path: Path, server: FakeServer) -> None:
    job = Job(cluster, tmp_path, server, tasks=3)
    server.release()
    job.submit()
    job.until_ended()
    job.check("plain array of 3", lives=3)
    until((tmp_path / "logs/stats.json").exists, 30, job.describe)  # datatrove's job after the array


def test_requeue(job: Job, cluster: Cluster) -> None:
    job.submit()
    job.until_held()
    worker, watch = job.worker(), Stopwatch()
    cluster.command("scontrol", "requeue", f"{job.id}_0")
    job.until_logged("SIGTERM")
    job.server.release()
    seconds = watch.until_gone(worker)
    assert not job.is_complete()
    job.until_ended()
    job.check("scontrol requeue", 2, seconds, "no")


@pytest.mark.parametrize("partition", ["low", "grace"])
def test_preemption(job: Job, cluster: Cluster, partition: str) -> None:
    job.submit(partition=partition)
    job.until_held()
    worker, watch = job.worker(), Stopwatch()
    preempt(cluster)
    job.until_logged("SIGTERM")
    job.server.release()
    seconds = watch.until_gone(worker)
    assert not job.is_complete()
    job.until_ended()
    grace = {"low": "no grace time", "grace": "20 s of grace"}[partition]
    job.check(f"preemption, {grace}", 2, seconds, "no")


def test_preemption_while_answers_stay_away(job: Job, cluster: Cluster) -> None:
    job.submit()
    job.until_held()
    worker, watch = job.worker(), Stopwatch()
    preempt(cluster)
    seconds = watch.until_gone(worker)
    job.server.release()
    assert not job.is_complete()
    job.until_ended()
    job.check("preemption, slow answers", 2, seconds, "no", at_most=IN_FLIGHT)


def test_time_limit(job: Job) -> None:
    # Slurm looks every 30 s whose time is up; the shortest limit is a minute.
    job.submit(time="00:01:00", sbatch_args={"signal": "USR1@58"})
    job.until_held()
    worker = job.worker()
    job.until_logged("SIGUSR1")
    watch = Stopwatch()
    job.server.release()
    seconds = watch.until_gone(worker)
    assert not job.is_complete()
    job.until_ended()
    job.check("time limit, --signal=USR1", 2, seconds, "no")


def test_kill_and_another_run(job: Job) -> None:
    job.submit()
    job.until_held()
    worker, watch = job.worker(), Stopwatch()
    worker.send(signal.SIGKILL)
    seconds = watch.until_gone(worker)
    job.until_ended("FAILED")
    assert not job.is_complete()
    job.server.release()
    job.submit()
    job.until_ended()
    job.check("kill -9, run again", 2, seconds, "no", at_most=IN_FLIGHT)


def test_scancel_and_another_run(job: Job, cluster: Cluster) -> None:
    job.submit()
    job.until_held()
    worker, watch = job.worker(), Stopwatch()
    cluster.command("scancel", job.id)
    job.until_logged("SIGTERM")
    job.server.release()
    seconds = watch.until_gone(worker)
    job.until_ended("CANCELLED")
    assert not job.is_complete()
    job.submit()
    job.until_ended()
    job.check("scancel, run again", 2, seconds, "no")


def test_several_tasks_per_job(cluster: Cluster, tmp_path: Path) -> None:
    with counting_server(held=DOCUMENTS + 10) as server:  # in the middle of the second
        job = Job(cluster, tmp_path, server, tasks=3)
        job.submit(tasks_per_job=3)
        until(lambda: job.asked() == DOCUMENTS + 10 + IN_FLIGHT, 60, job.describe)
        worker, watch = job.worker(), Stopwatch()
        cluster.command("scontrol", "requeue", f"{job.id}_0")
        job.until_logged("SIGTERM")
        server.release()
        seconds = watch.until_gone(worker)
        assert [job.is_complete(rank) for rank in range(3)] == [True, False, False]
        job.until_ended(indices=1)
        job.check("tasks_per_job=3, requeue in the 2nd", 2, seconds, "1 of 3")


def test_one_task_of_an_array_requeues_itself_and_not_the_others(
    cluster: Cluster, tmp_path: Path, server: FakeServer
) -> None:
    job = Job(cluster, tmp_path, server, tasks=2)
    job.submit()
    job.until_held()
    numbers = {cluster.show("job", f"{job.id}_{index}")["JobId"]: index for index in range(2)}
    last = numbers[job.id]  # whose own number is the array's, so that Slurm's commands take it for all tasks
    worker, watch = job.worker(last), Stopwatch()
    cluster.command("scancel", "--signal=USR1", f"{job.id}_{last}")
    job.until_logged("SIGUSR1")
    job.server.release()
    seconds = watch.until_gone(worker)
    job.until_ended()
    assert [cluster.show("job", f"{job.id}_{index}")["Restarts"] for index in (last, 1 - last)] == ["1", "0"]
    job.check("USR1 to the last of 2 tasks", 3, seconds, "no")


def lose_node(job: Job, cluster: Cluster) -> None:
    """Its slurmd dies, and somebody takes the node out of service: what runs there runs on, unseen."""
    node = cluster.show("job", f"{job.id}_0")["NodeList"]
    cluster.kill_node(node)
    cluster.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")


def test_a_lost_node_whose_process_lives_on(job: Job, cluster: Cluster) -> None:
    job.submit()
    job.until_held()
    first = job.worker()
    lose_node(job, cluster)
    job.until_ended("FAILED")
    assert first.is_alive()
    assert not job.is_complete()
    assert "CheckpointLocked: Another process works on this rank" in job.describe()
    watch = Stopwatch()
    job.server.release()
    job.check("node lost, file locks: 2nd refused", 2, watch.until_gone(first), "no")


def test_a_lost_node_whose_process_lives_on_where_there_are_no_locks(
    job: Job, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_WITHOUT_LOCKS", "1")
    job.submit()
    job.until_held()
    first = job.worker()
    lose_node(job, cluster)
    until(lambda: job.asked() == HELD + 2 * IN_FLIGHT, 60, job.describe)  # the second has taken over, and asks
    assert first.is_alive()
    assert not job.is_complete()
    watch = Stopwatch()
    job.server.release()
    seconds = watch.until_gone(first)
    job.until_ended()
    job.check("node lost, no locks: 1st fenced", 2, seconds, "no", at_most=2 * IN_FLIGHT)


def test_several_nodes_per_task(job: Job, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    two_part_vllm.install(job.folder / "bin")
    monkeypatch.setenv("PATH", f"{job.folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("COUNTING_SERVER", job.server.url)
    config = InferenceConfig(
        "vllm", "fake", tp=2, max_concurrent_generations=IN_FLIGHT, master_port=free_port(), server_stop_timeout_sec=1.0
    )
    job.submit(nodes_per_task=2, runner={"config": config})
    job.until_held()
    workers, watch = job.workers(), Stopwatch()
    assert len(workers) == 2
    cluster.command("scontrol", "requeue", f"{job.id}_0")
    seconds = max(watch.until_gone(worker) for worker in workers)
    job.server.release()
    assert not job.is_complete()
    job.until_ended()
    print(job.describe())
    job.check("nodes_per_task=2, requeue", 4, seconds, "no", at_most=IN_FLIGHT)
