"""The JSON schema takes what ``run`` takes, and refuses what it refuses, as far as a schema can say it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft7Validator

from datatrove_ckpt.cli.full_config import make_schema
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.cli.yaml_config import load, read_value
from tests.pages import ROOT, blocks
from tests.unit.test_yaml_config import JOB

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

READER = "class_path: JsonlReader\n        init_args: {data_folder: documents}"


@cache
def validator() -> Draft7Validator:
    return Draft7Validator(make_schema())


def mistakes(content: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator().iter_errors(content)]


def test_the_command_prints_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    Draft7Validator.check_schema(printed)
    assert printed == make_schema()


def test_every_config_fits() -> None:
    assert {path.stem: mistakes(load(path)) for path in CONFIGS} == {path.stem: [] for path in CONFIGS}


def test_whole_files_of_the_pages_fit() -> None:
    whole = [content for block in blocks("yaml") if "executor" in (content := read_value(block.text))]
    assert whole != []
    assert [mistakes(content) for content in whole] == [[]] * len(whole)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("rollout_fn: chat", "rollout_fn: {class_path: my_module.Mine, init_args: {any: thing}}"),
        ("rollout_fn: chat", "rollout_fn: chat\n          shared_context: my_module.shared"),
        ("rollout_fn: chat", "rollout_fn: chat\n          sync_seconds: auto"),
        ("data_folder: documents", "data_folder: [s3://b/x, {anon: true}]"),
        (f"- {READER}", "- my_module.my_step"),
        (f"- {READER}", "- class_path: LambdaFilter\n        init_args: {filter_function: my_module.f}"),
        ("logging_dir: logs", "logging_dir: logs\n    depends: {class_path: LocalPipelineExecutor, init_args: "
         "{pipeline: []}}"),
        ("config: {", "config: {endpoint_url: [http://a, http://b], default_generation_params: {stop: [a]}, "),
        ("config: {server_type: dummy, model_name_or_path: m}",
         "config: {class_path: InferenceConfig, init_args: {server_type: dummy, model_name_or_path: m}}"),
    ],
)  # fmt: skip
def test_what_run_takes_fits(old: str, new: str) -> None:
    assert old in JOB
    assert mistakes(read_value(JOB.replace(old, new, 1))) == []


def test_the_short_form_fits_and_its_mistakes_are_named() -> None:
    job = {"run_folder": "x", "input": "d", "prompt": "{text}", "model": "m", "max_tokens": 5, "limit": 3}
    assert mistakes({**job, "slurm": {"partition": "gpu"}, "records_per_chunk": 10}) == []
    assert mistakes({**job, "max_token": 5}) != []
    assert mistakes({**job, "limit": "many"}) != []


READ, RUNNER = "pipeline[0]", "pipeline[1].init_args"


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("logging_dir", "logging_dit", ""),
        ("LocalPipelineExecutor", "SlurmPipelineExecutor", ""),
        ("data_folder: documents", "limt: 3, data_folder: documents", f"{READ}.init_args"),
        ("data_folder: documents", "data_folder: d, compression: gz", f"{READ}.init_args.compression"),
        ("        init_args: {data_folder: documents}\n", "", READ),
        ("chat", "chta", f"{RUNNER}.rollout_fn"),
        ("chat", "{class_path: PromptRollout, init_args: {zzz: 1}}", f"{RUNNER}.rollout_fn.init_args"),
        ("server_type: dummy", "server_type: vlm", f"{RUNNER}.config.server_type"),
        ("server_type: dummy, ", "", f"{RUNNER}.config"),
        ("dummy", "dummy, max_concurrent_generations: Auto", f"{RUNNER}.config.max_concurrent_generations"),
        ("dummy", "dummy, api_key: sk-1", f"{RUNNER}.config.api_key"),
        ("config: {server_type: dummy, model_name_or_path: m}", "records_per_chunk: 1.5", RUNNER),
        ("checkpoints_local_dir: checkpoints", "shared_context: 3", f"{RUNNER}.shared_context"),
        ("executor:", "executer:", "$"),
        ("LocalPipelineExecutor", "JsonlReader", "$.executor.class_path"),
    ],
)
def test_what_run_refuses_does_not_fit_and_the_place_is_named(old: str, new: str, place: str) -> None:
    assert old in JOB
    found = mistakes(read_value(JOB.replace(old, new, 1)))
    path = f"{place}: " if place.startswith("$") else f"$.executor.init_args{'.' * bool(place)}{place}: "
    assert any(one.startswith(path) for one in found), found


def test_every_argument_of_the_runner_is_explained() -> None:
    found = make_schema()["definitions"]
    for name in ("datatrove_ckpt.runner.InferenceRunner", "datatrove_ckpt.config.inference_config.InferenceConfig"):
        assert [key for key, one in found[name]["properties"].items() if not one.get("description")] == []
    assert "gzip" in json.dumps(found["datatrove_ckpt.readers.jsonl.JsonlReader"]["properties"]["compression"])
