"""A real Slurm, real jobs through datatrove's executor, and everything that a cluster does to them.

pytest tests/real/test_slurm.py
"""

import gzip
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from datatrove.io import DataFolder

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.inference.servers.server import free_port
from tests.engines import TWO_PART_VLLM
from tests.patience import until
from tests.processes import write_program
from tests.real.cluster_job import DOCUMENTS, HELD, IN_FLIGHT, counting_server
from tests.real.slurm_cluster import Cluster
from tests.real.slurm_job import Job

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)  # the first one may install Slurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def cluster(slurm, monkeypatch):
    """The cluster with nothing on it, and an environment that reaches it."""
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    yield slurm
    slurm.cancel_all()
    DataFolder.clear_instance_cache()


@pytest.fixture
def server():
    with counting_server() as running:
        yield running


@pytest.fixture
def job(cluster, tmp_path, server):
    return Job(cluster, tmp_path, server)


def preempt(cluster):
    """A job above all others takes both nodes, and ends at once."""
    cluster.command(
        "sbatch",
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=true",
    )


@pytest.mark.parametrize("pulls", [True, False])
def test_preemption(job, cluster, pulls):
    job.submit(pulls, runner={"drain_seconds": 40.0})  # until this process has seen the signal
    job.until_held()
    worker = job.worker()
    preempt(cluster)
    job.until_logged("SIGTERM")
    job.server.release()
    worker.wait(120)
    assert not job.is_complete()
    job.until_ended()
    job.check()


@pytest.mark.full
def test_time_limit(cluster, tmp_path):
    def play(name, cause, **settings):
        with counting_server() as server:
            job = Job(cluster, tmp_path / name, server)
            job.submit(name == "silent", **settings)
            job.until_held()
            worker = job.worker()
            job.until_logged(f"{cause}: {IN_FLIGHT} requests in flight")
            server.release()
            worker.wait(120)
            assert not job.is_complete()
            job.until_ended()
            return job

    # Slurm looks every 30 s whose time is up: the two wait together. The signal comes 110 to 140 s
    # after the start: it is death to a process that is not yet up, which on a busy machine takes a
    # minute.
    with ThreadPoolExecutor() as threads:
        signalled = threads.submit(
            play, "signalled", "SIGUSR1", time="00:04:00", sbatch_args={"signal": "USR1@130"}
        )
        silent = threads.submit(play, "silent", "the end of the job's time limit", time="00:02:00")
    for done in (signalled, silent):
        done.result().check()


@pytest.mark.full
def test_one_task_of_an_array_requeues_itself_and_not_the_others(cluster, tmp_path, server):
    job = Job(cluster, tmp_path, server, tasks=2)
    job.submit()
    job.until_held()
    numbers = {cluster.show("job", f"{job.id}_{index}")["JobId"]: index for index in range(2)}
    # Whose own number is the array's, so that Slurm's commands take it for all tasks.
    last = numbers[job.id]
    worker = job.worker(last)
    cluster.command("scancel", "--signal=USR1", f"{job.id}_{last}")
    job.until_logged("SIGUSR1")
    job.server.release()
    worker.wait(120)
    job.until_ended()
    assert [cluster.show("job", f"{job.id}_{index}")["Restarts"] for index in (last, 1 - last)] == [
        "1",
        "0",
    ]
    job.check()


def lose_node(job, cluster):
    """Its slurmd dies, and somebody takes the node out of service: what runs there runs on,
    unseen.
    """
    node = cluster.show("job", f"{job.id}_0")["NodeList"]
    cluster.kill_node(node)
    cluster.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")


def test_a_lost_node_whose_process_lives_on_where_there_are_no_locks(job, cluster, monkeypatch):
    monkeypatch.setenv("TEST_WITHOUT_LOCKS", "1")
    job.submit()
    job.until_held()
    first = job.worker()
    lose_node(job, cluster)
    # The second has taken over, and asks.
    until(lambda: job.asked() == HELD + 2 * IN_FLIGHT, 240, job.describe)
    assert first.is_alive()
    assert not job.is_complete()
    job.server.release()
    first.wait(120)
    job.until_ended()
    job.check(2 * IN_FLIGHT)


@pytest.fixture
def two_parts(job, monkeypatch):
    """The config of a server on two nodes."""
    write_program(job.folder / "bin/vllm", TWO_PART_VLLM)
    monkeypatch.chdir(job.folder)
    monkeypatch.setenv("PATH", f"{job.folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("COUNTING_SERVER", job.server.url)
    return InferenceConfig(
        "vllm",
        "fake",
        tp=2,
        max_concurrent_generations=IN_FLIGHT,
        master_port=free_port(),
        server_stop_timeout_sec=1.0,
    )


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_on_one_of_several_nodes_ends_the_task_and_the_next_run_resumes(
    job, two_parts, killed
):
    job.submit(True, nodes_per_task=2, runner={"config": two_parts})
    job.until_held()
    workers = job.workers()
    workers[killed].send(signal.SIGKILL)
    for worker in workers:
        worker.wait(120)
    job.until_ended("FAILED")
    assert not job.is_complete()
    job.server.release()
    job.submit(True, nodes_per_task=2, runner={"config": two_parts})
    job.until_ended()
    job.check(IN_FLIGHT)


# The file that a user copies, the script that submits it, a rollout in the same folder, a key in
# the environment.
KEY = "hunter2-is-a-secret"
MY_MODULE = """
async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})
"""


def test_the_config_that_users_copy_gets_more_workers_and_a_last_job_that_checks_all(
    cluster,
    tmp_path,
    server,
    monkeypatch,
    capsys,
):
    job = Job(cluster, tmp_path / "slurm_run", server, tasks=2)
    (tmp_path / "slurm_run/input").rename(tmp_path / "documents")
    (tmp_path / "my_module.py").write_text(MY_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", KEY)
    DataFolder.clear_instance_cache()
    endpoint = f"server_type: endpoint, endpoint_url: {server.url}, model_name_or_path: m, api_key_env: MY_KEY"
    arguments = [
        str(ROOT / "configs/slurm.yaml"),
        "--executor.tasks=2",
        "--executor.workers=2",
        "--executor.partition=low",
        "--executor.cpus_per_task=1",
        f"--pipeline.1.config={{{endpoint}, max_concurrent_generations: {IN_FLIGHT}}}",
        "--pipeline.1.rollout_fn=my_module.rollout",
    ]
    said = cluster.command("bash", str(ROOT / "slurm/launch.sh"), *arguments)
    assert "#SBATCH --gpus=1\n" in said
    job.id, last = submitted(said)
    job.until_held()
    assert main(["run", *arguments]) == 0
    more, early = submitted(capsys.readouterr().out)
    until(lambda: cluster.show("job", early).get("JobState") == "FAILED", 240, job.describe)
    said = (tmp_path / f"slurm_run/logs/slurm/{early}.out").read_text()
    assert "2 tasks are not complete: 0-1. Workers of another submission continue: pid " in said
    assert {cluster.show("job", f"{more}_{index}")["JobState"] for index in range(2)} == {
        "COMPLETED"
    }
    assert job.asked() == HELD + 2 * IN_FLIGHT, "they took no task that others had"

    worker = job.worker()
    worker.send(signal.SIGKILL)
    worker.wait(120)
    server.release()
    job.until_ended("FAILED", "COMPLETED")
    assert [job.state(index) for index in range(2)] == ["FAILED", "COMPLETED"]
    assert [job.is_complete(rank) for rank in range(2)] == [True, True]
    until(lambda: cluster.show("job", last).get("JobState") == "COMPLETED", 240, job.describe)
    assert (tmp_path / "slurm_run/logs/stats.json").exists()
    assert main(["run", *arguments]) == 0
    assert "Nothing was submitted: 2 tasks are complete." in capsys.readouterr().out

    files = sorted((tmp_path / "slurm_run/output").iterdir())
    written = [
        json.loads(line)["id"]
        for path in files
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    assert written == [f"{task} {number}" for task in range(2) for number in range(DOCUMENTS)]
    job.check_requests(IN_FLIGHT)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def submitted(said):
    """The numbers of the array and of the last job, from the closing line."""
    found = re.search(r"Submitted job (\d+): 2 workers for 2 of 2 tasks.* Job (\d+) checks", said)
    assert found, said
    return found[1], found[2]
