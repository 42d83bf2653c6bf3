"""Price tiers: they change price and waiting, and neither the run nor the answers."""

from __future__ import annotations

import pytest

from datatrove_ckpt.errors import CheckpointMismatch, ServerError
from datatrove_ckpt.rollouts import PromptRollout
from datatrove_ckpt.testing import FakeServer
from tests.jobs import Budget, documents, rows, runner


def of_config(params):
    return {"config": {"default_generation_params": params, "max_concurrent_generations": 1}}


def of_prompt(params):
    rollout = PromptRollout("{text}", generation_params=params)
    return {"rollout": rollout, "config": {"max_concurrent_generations": 1}}


SENT = {"temperature": 0.5, "extra_body": {"top_k": 5}}
BEFORE = {**SENT, "service_tier": "flex", "user": "a"}
AFTER = [
    {**SENT, "service_tier": "priority", "metadata": {"b": "c"}, "priority": 7},
    {**SENT, "service_tier": ["flex", "default"], "prompt_cache_key": "k"},
    {"temperature": 0.5, "extra_body": {"top_k": 5, "safety_identifier": "s"}},
]


@pytest.mark.parametrize("way", [of_config, of_prompt])
def test_a_run_goes_on_in_another_tier_and_no_saved_answer_is_requested_again(tmp_path, way):
    def run(params):
        runner(tmp_path, server, records_per_chunk=50, **way(params)).run(documents(50))

    budget = Budget()
    with FakeServer(status=budget) as server:
        for params in [BEFORE, *AFTER]:
            budget.left = 3  # within a chunk: the other answers are in the request cache
            with pytest.raises(ServerError):
                run(params)
        budget.left = 50
        run(BEFORE)
        answered = len(server.payloads) - len([BEFORE, *AFTER])
        with pytest.raises(CheckpointMismatch, match=r"generation_params\.temperature: "):
            run({**BEFORE, "temperature": 0.7})
    assert answered == 50 == len(rows(tmp_path))


def test_a_request_takes_the_next_tier_when_the_first_one_is_full_for_half_of_the_patience(
    tmp_path,
):
    def full(payload, times):
        tiers.append(payload["service_tier"])
        return 498 if payload["service_tier"] == "flex" else None

    tiers = []
    params = {"service_tier": ["flex", "default"]}
    with FakeServer(status=full) as server:
        runner(
            tmp_path,
            server,
            config={"default_generation_params": params, "server_patience_seconds": 2.0},
        ).run(documents(4))
    assert tiers[:4] == ["flex"] * 4
    assert tiers.count("default") == 4 == len(rows(tmp_path))
    assert list(server.payloads[-1])[-1] == "service_tier"
