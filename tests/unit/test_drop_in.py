"""What datatrove's InferenceRunner and config take, ours take: names, order, defaults, refusals,
the object itself.
"""

import dataclasses
import inspect
import json

import pytest
from datatrove.pipeline.inference import run_inference as theirs

from datatrove_ckpt import InferenceConfig, InferenceRunner
from tests.jobs import ask, documents, writer


def fields(config):
    made = [field.default_factory for field in dataclasses.fields(config)]
    return [
        (field.name, field.default if factory is dataclasses.MISSING else factory())
        for field, factory in zip(dataclasses.fields(config), made, strict=True)
    ]


def test_the_config_has_datatroves_fields_first_in_its_order_and_with_its_defaults():
    expected = dict(fields(theirs.InferenceConfig)) | {"max_concurrent_generations": "auto"}
    assert fields(InferenceConfig)[: len(expected)] == list(expected.items())


def test_values_that_datatrove_derives_are_the_same():
    for settings in (
        {},
        {"rollouts_per_document": 7},
        {"max_concurrent_generations": 3, "rollouts_per_document": 7},
    ):
        common = {"server_type": "dummy", "model_name_or_path": "m", **settings}
        expected = dataclasses.asdict(theirs.InferenceConfig(**common))
        expected["max_concurrent_generations"] = settings.get("max_concurrent_generations", "auto")
        assert dataclasses.asdict(InferenceConfig(**common)).items() >= expected.items()


@pytest.mark.parametrize(
    "name, value",
    [
        ("server_start_timeout_sec", 0),
        ("server_ready_max_attempts", 0),
        ("server_ready_delay_sec", -0.5),
        ("server_start_max_retries", -1),
    ],
)
def test_the_bounds_of_a_servers_start_are_refused_in_datatroves_words(name, value):
    settings = {"server_type": "dummy", "model_name_or_path": "m", name: value}
    with pytest.raises(ValueError, match=name) as expected:
        theirs.InferenceConfig(**settings)
    with pytest.raises(ValueError, match=str(expected.value)):
        InferenceConfig(**settings)


@pytest.mark.parametrize("method", ["__init__", "run_async"])
def test_the_runner_takes_datatroves_arguments_first(method):
    expected, ours = (
        list(inspect.signature(getattr(kind, method)).parameters.values())
        for kind in (theirs.InferenceRunner, InferenceRunner)
    )
    assert [(one.name, one.default) for one in ours[: len(expected)]] == [
        (one.name, one.default) for one in expected
    ]


def test_a_config_object_of_datatroves_runs(tmp_path, server):
    config = theirs.InferenceConfig(
        server_type="endpoint",
        model_name_or_path="fake",
        endpoint_url=server.url,
        api_key="secret",
        default_generation_params={"max_tokens": 5},
        rollouts_per_document=2,
    )
    InferenceRunner(ask, config, writer(tmp_path), checkpoints_local_dir=str(tmp_path / "c")).run(
        documents(3)
    )
    assert {payload["max_tokens"] for payload in server.payloads} == {5}
    lines = (tmp_path / "output/00000_chunk_00000.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["metadata"]["rollout_results"]) for line in lines] == [2, 2, 2]
