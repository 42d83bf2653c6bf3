"""A real vLLM with real weights, on CPU, through InferenceRunner, under every fault that we can
cause.

    pytest tests/real/test_vllm.py -s

See environment.py for the set-up. Each case ends with every document answered at full length, and
no document re-requested after its answer. The tests spend most of their time in starts of vLLM,
which import torch.
"""

import itertools
import json
import os
import signal
import subprocess
from contextlib import contextmanager

import pytest
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.errors import DocumentFailed
from datatrove_ckpt.inference.servers.server import free_port
from tests.bench.engine.work import INSTRUCTION
from tests.real import environment
from tests.real.faults import (
    Job,
    check_faults,
    check_killed_runner,
    preempt,
    process_named,
    terminate_server,
)

pytestmark = pytest.mark.timeout(900)  # the first test also sets up the environment

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",  # saves two imports of torch per start
}


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
    plain.check("plain run", restarts=0)
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
    check_killed_runner(job(tmp_path), "kill -9 of the runner, and resume", after=24)


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
    preempted.check("preempted twice", restarts=0, attempts=3)


@contextmanager
def vllm_server(folder, *more, model=None):
    """The address of a server that several runs use.

    ``more``: further flags. ``model``: its folder; None: SmolLM2.
    """
    port = free_port()  # none that an outgoing connection may get before the engine is loaded
    flags = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        "1024",
        "--dtype",
        "bfloat16",
    ]
    command = [environment.vllm_python(), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model or environment.model()]
    with (folder / "server.log").open("wb") as log:
        arguments = [*command, *flags, "--enforce-eager", "--max-num-seqs", "16", *more]
        environ = {**os.environ, **ENVIRONMENT}
        server = subprocess.Popen(
            arguments, env=environ, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}"  # the runs wait until it answers
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # SIGTERM takes it minutes, at times
        server.wait()


def sampled(folder, url, at_once, interruption=None):
    """The answers of 48 documents at temperature 1, by id.

    The first attempt stops after so many of them.
    """
    answered = itertools.count(1)  # a list would be a part of the rollout's identity

    async def rollout(document, generate):
        result = await generate({"messages": conversation(int(document.id))})
        if next(answered) == interruption:
            raise RuntimeError("interrupted")
        return result

    def attempt():
        config = InferenceConfig(
            "endpoint",
            environment.model(),
            endpoint_url=url,
            seed=1,
            max_concurrent_generations=at_once,
            default_generation_params={"max_tokens": 24, "temperature": 1.0},
            server_patience_seconds=300.0,
            server_ready_max_attempts=60,
        )
        writer = JsonlWriter(
            str(folder / "output"), "${rank}_${chunk_index}.jsonl", compression=None
        )
        step = InferenceRunner(
            rollout, config, writer, checkpoints_local_dir=str(folder / "checkpoints")
        )
        step.run(Document(text="note", id=str(number)) for number in range(48))

    if interruption is not None:
        with pytest.raises(DocumentFailed, match="interrupted"):
            attempt()
    attempt()
    rows = [
        json.loads(line)
        for path in (folder / "output").iterdir()
        for line in path.read_text().splitlines()
    ]
    assert len(rows) == 48
    return {row["id"]: row["metadata"]["rollout_results"][0]["text"] for row in rows}


@pytest.mark.full
def test_with_a_seed_a_request_that_is_sent_again_samples_the_same(tmp_path, real_ready_window):
    with vllm_server(tmp_path) as url:
        alone = sampled(tmp_path / "alone", url, 1)
        interrupted = sampled(tmp_path / "interrupted", url, 1, 20)
        together = sampled(tmp_path / "together", url, 16)
        together_interrupted = sampled(tmp_path / "together interrupted", url, 16, 20)

    def equal(first, second):
        return sum(first[name] == text for name, text in second.items())

    print(
        f"\nequal answers of 48: one at a time, interrupted: {equal(alone, interrupted)}; 16 at once, interrupted: "
        f"{equal(together, together_interrupted)}; one at a time and 16 at once: {equal(alone, together)}"
    )
    assert len(set(alone.values())) > 24, "at temperature 1 the answers differ"
    assert interrupted == alone
    # Floats depend on what the engine computes together. Without seeds, hardly an answer of 24
    # tokens is equal.
    assert equal(alone, together) >= 12
    assert equal(together, together_interrupted) >= 12


def conversation(number):
    question = f"Note {number}: the bridge of town {number} has {3 * number + 2} arches."
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
