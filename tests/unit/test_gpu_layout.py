"""What ``doctor`` says, by arithmetic, of a model on this node's GPUs. The configs are those of the
hub, without what does not count.
"""

import json

import pytest
from huggingface_hub import constants

from datatrove_ckpt.cli.short_form import make_executor
from datatrove_ckpt.run_folder.gpu_layout import layouts
from datatrove_ckpt.run_folder.run_plan import RunPlan
from datatrove_ckpt.testing import FakeServer
from tests.yaml_jobs import doctor_lines, write_rows

_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
_QWEN2_72B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
_QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "dtype": "bfloat16",
}
_MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
_GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "quantization_config": {"quant_method": "mxfp4"},
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
}
_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "torch_dtype": "bfloat16",
}
_WEIGHTS = {
    "LlamaForCausalLM": 16060522496,
    "Qwen2ForCausalLM": 145412407296,
    "Qwen3ForCausalLM": 65524246528,
    "MistralForCausalLM": 14496047104,
    "GptOssForCausalLM": 13761264768,
    "DeepseekV3ForCausalLM": 1369062772000,
}
_H100 = "81559, Disabled"


def write_model(folder, config, **changes):
    folder.mkdir(parents=True)
    config = {"quantization_config": None, **config, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": _WEIGHTS[config["architectures"][0]]}}
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


def test_a_model_that_fits_one_gpu_is_copied_and_not_divided(node, here):
    write_model(here / "model", _LLAMA_8B)
    assert node(8, _H100, "--tp=8") == {
        "layout": "note: fits 1 GPU (15 GB of weights; a GPU gives 70.3 GB): `replicas: 8`, "
        "`tp: 1`; `replicas: 1`, `tp: 8` runs fewer copies."
    }
    assert node(8, _H100) == {}, "the short form makes eight replicas"
    halves = node(8, _H100, "--tp=8", "--tasks=2", "--workers=2")
    assert "`replicas: 4`, `tp: 1`; `replicas: 1`" in halves["layout"]
    assert node(8, _H100, "--tp=4", "--pp=2") == {}


def test_weights_that_do_not_fit_are_divided(node, here):
    write_model(here / "model", _QWEN2_72B)
    assert node(4, _H100) == {
        "layout": "warning: does not fit 1 GPU (135 GB of weights; a GPU gives 70.3 GB). Set "
        "`tp: 2`."
    }
    assert node(1, _H100)["layout"].endswith("a GPU gives 70.3 GB).")
    quantized = {"quantization_config": {"quant_method": "awq"}}
    write_model(here / "awq", _QWEN2_72B, **quantized)
    index = {"metadata": {"total_size": 41_000_000_000}}
    (here / "awq/model.safetensors.index.json").write_text(json.dumps(index))
    assert node(1, _H100, model="awq") == {}


def test_few_answers_at_once_name_what_makes_room(node, here):
    """61 GiB of weights leave 9.25 GiB, and a token takes 256 KiB: room for 37,900 tokens."""
    write_model(here / "model", _QWEN3_32B)
    long = ("--tp=1", "--max-tokens=3000", "--model-max-context=8192")
    assert node(2, _H100, *long) == {
        "KV cache": "note: KV for 9 answers of 4,000 tokens at once (95 % of 40 rows, by "
        "characters / 4 and max_tokens; 61 GB of weights; a GPU gives 70.3 GB). `model_kwargs: "
        "{kv_cache_dtype: fp8}` (before a run begins) doubles that. `tp: 2` makes more room."
    }
    fp8 = node(1, _H100, *long, "--model-kwargs={kv_cache_dtype: fp8}")["KV cache"]
    assert "KV for 18 answers" in fp8
    assert fp8.endswith("70.3 GB).")
    less = node(1, _H100, *long, "--model-kwargs={gpu-memory-utilization: 0.88}")["KV cache"]
    assert "KV for 6 answers" in less
    assert node(1, _H100) == {}, "no length is known"


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
    write_model(here / "model", _QWEN3_32B)
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
    write_model(cached / "snapshots/abc", _MISTRAL_7B)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    said = "note: fits 1 GPU (13.5 GB of weights; a GPU gives 19.1 GB): `replicas: 2`, `tp: 1`; "
    said += "`replicas: 1`, `tp: 2` runs fewer copies."
    flags = ("--tp=2", "--max-tokens=200")
    found = node(2, "24564, [N/A]", *flags, model="mistralai/Mistral-7B-v0.3")
    assert found == {"layout": said}
    assert node(2, "24564, [N/A]", *flags, model="mistralai/another") == {}
    # One file, of 32 bits, which an engine loads as 16.
    write_model(here / "model", _MISTRAL_7B, torch_dtype="float32")
    (here / "model/model.safetensors.index.json").unlink()
    with (here / "model/model.safetensors").open("wb") as file:
        file.truncate(2 * _WEIGHTS["MistralForCausalLM"])
    assert node(2, "24564, [N/A]", *flags) == {"layout": said}


@pytest.mark.parametrize(
    "config, flag",
    [
        (_GPT_OSS_20B, ""),
        (_DEEPSEEK_V3, ""),
        ({**_MISTRAL_7B, "sliding_window": 4096}, ""),
        ({**_LLAMA_8B, "torch_dtype": "float64"}, ""),
        ({**_LLAMA_8B, "num_hidden_layers": None}, ""),
        (_LLAMA_8B, "--model-kwargs={quantization: fp8}"),
        (_LLAMA_8B, "--model-kwargs={kv_cache_dtype: int4_per_token_head}"),
        (_LLAMA_8B, "--server-type=sglang"),
    ],
)
def test_what_is_not_known_is_not_said(node, here, config, flag):
    write_model(here / "model", config)
    assert node(2, _H100, "--tp=2", *filter(None, [flag])) == {}


@pytest.mark.parametrize("line", ["81559, Enabled", "[N/A], Disabled", ""])
def test_gpus_whose_memory_is_not_known(node, here, line):
    write_model(here / "model", _LLAMA_8B)
    assert node(2, line, "--tp=2") == {}


def test_tune_tries_the_other_ways_to_use_all_gpus(node, here, command):
    write_model(here / "model", _QWEN3_32B)
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
    write_model(here / "model", _QWEN3_32B)
    with FakeServer() as server:
        server.usage = {"prompt_tokens": 0, "completion_tokens": 0}
        job = ("run", "--input", "input.jsonl", "--prompt", "{text}", "--model", "model")
        command(*job, "--endpoint", server.url, "--run-folder", "run", "--sample", 3)
    assert "characters / 4" in node(1, _H100, "--max-tokens=3000")["KV cache"]
