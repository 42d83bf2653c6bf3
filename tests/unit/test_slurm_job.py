"""Requests to Slurm, and when they are made. tests/real/test_slurm.py uses a real Slurm."""

import os
import re

import pytest

from datatrove_ckpt.process.slurm_job import job_id, job_id_in_environment, requeue_if_preempted
from tests.slurm_array import enter

PREEMPTED = "JobId=17 ArrayJobId=17 ArrayTaskId=0 JobState=RUNNING Reason=None PreemptTime=2026-11-20T07:26:38"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The commands that scontrol gets in a task of an array. It answers with the file "record"."""
    enter(tmp_path, monkeypatch, f"cat {tmp_path}/record", os.environ["PATH"])
    (tmp_path / "record").write_text(PREEMPTED)
    monkeypatch.setenv("SLURM_PROCID", "0")
    return tmp_path / "asked"


def test_a_task_that_is_preempted_with_a_grace_time_is_requeued_and_it_alone(asked):
    requeue_if_preempted()
    assert asked.read_text().splitlines() == ["--oneliner show job 17_0", "requeue 17_0"]


@pytest.mark.parametrize(
    "record",
    [
        PREEMPTED.replace("2026-11-20T07:26:38", "None"),  # a signal from another process
        PREEMPTED.replace("RUNNING", "COMPLETING"),  # no grace time: Slurm requeues it
        "JobId=17 JobState=COMPLETING Reason=None PreemptTime=None",  # scancel
        "JobId=17 JobState=COMPLETING Reason=TimeLimit PreemptTime=None",
        "",
    ],
)
def test_no_other_task_is_requeued_least_of_all_a_cancelled_one(asked, record):
    (asked.parent / "record").write_text(record)
    requeue_if_preempted()
    assert asked.read_text().splitlines() == ["--oneliner show job 17_0"]


def test_one_task_of_a_step_asks_for_all_and_a_slurm_that_does_not_answer_is_a_warning(
    asked, monkeypatch, log
):
    monkeypatch.setenv("SLURM_PROCID", "1")
    requeue_if_preempted()
    assert not asked.exists()
    monkeypatch.setenv("SLURM_PROCID", "0")
    (asked.parent / "record").unlink()
    requeue_if_preempted()
    assert re.search(r"Job 17_0 could not be requeued: .*record.*No such file", log[-1])


def test_a_job_is_named_as_slurms_commands_need_it(monkeypatch):
    for name in ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    assert job_id() is None
    with job_id_in_environment():
        assert "SLURM_JOB_ID" not in os.environ
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert job_id() == "17"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with job_id_in_environment():
        assert os.environ["SLURM_JOB_ID"] == "17_3"
    assert os.environ["SLURM_JOB_ID"] == "17"
