"""What ``doctor`` says, by arithmetic, of a model on this node's GPUs. The configs are those of the
hub, without what does not count.
"""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from datatrove_ckpt.cli.short_form import make_executor
from datatrove_ckpt.run_folder.gpu_layout import layouts
from datatrove_ckpt.run_folder.run_plan import RunPlan
from datatrove_ckpt.testing import FakeServer
from tests import golden
from tests.yaml_jobs import doctor_lines, write_rows

_MODELS = json.loads((Path(__file__).parents[1] / "data/models.json").read_text())
"""The bytes of their weights, and their configs."""
_H100 = "81559, Disabled"


def write_model(folder, name, weights=None, **changes):
    folder.mkdir(parents=True)
    whole, config = _MODELS[name]
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": None, **config, **changes})
    )
    index = {"metadata": {"total_size": weights or whole}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def node(here, monkeypatch, command):
    """``node(gpus, line, *flags)``: what doctor says on a node of so many GPUs, each of which
    nvidia-smi describes with the line, of a job that uses the model in ``model/``.
    """
    write_rows("input.jsonl", [{"text": "a" * 4000, "id": str(number)} for number in range(40)])

    def doctor(gpus, line, *flags, model="model"):
        program = here / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n" + f"echo '{line}'\n" * gpus)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        job = ("--input", "input.jsonl", "--prompt", "{text}", "--model", model)
        said = command("doctor", *job, "--run-folder", "run", *flags, code=None).out
        lines = doctor_lines(said)
        return {name[6:]: text for name, text in lines.items() if name.startswith("GPUs, ")}

    return doctor


def test_a_context_that_no_row_uses(node, here):
    """Also without a GPU: llama.cpp keeps the room of a whole context for each request."""
    rows = [{"text": "a" * 4000, "id": str(number)} for number in range(97)]
    write_rows("input.jsonl", [*rows, *({"text": "a" * 40_000} for _ in range(3))])
    flags = ("--max-tokens=3000", "--model-max-context=131072")
    said = (
        "note: `model_max_context` 131,072 is never used by this input: 4,096 holds 97.0 % of 100 "
        "rows, by characters / 4 and max_tokens."
    )
    assert node(0, "", *flags, "--server-type=llamacpp") == {"context": said}
    assert node(0, "", "--max-tokens=3000", "--model-max-context=12288") == {}, "a row needs more"
    assert node(0, "", *flags, "--endpoint=http://127.0.0.1:9") == {}


def test_a_sample_has_measured_the_lengths(node, here, command):
    write_model(here / "model", "Qwen3 32B")
    with FakeServer() as server:
        server.usage = {"prompt_tokens": 2000, "completion_tokens": 6000}
        job = ("run", "--input", "input.jsonl", "--prompt", "{text}", "--model", "model")
        command(*job, "--endpoint", server.url, "--run-folder", "run", "--sample", 3)
    (here / "run/checkpoints/sample-00002").mkdir()  # it was killed
    flags = ("--max-tokens=30000", "--model-max-context=65536")
    assert node(1, _H100, *flags) == {
        "context": "note: `model_max_context` 65,536 is never used by this input: 8,192 holds 100 "
        "% of 3 rows of the sample.",
        "KV cache": "note: KV for 4 answers of 8,000 tokens at once (95 % of 3 rows of the sample; "
        "61 GB of weights; a GPU gives 70.3 GB). `model_kwargs: {kv_cache_dtype: fp8}` (before a "
        "run begins) doubles that.",
    }


def test_a_model_in_the_hubs_cache(node, here, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hub"))
    cached = here / "hub/models--mistralai--Mistral-7B-v0.3"
    write_model(cached / "snapshots/abc", "Mistral 7B")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    said = "note: fits 1 GPU (13.5 GB of weights; a GPU gives 19.1 GB): `replicas: 2`, `tp: 1`; "
    said += "`replicas: 1`, `tp: 2` runs fewer copies."
    flags = ("--tp=2", "--max-tokens=200")
    found = node(2, "24564, [N/A]", *flags, model="mistralai/Mistral-7B-v0.3")
    assert found == {"layout": said}
    assert node(2, "24564, [N/A]", *flags, model="mistralai/another") == {}
    # One file, of 32 bits, which an engine loads as 16.
    write_model(here / "model", "Mistral 7B", torch_dtype="float32")
    (here / "model/model.safetensors.index.json").unlink()
    with (here / "model/model.safetensors").open("wb") as file:
        file.truncate(2 * _MODELS["Mistral 7B"][0])
    assert node(2, "24564, [N/A]", *flags) == {"layout": said}


@golden.rows("gpu_layouts")
def test_what_is_said_of_a_model_on_gpus(node, here, code):
    """By the weights: a Qwen3 of 61 GiB leaves 9.25 GiB of a GPU, and a token takes 256 KiB: room
    for 37,900 tokens. What is not known is not said.
    """

    def said(model, gpus, *flags, line=_H100, **changes):
        write_model(here / "model", model, **changes)
        return node(gpus, line, *flags)

    golden.show("gpu_layouts", code, {"said": said})


def test_tune_tries_the_other_ways_to_use_all_gpus(node, here, command):
    write_model(here / "model", "Qwen3 32B")
    with FakeServer() as server:
        server.usage = {"prompt_tokens": 2000, "completion_tokens": 6000}
        job = ["--input=input.jsonl", "--prompt={text}", "--model=model", "--run-folder=run"]
        command("run", *job, "--endpoint", server.url, "--sample", 3)
    node(4, _H100)
    for flags, ways in (
        (["--tp=4"], [(4, 1), (2, 2)]),
        (["--workers=2", "--tasks=2"], [(1, 2)]),
        (["--model-kwargs={gpu-memory-utilization: 0.8}", "--tp=2"], [(2, 2), (1, 4)]),
        (["--tp=4", "--model-kwargs={revision: abc}"], []),
    ):
        _, executor = make_executor(None, [*job, *flags])
        found = layouts(RunPlan(executor).runners[0])
        assert found == [{"replicas": replicas, "tp": tp} for replicas, tp in ways]


def test_a_sample_without_usage_measures_nothing(node, here, command):
    write_model(here / "model", "Qwen3 32B")
    with FakeServer() as server:
        server.usage = {"prompt_tokens": 0, "completion_tokens": 0}
        job = ("run", "--input", "input.jsonl", "--prompt", "{text}", "--model", "model")
        command(*job, "--endpoint", server.url, "--run-folder", "run", "--sample", 3)
    assert "characters / 4" in node(1, _H100, "--max-tokens=3000")["KV cache"]
