"""A real vLLM with real weights, on CPU, through InferenceRunner, under every fault that we can
cause.

    pytest tests/real/test_vllm.py -s

See environment.py for the set-up. Each case ends with every document answered at full length, and
no document re-requested after its answer. The tests spend most of their time in starts of vLLM,
which import torch.
"""

import os
import signal

import pytest

from tests.real import environment
from tests.real.faults import (
    Job,
    check_faults,
    check_killed_runner,
    preempt,
    process_named,
    terminate_server,
)
from tests.real.vllm_servers import ENVIRONMENT

pytestmark = pytest.mark.timeout(900)  # the first test also sets up the environment


def job(folder, documents=60, too_long=0, **changes):
    settings = {
        "server_type": "vllm",
        "model_name_or_path": environment.model(),
        "server_python": environment.vllm_python(),
        "model_max_context": 1024,
        "model_kwargs": {"dtype": "bfloat16", "enforce-eager": True, "max-num-seqs": 32},
        "use_chat": False,
        "hang_timeout": 60.0,
        **changes,
    }
    return Job(folder, settings, documents=documents, too_long=too_long, environment=ENVIRONMENT)


def kill_engine(process):
    os.kill(process_named("EngineCore", process), signal.SIGKILL)


def stop_engine(process):
    os.kill(process_named("EngineCore", process), signal.SIGSTOP)


@pytest.mark.full
def test_a_plain_run_and_prompts_that_are_too_long(tmp_path):
    plain = job(tmp_path, too_long=2, max_concurrent_generations="auto")
    plain.run()
    plain.check(restarts=0)
    letters = plain.dead_letters()
    assert sorted(letters) == ["too-long-0", "too-long-1"]
    assert all("HTTP 400" in error for error in letters.values())


def test_everything_is_answered_at_full_length_after_every_fault_of_the_server(
    tmp_path,
):
    faulty = job(tmp_path, documents=120, hang_timeout=30.0)  # for stop_engine
    check_faults(faulty, [kill_engine, stop_engine, terminate_server], every=25)


@pytest.mark.full
def test_a_killed_runner_resumes(tmp_path):
    check_killed_runner(job(tmp_path), after=24)


@pytest.mark.full
def test_a_signal_to_all_processes(tmp_path):
    # Two requests at a time, so that some are always half done.
    kwargs = {"dtype": "bfloat16", "enforce-eager": True, "max-num-seqs": 2}
    preempted = job(tmp_path, documents=40, model_kwargs=kwargs, max_concurrent_generations=8)
    preempted.concurrency = 8
    assert preempt(preempted, signal.SIGUSR1, after=5) == 0
    # SIGTERM ends vLLM's workers, whatever its flags.
    assert preempt(preempted, signal.SIGTERM, after=20) <= 8
    preempted.run()
    preempted.check(restarts=0, attempts=3)
