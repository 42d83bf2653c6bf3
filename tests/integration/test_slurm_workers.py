"""What the jobs of our Slurm executor do: elements that pull tasks, their time limit, the last job.

tests/unit/test_slurm.py submits them, and tests/real/test_slurm.py has a real Slurm.
"""

import sys

import pytest

from datatrove_ckpt.claims import claims
from tests import processes
from tests.slurm_array import TASKS, completed, enter

# As launch_pickled_pipeline runs it. With "late", the clock says 45 s before the time limit once a
# task has ended.
JOB = """
import os, sys
from types import SimpleNamespace
import datatrove.executor.base as base
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner, SlurmPipelineExecutor
from datatrove_ckpt.process import slurm_job
from my_rollout import ask

end_of_rank = base.close_task_logger

def close_task_logger(logfile):
    end_of_rank(logfile)
    if "late" in sys.argv:
        late = float(os.environ["SLURM_JOB_END_TIME"]) - 45
        slurm_job.time = SimpleNamespace(time=lambda: late)

base.close_task_logger = close_task_logger
runner = InferenceRunner(
    ask,
    InferenceConfig("endpoint", "m", endpoint_url=sys.argv[1]),
    JsonlWriter("output", "${rank}_chunk_${chunk_index}.jsonl", compression=None),
    checkpoints_local_dir="checkpoints",
    checkpoints_remote_dir="mirror",
)
SlurmPipelineExecutor(
    [JsonlReader("input"), runner], tasks=3, time="1:00:00", partition="p", logging_dir="logs", ranks_at_once=1
).run()
"""


@pytest.fixture
def array(tmp_path, monkeypatch):
    enter(tmp_path, monkeypatch, "echo here", "/usr/bin:/bin")
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def run(folder, server, code, *words):
    argv = [sys.executable, "job.py", server.url, *words]
    done = processes.run(argv, cwd=folder, timeout=400)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_an_element_takes_what_is_free_and_the_last_job_checks_all(array, server, monkeypatch):
    assert f"This worker has completed {TASKS} tasks" in run(array, server, 0)
    assert "This worker has completed 0 tasks" in run(array, server, 0)
    assert list(server.asked.values()) == [1] * TASKS
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    monkeypatch.setenv("DATATROVE_CKPT_LAST_JOB", "1")
    assert f"The output of {TASKS} tasks is complete, and matches" in run(array, server, 0)
    assert (array / "logs/stats.json").exists()
    next((array / "output").iterdir()).unlink()
    assert "datatrove-ckpt repair" in run(array, server, 3)


def test_the_last_job_compares_the_output_on_a_node_that_has_no_checkpoints(
    array, server, monkeypatch
):
    run(array, server, 0)
    (array / "checkpoints").rename(array / "checkpoints of other nodes")
    first, second, _ = sorted((array / "output").iterdir())
    first.unlink()
    second.write_bytes(b"")
    monkeypatch.setenv("DATATROVE_CKPT_LAST_JOB", "1")
    assert first.name in run(array, server, 3)


def test_the_last_job_fails_while_tasks_are_not_complete(array, server, monkeypatch):
    (array / "bad").touch()
    assert "1 of 3 tasks were given up" in run(array, server, 3)
    monkeypatch.setenv("DATATROVE_CKPT_LAST_JOB", "1")
    assert "task 1: DocumentFailed" in run(array, server, 3)
    (array / "bad").unlink()
    for mark in (array / "logs/claims").glob("*-*"):
        mark.unlink()
    assert "1 task is not complete: 1. Run again" in run(array, server, 1)
    assert not (array / "logs/stats.json").exists()


def test_an_element_takes_no_task_just_before_its_time_limit_and_requeues_itself(array, server):
    assert "The job's time limit is too near to take another task" in run(array, server, 15, "late")
    assert (array / "asked").read_text().splitlines()[-1] == "requeue 17_0", (
        "17 would be the whole array"
    )
    assert len(completed(array)) == 1
    assert len(list((array / "checkpoints").glob("0*"))) == 1, "nothing else was started"
    assert list((array / "logs/claims").glob("*-*")) == []
    run(array, server, 0)
    assert len(completed(array)) == TASKS
    assert list(server.asked.values()) == [1] * TASKS


def test_how_long_a_task_takes_is_told_by_those_that_this_process_has_completed():
    asked = []
    own = claims.Claims.__new__(claims.Claims)
    own._has_time = lambda seconds: bool(asked.append(seconds))
    own._seconds_of_ranks = []
    assert not own.has_time
    own._seconds_of_ranks = [10.0, 30.0]
    assert own.next() is None
    assert asked == [0.0, 20.0]
