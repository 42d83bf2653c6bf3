"""Divides a model among the GPUs of this node, by arithmetic, before anything starts.

GPUs hold the weights, and the KV cache of the answers that are written at once. Nothing is said of
an architecture whose KV cache is not known, as with sliding windows and MLA.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import orjson
from datatrove.data import Document

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.request_cache import read_answers
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import byte_size, percent, plural
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.generation_params import max_tokens_of
from datatrove_ckpt.config.inference_config import dashed_names, visible_gpus
from datatrove_ckpt.generation.recorded_requests import RecordedRequest
from datatrove_ckpt.run_folder.estimate import quantile
from datatrove_ckpt.run_folder.finding import Finding
from datatrove_ckpt.run_folder.run_plan import RunnerPlan

CHARACTERS_PER_TOKEN = 4
_ARCHITECTURES = {
    f"{name}ForCausalLM"
    for name in ("Granite", "Llama", "Mistral", "Mixtral", "Olmo2", "Qwen2", "Qwen3", "Qwen3Moe")
}
_FLAGS_OF_SIZES = {"hf-overrides", "quantization", "revision"}
# Engines load 32 bits as 16, unless told otherwise.
_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
_QUERY = (
    "nvidia-smi",
    "--query-gpu=memory.total,mig.mode.current",
    "--format=csv,noheader,nounits",
)
# Activations, CUDA graphs and a GPU's libraries.
_WORKING_BYTES = 3 << 30
# With fewer answers at once, a GPU mostly reads weights.
_FULL_BATCH = 32


class GpuLayout(NamedTuple):
    """A model on the GPUs of a task. Bytes: what a GPU gives, the weights, and the KV cache of an
    answer with its prompt.
    """

    gpus: int
    gpu: float
    weights: float
    answer: float
    heads: int
    kv_heads: int

    def answers(self, tp: int) -> int:
        """Returns how many answers fit at once; negative if the weights do not."""
        copies = max(1.0, tp / self.kv_heads)  # each GPU has a head
        return int((self.gpu * tp - self.weights) // (self.answer * copies))

    def fitting(self, answers: int) -> list[int]:
        """Returns the values of ``tp`` with which so many answers fit at once."""
        sizes = [tp for tp in (1, 2, 4, 8) if tp <= self.gpus and self.heads % tp == 0]
        return [tp for tp in sizes if self.answers(tp) >= answers]


def read_layout(runner: RunnerPlan, tokens: int) -> GpuLayout | None:
    """Reads the model's folder, or its place in the hub's cache. None: something is not known.

    Args:
        tokens: those of an answer with its prompt.
    """
    config = runner.step.model
    flags = dashed_names(config.model_kwargs)
    workers = runner.plan.tasks
    if runner.plan.workers > 0:
        workers = min(runner.plan.workers, workers)
    gpus = len(visible_gpus()) // workers
    # Neither ``dp``, ``pp`` nor flags in their place.
    if not gpus or config.gpus_each != config.tp:
        return None
    with suppress(LookupError, OSError, TypeError, ValueError):
        share = float(flags.get("gpu-memory-utilization", config.engine.memory_share))
        gpu = _memory_of_gpu() * share - _WORKING_BYTES
        folder = Path(config.model_name_or_path)
        if not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache  # slow to import

            cached = try_to_load_from_cache(str(folder), "config.json")
            folder = Path(cached or folder / "config.json").parent
        model = orjson.loads((folder / "config.json").read_bytes())
        quantization = model.get("quantization_config") or {}
        slides = model.get("sliding_window") and model.get("use_sliding_window", True)
        is_known = model["architectures"][0] in _ARCHITECTURES and not slides
        if (
            gpu <= 0
            or not is_known
            or "kv_cache_scheme" in quantization
            or _FLAGS_OF_SIZES & flags.keys()
        ):
            return None
        index = folder / "model.safetensors.index.json"
        if index.exists():
            weights = orjson.loads(index.read_bytes())["metadata"]["total_size"]
        else:
            weights = (folder / "model.safetensors").stat().st_size
        dtype = flags.get("dtype", "auto")
        if not quantization:
            weights *= _BYTES[dtype] / _BYTES[model.get("dtype") or model["torch_dtype"]]
        heads = model["num_attention_heads"]
        kv_heads = model.get("num_key_value_heads", heads)
        size = model.get("head_dim") or model["hidden_size"] // heads
        elements = 2 * model["num_hidden_layers"] * kv_heads * size * tokens
        answer = elements * _BYTES[flags.get("kv-cache-dtype", dtype)]
        return GpuLayout(gpus, gpu, weights, answer, heads, kv_heads)
    return None


def _memory_of_gpu() -> int:
    """Returns the bytes of this node's smallest GPU; 0 if they are not known."""
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        output = subprocess.run(_QUERY, capture_output=True, text=True, timeout=10).stdout
        if "Enabled" not in output:  # else a process sees a part of a GPU
            return min(int(line.partition(",")[0]) for line in output.splitlines()) << 20
    return 0


def check_layout(runner: RunnerPlan, documents: Sequence[Document]) -> Iterator[Finding]:
    """Checks ``model_max_context`` by the lengths of the input, and how the model divides among the
    GPUs of this node.
    """
    config = runner.step.model
    if not config.engine.package:  # it runs already, or has no model
        return
    tokens = _sampled_tokens(runner.root)
    source = "rows of the sample"
    answer = max_tokens_of(config.default_generation_params)
    if answer and not tokens:
        tokens = [len(each.text) // CHARACTERS_PER_TOKEN + answer for each in documents]
        source = "rows, by characters / 4 and max_tokens"
    source = f"{len(tokens):,} {source}"
    context = config.model_max_context
    length = context
    if tokens:
        length = int(quantile(tokens, 0.95))
        enough = 1 << (length - 1).bit_length()
        # Below the default there is little to save.
        if context > InferenceConfig.model_max_context and context >= max(2 * enough, *tokens):
            held = percent(sum(each <= enough for each in tokens) / len(tokens))
            text = (
                f"`model_max_context` {context:,} is never used by this input: {enough:,} holds "
                f"{held} of {source}."
            )
            yield Finding("note", "context", text)
    gpu_layout = read_layout(runner, length)
    if gpu_layout is None:
        return
    tp = config.tp
    best = min(gpu_layout.fitting(_FULL_BATCH), default=tp)
    replicas = gpu_layout.gpus // best
    at_once = gpu_layout.answers(tp)
    sizes = f"{byte_size(gpu_layout.weights)} of weights; a GPU gives {byte_size(gpu_layout.gpu)}"
    if at_once < 1:
        text = f"does not fit {plural(tp, 'GPU')} ({sizes})."
        for least in gpu_layout.fitting(1)[:1]:
            text += f" Set `tp: {least}`."
        yield Finding("warning", "layout", text)
    elif best <= tp and replicas > config.replicas:
        text = (
            f"fits {plural(best, 'GPU')} ({sizes}): `replicas: {replicas}`, `tp: {best}`; "
            f"`replicas: {config.replicas}`, `tp: {tp}` runs fewer copies."
        )
        yield Finding("note", "layout", text)
    elif tokens and at_once < _FULL_BATCH:
        text = (
            f"KV for {plural(at_once, 'answer')} of {length:,} tokens at once (95 % of {source}; "
            f"{sizes})."
        )
        if "kv-cache-dtype" not in dashed_names(config.model_kwargs):
            text += " `model_kwargs: {kv_cache_dtype: fp8}` (before a run begins) doubles that."
        if 2 * tp <= gpu_layout.gpus:
            text += f" `tp: {2 * tp}` makes more room."
        yield Finding("note", "KV cache", text)


def layouts(runner: RunnerPlan) -> list[JsonObject]:
    """Returns the settings of other ways to use all GPUs of a task, as far as they are known."""
    tokens = _sampled_tokens(runner.root)
    gpu_layout = read_layout(runner, int(quantile(tokens, 0.95))) if tokens else None
    if gpu_layout is None:
        return []
    ways = [(gpu_layout.gpus // tp, tp) for tp in gpu_layout.fitting(1)]
    present = (runner.step.model.replicas, runner.step.model.tp)
    return [{"replicas": replicas, "tp": tp} for replicas, tp in ways if (replicas, tp) != present]


def _sampled_tokens(root: Path | None) -> list[int]:
    """Returns tokens of answers, with their prompts', from the newest sample."""
    if root is None:
        return []
    for sample in reversed(layout.sample_folders(root)):
        tokens = []
        for path in sample.glob(f"*/{layout.KEPT_ANSWERS}"):
            for row in read_answers(path):
                usage = orjson.loads(row.answer.result or b"{}").get("usage", {})
                counts = RecordedRequest("", usage=usage).tokens
                tokens.append(counts.prompt + counts.completion)
        if any(tokens):
            return tokens
    return []
