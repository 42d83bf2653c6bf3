"""Several endpoints of one model: each with its URL, key, name of the model, limits and prices."""

from collections import Counter

import pytest

from datatrove_ckpt.testing import FakeServer
from tests.jobs import rows, runner
from tests.yaml_jobs import job_yaml, write_job

KEYS = {"FIRST_KEY": "key-of-the-first-7Q", "SECOND_KEY": "key-of-the-second-7Q"}


@pytest.fixture
def two(monkeypatch):
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    with FakeServer(_answer_to) as first, FakeServer(_answer_to) as second:
        yield first, second


def _answer_to(payload, times):
    """Not the model's name, which is another one at each endpoint."""
    return f"answer to {payload['messages'][-1]['content']}"


def ends(*servers, **settings):
    """Records of the endpoints; ``settings``: of the first one."""
    records = [{"url": one.url, "model": f"m-{n}"} for n, one in enumerate(servers)]
    records[0] |= settings
    return records


def step(folder, endpoints, **settings):
    changes = {"endpoint_url": None, "endpoints": endpoints, "max_concurrent_generations": 1}
    config = {"model_name_or_path": "org/m", **changes, **settings.pop("config", {})}
    return runner(folder, FakeServer(), config=config, **settings)


def asked(server):
    return [payload["messages"][-1]["content"] for payload in server.payloads]


def who(folder):
    return [row["metadata"].get("rollout_results_endpoint") for row in rows(folder)]


YAML = """server_type: endpoint, model_name_or_path: org/m, max_concurrent_generations: 1, endpoints: [
  {url: "FIRST", api_key_env: FIRST_KEY, model: m-1, requests_per_minute: 3, prices: {prompt: 1, completion: 2}},
  {url: "SECOND/v1", api_key_env: SECOND_KEY, tokens_per_minute: 200000, prices: {completion: 5}}]"""


def test_a_job_in_yaml_spills_in_order_and_pays_each_endpoints_prices(here, command, two):
    first, second = two
    config = YAML.replace('FIRST"', f'{first.url}"').replace("SECOND/", f"{second.url}/")
    write_job(here, job_yaml(config), [f"text {n}" for n in range(8)])
    first.usage = second.usage = {"prompt_tokens": 1000, "completion_tokens": 100}
    said = command("run", "job.yaml")
    assert [payload["model"] for payload in first.payloads] == ["m-1"] * 3
    assert [payload["model"] for payload in second.payloads] == ["org/m"] * 5
    bill = (3 * (1000 * 1 + 100 * 2) + 5 * 100 * 5) / 1e6
    assert f"cost {bill:.6g}" in said
    assert Counter(who(here)) == {first.url: 3, f"{second.url}/v1": 5}
