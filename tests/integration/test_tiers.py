"""Price tiers: they change price and waiting, and neither the run nor the answers."""

import json
from collections import Counter

import pytest

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.errors import CheckpointMismatch, ServerError
from datatrove_ckpt.inference.client.body import RequestBody, with_field
from datatrove_ckpt.inference.client.responses import token_counts
from datatrove_ckpt.rollouts import PromptRollout
from datatrove_ckpt.testing import FakeServer
from tests import golden
from tests.jobs import Budget, rows, run_job
from tests.yaml_jobs import write_input

TWICE = {"max_concurrent_generations": 1, "rollouts_per_document": 2}


def of_config(params):
    return {"config": {**TWICE, "default_generation_params": params}}


def of_prompt(params):
    rollout = PromptRollout("{text}", generation_params=params)
    return {"rollout": rollout, "config": TWICE}


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
        run_job(tmp_path, server, 10, records_per_chunk=50, **way(params))

    budget = Budget()
    with FakeServer(status=budget) as server:
        for params in [BEFORE, *AFTER]:
            budget.left = 3  # so one answer of a document is in the request cache
            with pytest.raises(ServerError):
                run(params)
        budget.left = 100
        run(BEFORE)
        answered = len(server.payloads) - len([BEFORE, *AFTER])
        with pytest.raises(CheckpointMismatch, match=r"generation_params\.temperature: "):
            run({**BEFORE, "temperature": 0.7})
    assert answered == 20
    assert len(rows(tmp_path)) == 10


def test_a_run_goes_on_without_the_tier_that_was_its_only_parameter(tmp_path, server):
    run_job(tmp_path, server, 2, **of_prompt({"service_tier": "flex"}))
    run_job(tmp_path, server, 2, **of_prompt(None))


@pytest.mark.usefixtures("sleeps")
def test_a_request_takes_the_next_tier_when_the_first_one_is_full_for_half_of_the_patience(
    tmp_path,
):
    def full(payload, times):
        tiers.append(payload["service_tier"])
        return 498 if payload["service_tier"] == "flex" else None

    tiers = []
    params = {"service_tier": ["flex", "default"]}
    with FakeServer(status=full) as server:
        run_job(
            tmp_path,
            server,
            4,
            config={"default_generation_params": params, "server_patience_seconds": 1000.0},
        )
    assert tiers[:4] == ["flex"] * 4
    assert tiers.count("default") == 4 == len(rows(tmp_path))
    assert list(server.payloads[-1])[-1] == "service_tier"


USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 50,
    "total_tokens": 1050,
    "prompt_tokens_details": {"cached_tokens": 900},
    "completion_tokens_details": {"reasoning_tokens": 30},
}
PRICES = {
    "prompt": 1,
    "cached": 0.1,
    "cache_write": 1.25,
    "completion": 8,
    "tiers": {"flex": 0.5},
}


def test_the_cost_is_the_sum_of_the_servers_bills_over_attempts_and_tiers(here, command):
    """With tokens from the server's cache and into it, in two tiers, and with answers from the
    request cache, which cost nothing. While it is under way, status estimates the whole.
    """
    write_input(here, [f"text {number}" for number in range(20)])
    budget = Budget()
    budget.left = 9
    words = ["run", "--input", "input", "--prompt", "{text}", "--model", "fake"]
    words += ["--run-folder", "run", "--rollouts-per-document=2", "--prices", json.dumps(PRICES)]
    with FakeServer(status=budget) as server:
        server.usage = USAGE
        words += ["--endpoint", server.url, "--max-concurrent-generations=1"]
        command(*words, "--service-tier", "flex", code=1)
        assert ", cost 0.002655; about 0.0133 for the whole input" in command("status", "run").out
        budget.left = 100
        details = {"cached_tokens": 600, "cache_write_tokens": 300}
        server.usage = {**USAGE, "prompt_tokens_details": details}
        closing = command(*words, "--service-tier", "priority").out
    sent = Counter(payload["service_tier"] for payload in server.payloads)
    assert sent == {"flex": 10, "priority": 31}  # one was refused
    bill = 9 * 0.5 * (100 * 1 + 900 * 0.1 + 50 * 8)
    bill = (bill + 31 * (100 * 1 + 600 * 0.1 + 300 * 1.25 + 50 * 8)) / 1e6
    paid = (
        "26,700 of 40,000 prompt tokens cached by servers, 1,200 of 2,000 completion tokens for "
        f"reasoning, 9 answers in tier flex, 31 answers in tier priority, cost {bill:.6g}"
    )
    assert f"Paid: {paid}." in closing
    assert paid in command("status", "run").out
    work = command.json("status", "run")["totals"]["work"]
    assert work["cost"] == round(bill * 1e9)
    assert work["requests"] == 40


@pytest.mark.parametrize("code", golden.sections("usages"))
def test_the_usages_of_all_apis_are_read(code):
    golden.show("usages", code, {"token_counts": token_counts, "USAGE": USAGE})


def test_a_body_with_media_has_its_tier_too():
    body = with_field(RequestBody([b'{"a":"', b'","b":1}'], [b"picture"]), b"service_tier", "flex")
    assert json.loads(b"".join(body)) == {"a": "cGljdHVyZQ==", "b": 1, "service_tier": "flex"}
    assert len(body) == len(b"".join(body))


def test_prices_of_nothing_and_of_a_thousandth_are_prices():
    InferenceConfig("dummy", "m", prices={"prompt": 0, "cached": 0.001, "tiers": {"flex": 1e-4}})
