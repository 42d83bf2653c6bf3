"""Several tasks in one process of datatrove's Slurm executor (``tasks_per_job``): requeue, signals,
time limit.

tests/real/test_slurm.py has a real Slurm.
"""

import json
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from datatrove_ckpt.errors import Preempted
from datatrove_ckpt.process import slurm_job
from tests.jobs import ask, documents, runner
from tests.patience import until_async
from tests.processes import run, write_program
from tests.slurm_array import TASKS, completed, enter

# A task of an array. The signal comes when the first rank that runs has ended and the next has not
# begun.
TASK = """
import os, sys, signal
import datatrove.executor.base as base
from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner
from my_rollout import ask

end_of_rank = base.close_task_logger

def close_task_logger(logfile):
    end_of_rank(logfile)
    if sys.argv[2:]:
        os.kill(os.getpid(), signal.Signals[sys.argv[2]])

base.close_task_logger = close_task_logger
runner = InferenceRunner(
    ask,
    InferenceConfig("endpoint", "m", endpoint_url=sys.argv[1]),
    JsonlWriter("output", "${rank}_chunk_${chunk_index}.jsonl", compression=None),
    checkpoints_local_dir="checkpoints",
)
SlurmPipelineExecutor(
    [JsonlReader("input"), runner], tasks=3, tasks_per_job=3, time="1:00:00", partition="p", logging_dir="logs"
).run()
"""


@pytest.fixture
def array(tmp_path, monkeypatch):
    """The last task of an array. Slurm says of it what the file "record" holds."""
    enter(tmp_path, monkeypatch, f"cat {tmp_path}/record", os.environ["PATH"])
    (tmp_path / "logs").mkdir()
    (tmp_path / "record").write_text("here\n")  # the node list
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "logs/ranks_to_run.json").write_text(json.dumps(list(range(TASKS))))
    return tmp_path


def attempt(folder, server, *signals):
    argv = [sys.executable, "task.py", server.url, *signals]
    return run(argv, cwd=folder, timeout=400).returncode


def test_a_signal_between_two_ranks_requeues_this_task_alone_and_the_next_attempt_goes_on(
    array, server
):
    assert attempt(array, server, "SIGUSR1") == 15  # datatrove's handler
    requeued = re.findall("^requeue.*", (array / "asked").read_text(), re.MULTILINE)
    assert requeued == ["requeue 17_0"], "17 would be the whole array"
    assert completed(array) == [0]
    assert attempt(array, server) == 0
    assert completed(array) == [0, 1, 2]
    assert list(server.asked.values()) == [1] * TASKS
    assert len(list((array / "output").glob("*.jsonl"))) == TASKS


# The time limit ----------------------------------------------------------------------------------


@pytest.mark.matrix("knows_its_end", [True, False])
def test_a_rank_that_starts_just_before_the_time_limit_starts_nothing_and_requeues(
    tmp_path,
    server,
    monkeypatch,
    reraised,
    log,
    knows_its_end,
):
    monkeypatch.setattr(slurm_job, "_first_asked", {})
    now = int(time.time())
    if knows_its_end:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(now + 3600))
    else:  # Slurm before 23.02 must be asked
        monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        write_program(tmp_path / "squeue", f"#!/bin/sh\ndate -d @{now + 3600} +%FT%T\n")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def once_the_end_is_known(document, generate):
        await until_async(lambda: slurm_job._first_asked)
        return await ask(document, generate)

    step = runner(tmp_path, server, once_the_end_is_known)
    step.run(documents(3), 0, 3)
    monkeypatch.setattr(slurm_job, "time", SimpleNamespace(time=lambda: now + 3540.0))
    step.run(documents(3), 1, 3)  # 60 s are enough
    assert len(server.payloads) == 6
    monkeypatch.setattr(slurm_job, "time", SimpleNamespace(time=lambda: now + 3590.0))
    with pytest.raises(Preempted, match="Stopped by the end of the job's time limit"):
        step.run(documents(3), 2, 3)
    assert reraised == [signal.SIGUSR1]
    assert len(server.payloads) == 6
    assert not (tmp_path / "checkpoints/00002").exists(), "nothing was started"
    assert "is too near. The job's next attempt" in "".join(log)


@pytest.mark.parametrize(
    "first, now, stops",
    [
        (0, 0, 550),  # the first rank
        (0, 549, 550),  # a later one has no time of its own, however short
        (560, 560, 580),  # the first rank of a process that started late: half of what it has
    ],
)
def test_half_of_a_short_time_is_for_the_process_and_not_for_each_rank(
    monkeypatch, first, now, stops
):
    reserve = 50
    monkeypatch.setattr(slurm_job, "_first_asked", {})
    clock = [first]
    monkeypatch.setattr(slurm_job, "time", SimpleNamespace(time=lambda: clock[0]))
    slurm_job.stop_time(600, reserve)
    clock[0] = now
    assert slurm_job.stop_time(600, reserve) == stops
    assert not slurm_job.is_time_up(reserve)
    clock[0] = stops
    assert not slurm_job.is_time_up(reserve), "this process is in no job"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert slurm_job.is_time_up(reserve)
