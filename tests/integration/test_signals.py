"""Signals to real processes: the command, its workers, a task of datatrove's Slurm executor."""

import functools
import os
import select
import signal
import sys
import time

import pytest

from datatrove_ckpt.process import preemption
from datatrove_ckpt.testing import FakeServer, outputs
from tests.patience import Patience, until
from tests.processes import Process
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job, write_tasks

DRAINS = "requests in flight have"
ROLLOUTS = """
import os
from pathlib import Path

async def ask(document, generate):
    pids = Path("pids")
    pids.mkdir(exist_ok=True)
    (pids / document.id.split()[0]).write_text(str(os.getpid()))
    first = await generate({"messages": [{"role": "user", "content": document.text}]})
    second = await generate({"messages": [{"role": "user", "content": document.text + " again"}]})
    return [first.text, second.text]
"""
DOCUMENTS = 12


def answer(payload, times):
    return f"answer to {payload['messages'][-1]['content']}"


class Job:
    """``datatrove-ckpt run``, as often as it takes."""

    def __init__(
        self,
        folder,
        server,
        tasks,
        workers=None,
        start_method="fork",
    ):
        self.folder = folder
        self.tasks = tasks
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "my_rollouts.py").write_text(ROLLOUTS)
        config = f"{ENDPOINT.replace('URL', server.url)}, max_concurrent_generations: 4"
        text = job_yaml(config, tasks, "input, add_file_path: false", rollout="my_rollouts.ask")
        text = text.replace(
            "workers: 1", f"workers: {workers or tasks}\n    start_method: {start_method}"
        )
        text += "          records_per_chunk: 4\n          drain_signals: [SIGTERM, SIGUSR1, SIGINT, SIGHUP]\n"
        write_job(folder, text)
        write_tasks(folder, tasks, DOCUMENTS)

    def start(self):
        return Process([sys.executable, "-m", "datatrove_ckpt", "run", "job.yaml"], self.folder)

    def until_drains(self, *tasks):
        """Until these ranks say so, or all of them."""
        logs = [
            self.folder / "logs/logs" / f"task_{task:05d}.log"
            for task in tasks or range(self.tasks)
        ]
        until(lambda: all(DRAINS in log.read_text() for log in logs))

    def worker(self, task):
        return int((self.folder / "pids" / str(task)).read_text())

    @property
    def completed(self):
        return len(list((self.folder / "logs").glob("completions/*")))


def until_asked(server, number):
    until(lambda: len(server.payloads) >= number)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The output of a job that nothing interrupts, by its number of tasks."""

    @functools.cache
    def output(tasks):
        folder = tmp_path_factory.mktemp("undisturbed") / "job"
        with FakeServer(answer) as server:
            process = Job(folder, server, tasks, workers=1).start()
            assert process.end() == 0, process.log
        return outputs(folder / "output")

    return output


@pytest.mark.xdist_group("undisturbed")  # which takes as long as a test
@pytest.mark.matrix(
    ("number", "tasks", "workers", "group", "start_method"),
    [
        (signal.SIGTERM, 2, 3, True, "fork"),  # one has nothing to do
        pytest.param(signal.SIGINT, 1, 1, True, "forkserver", marks=pytest.mark.real_process),
        (signal.SIGINT, 2, 2, True, "spawn"),
        (signal.SIGTERM, 2, 2, False, "forkserver"),
        (signal.SIGHUP, 2, 2, True, "forkserver"),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_the_command_ends_with_its_workers_and_one_line_and_goes_on_without_asking_twice(
    tmp_path,
    undisturbed,
    number,
    tasks,
    workers,
    group,
    start_method,
):
    with FakeServer(answer, hold_after=8 * tasks) as server:
        job = Job(tmp_path / "job", server, tasks, workers, start_method)
        process = job.start()
        until_asked(server, 12 * tasks)
        (os.killpg if group else os.kill)(process.popen.pid, number)
        job.until_drains()
        server.release()
        process.ends_interrupted(number)
        assert job.completed == 0
        again = job.start()
        assert again.end() == 0, again.log
        assert job.completed == tasks
        assert set(server.asked.values()) == {1}
    assert outputs(tmp_path / "job/output") == undisturbed(tasks)


def test_a_second_ctrl_c_ends_all_workers_at_once(tmp_path):
    with FakeServer(answer, hold_after=0) as server:
        job = Job(tmp_path, server, 2)
        (tmp_path / "job.yaml").write_text(
            (tmp_path / "job.yaml").read_text() + "          drain_seconds: 3600\n"
        )
        process = job.start()
        until_asked(server, 8)
        os.killpg(process.popen.pid, signal.SIGINT)
        job.until_drains()
        time.sleep(preemption.SAME_EVENT)  # earlier ones are taken for the same Ctrl-C
        patience = Patience(10)
        os.killpg(process.popen.pid, signal.SIGINT)
        assert process.end() == 130
        assert not patience.over()
        assert process.log.count("To resume:") == 1
        assert "Traceback" not in process.log
        assert process.left == []


@pytest.mark.xdist_group("undisturbed")
@pytest.mark.matrix("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda value: value.name)
def test_a_rank_whose_worker_ends_alone_starts_again_and_the_others_go_on(
    tmp_path, undisturbed, number
):
    with FakeServer(answer, hold_after=16) as server:
        job = Job(tmp_path, server, 2)
        process = job.start()
        until_asked(server, 24)
        worker = os.pidfd_open(job.worker(1))
        signal.pidfd_send_signal(worker, number)
        if number == signal.SIGTERM:
            job.until_drains(1)
            server.release()
        assert select.select([worker], [], [], 300)[0]
        os.close(worker)
        server.release()
        assert process.end() == 0, process.log
        assert "It starts again alone, after 1 of 2 attempts" in process.log
        assert process.left == []
        again = {count for question, count in server.asked.items() if "document 0 " in question}
        assert again == {1}, "the other rank was disturbed"
        if number == signal.SIGTERM:
            assert set(server.asked.values()) == {1}
    assert outputs(tmp_path / "output") == undisturbed(2)


# --------------------------------------------------------------------------- datatrove's Slurm
# executor
