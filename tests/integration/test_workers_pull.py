"""``run --worker`` with real processes: they share the tasks of a job, come and go, and are
killed.
"""

import errno
import json
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import xxhash
from datatrove.io import get_datafolder

from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.claims.claims import DiskClaims
from datatrove_ckpt.executors import local
from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.patience import until
from tests.processes import Process, is_stopped
from tests.rank_folders import grow_old
from tests.yaml_jobs import ENDPOINT, job_yaml, write_tasks

TASKS, DOCUMENTS = 8, 5

ROLLOUT = """
import os, signal
from pathlib import Path

async def rollout(document, generate):
    # The first of its task: what is answered before it would be progress, more or less of it in each attempt.
    if document.text == "document 3 0" and Path("bad").exists():
        if Path("bad").read_text() == "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("bad")
    return await generate({"messages": [{"role": "user", "content": document.text}]})
"""

# A disk without locks.
WITHOUT_LOCKS = """
import errno, fcntl, os, sys

def flock(fd, how):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

fcntl.flock = flock
from datatrove_ckpt.cli.main import main

sys.exit(main())
"""


@pytest.fixture(autouse=True)
def _in_tmp_path(here):
    Path("own.py").write_text(ROLLOUT)


@pytest.fixture
def server():
    with FakeServer(delay=lambda payload, times: 0.1) as running:
        yield running


def write(server, tasks=TASKS, at_once=2, more=""):
    config = f"{ENDPOINT.replace('URL', server.url)}, max_concurrent_generations: 4"
    text = (
        job_yaml(config, tasks, rollout="own.rollout") + "          records_per_chunk: 3\n" + more
    )
    text = text.replace("workers: 1\n", f"workers: 1\n    ranks_at_once: {at_once}\n")
    Path("job.yaml").write_text(text)
    write_tasks(Path.cwd(), tasks, DOCUMENTS)


COMMAND = [sys.executable, "-m", "datatrove_ckpt", "run", "job.yaml"]


def worker(*words, program=""):
    start = [sys.executable, "-c", program, *COMMAND[3:]] if program else COMMAND
    return processes.start([*start, *(words or ["--worker"])])


def at_work(server, *words, program=""):
    """A process that completes nothing before the server is released."""
    write(server)
    server._hold_after = 3
    process = worker(*words, program=program)
    until(lambda: server.asked.total() > 3)
    return process


def ended(process, code=0):
    text, _ = process.communicate(timeout=500)
    assert process.returncode == code, text
    return text


def is_known(process):
    """Whether the other processes see this worker."""
    for path in Path("logs/claims/workers").iterdir():
        with suppress(FileNotFoundError):  # the worker has ended
            if f'"pid":{process.pid}' in path.read_text():
                return True
    return False


def complete():
    return {int(path.name) for path in Path("logs/completions").glob("*")}


def assert_whole(command):
    """The output is that of a plain run, with each document once."""
    found = outputs(Path("output"))
    ids = [json.loads(line)["id"] for content in found.values() for line in content.splitlines()]
    assert Counter(ids) == Counter(f"{task} {n}" for task in range(TASKS) for n in range(DOCUMENTS))
    for name in ("output", "checkpoints", "logs"):
        Path(name).rename(f"{name}.pulled")
    assert command("run", "job.yaml").code == 0
    assert outputs(Path("output")) == found


def test_workers_join_and_are_killed_and_run_ends_when_all_is_done(server, command):
    write(server)
    server._hold_after = 25  # at most four tasks are begun: so two are complete, and not all
    first, second = worker(), worker()
    until(lambda: len(complete()) >= 2)
    third = worker()
    # A run that sees no worker would take all tasks, and refuse a worker that comes later.
    for other in (second, third):
        until(lambda other=other: is_known(other) or other.poll() is not None)
    os.kill(first.pid, signal.SIGKILL)
    run = worker("--fail-on-dead-letters")
    server.release()
    assert "no task is free now" in ended(second)
    assert "no task is free now" in ended(third)
    text = ended(run)
    ended(first, -signal.SIGKILL)
    assert f"{TASKS * DOCUMENTS} of {TASKS * DOCUMENTS} documents are" in text
    assert server.asked.total() <= TASKS * DOCUMENTS + 2 * 4  # what was in flight at the kill
    assert list(Path("logs/claims").glob("*-*")) == []
    total = json.loads(Path("logs/stats.json").read_text())[-1]["stats"]["documents_processed"][
        "total"
    ]
    assert total == TASKS * DOCUMENTS
    assert_whole(command)


def test_a_stopped_worker_keeps_its_tasks_where_locks_work(server, command):
    first = at_work(server)
    os.kill(first.pid, signal.SIGSTOP)
    server.release()
    ended(worker())
    left = set(range(TASKS)) - complete()
    assert 1 <= len(left) <= 2
    os.kill(first.pid, signal.SIGCONT)
    ended(first)
    assert len(complete()) == TASKS
    assert set(server.asked.values()) == {1}
    assert_whole(command)


@pytest.mark.slow
def test_without_locks_a_worker_that_sleeps_loses_its_tasks_and_goes_on(server, command):
    first = at_work(server, program=WITHOUT_LOCKS)
    os.kill(first.pid, signal.SIGSTOP)
    until(lambda: is_stopped(first.pid))
    grow_old(Path("logs/claims"), 1000.0)
    server.release()
    ended(worker(program=WITHOUT_LOCKS))
    assert len(complete()) == TASKS
    os.kill(first.pid, signal.SIGCONT)
    assert "is left to another process" in ended(first)
    assert_whole(command)


def test_run_waits_for_tasks_that_workers_have_and_names_those_that_they_gave_up(server, command):
    Path("bad").write_text("fails")
    first = at_work(server)
    os.kill(first.pid, signal.SIGSTOP)
    server.release()
    mine = {int(path.name.split("-")[0]) for path in Path("logs/claims").glob("*-*")}
    # As if it had that, too.
    Path("logs/claims/00003-000001").write_text(
        json.dumps([next(Path("logs/claims/workers").iterdir()).name, {}])
    )
    run = Process([*COMMAND, "--fail-on-dead-letters"], Path.cwd())
    run.until(f"of other processes: pid {first.pid} on ")
    assert len(complete()) == TASKS - len(mine | {3})
    told = command.json("status", "checkpoints")
    assert sorted(told["workers"][0]["ranks"] + told["workers"][1]["ranks"]) == sorted(mine | {3})
    Path("logs/claims/00003-000002").write_text(
        json.dumps(
            [
                f"given-up-{xxhash.xxh32().hexdigest()}",
                {"tries": 1, "reached": [0, 0, 0], "why": "DocumentFailed: bad", "alone": False},
            ]
        )
    )
    os.kill(first.pid, signal.SIGCONT)
    ended(first, 3)
    assert run.end() == 1
    assert f"1 of {TASKS} tasks were given up" in run.log
    assert "task 3: DocumentFailed: bad" in run.log


def test_beside_a_plain_run_a_worker_and_a_second_run_are_refused_and_it_goes_on(server):
    """A second run would take tasks until it met one of the first, which then ended with its error."""
    first = at_work(server, "--fail-on-dead-letters")
    assert list(Path("logs/claims").glob("*-*")) == []
    of_worker = ended(worker(), 1)
    of_run = ended(worker("--fail-on-dead-letters"), 1)
    sent = server.asked.total()
    server.release()
    assert f"{TASKS} tasks are run by pid {first.pid} on " in of_worker
    assert "start each machine with run --worker" in of_worker
    assert f"Another process works on this run: pid {first.pid} on " in of_run
    ended(first)
    assert len(complete()) == TASKS
    assert sent <= 3 + 4, "the second sends nothing"
    assert set(server.asked.values()) == {1}
    assert list(Path("logs/claims/workers").iterdir()) == []
    assert not Path("logs/claims/run.lock").exists()
    ended(worker())
    ended(worker("--fail-on-dead-letters"))


def test_a_run_goes_on_where_no_claims_can_be_written(server, command, monkeypatch, log):
    """It needs none; only no worker can see it."""
    given = []

    def fails(url, owner, options):
        given.append(options)
        raise OSError("no such endpoint")

    monkeypatch.setattr(local, "open_store", fails)
    write(server)
    command("run", "job.yaml", f"--executor.logging_dir={Path.cwd()}/logs")
    assert log.said("cannot be listed: no such endpoint. Start none beside it.")
    assert complete() == set(range(TASKS))
    assert given == [get_datafolder("logs").fs.storage_options]


def test_a_worker_whose_claims_cannot_be_written_ends_with_1(server, command, monkeypatch):
    def is_full(self, mark, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskClaims, "put", is_full)
    monkeypatch.setattr(local, "_CLAIMS_POLL", 0.01)
    write(server)
    said = command("run", "job.yaml", "--worker", code=1).err
    assert "No task could be claimed, 5 times in a row" in said
    assert not server.asked


def test_a_task_that_runs_without_a_claim_ends_no_worker_well(server):
    write(server)
    Path("checkpoints/00001").mkdir(parents=True)
    lock = Lock(Path("checkpoints/00001/lock"))
    try:
        text = ended(worker(), 1)
    finally:
        lock.release()
    assert "1 task is run by processes. Wait" in text
    assert complete() == {*range(TASKS)} - {1}
    ended(worker())
    assert complete() == {*range(TASKS)}


@pytest.mark.matrix("left", ["0000[0-3]", "none"])
def test_settings_of_another_run_end_a_worker_with_2(server, left):
    write(server)
    ended(worker())
    for path in Path("logs/completions").glob(left):
        path.unlink()
    text = Path("job.yaml").read_text().replace("records_per_chunk: 3", "records_per_chunk: 4")
    Path("job.yaml").write_text(text)
    assert "records_per_chunk" in ended(worker(), 2)
    assert not list(Path("logs/claims").glob("*-*"))


@pytest.mark.parametrize(
    "words, said",
    [
        (["--worker", "--retry-dead-letters"], "--retry-dead-letters"),
        (["--worker", "--executor.logging_dir=hf://datasets/a/b/logs"], "hf://buckets/a/b/logs"),
    ],
)
def test_what_no_worker_can_do_is_refused(server, command, words, said):
    write(server)
    assert said in command("run", "job.yaml", *words, code=2).err
