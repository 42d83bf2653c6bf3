"""A production script for datatrove's runner: a dataset through a prompt template, into Parquet, then its numbers."""

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceResult, InferenceRunner
from datatrove.pipeline.readers import HuggingFaceDatasetReader
from datatrove.pipeline.writers import ParquetWriter

CHARS_PER_TOKEN = 3


def main(dataset: str, out: Path, name: str, template: str | None, server: dict[str, Any]) -> None:
    context, max_tokens = 600, 200
    temperature, top_k = 0.6, None  # as a model's generation_config gives them

    async def rollout(
        document: Document, generate: Callable[[dict[str, Any]], Awaitable[InferenceResult]]
    ) -> InferenceResult:
        text = template.replace("[[DOCUMENT]]", document.text) if template else document.text
        room = (context - max_tokens) * CHARS_PER_TOKEN
        if len(text) > room:
            cut = text.rfind("\n", 0, room)
            text = text[: cut if cut > 0 else room]
        messages = [{"role": "user", "content": text}]
        sampling = {"temperature": temperature, "top_k": top_k}
        given = {key: value for key, value in sampling.items() if value is not None}
        return await generate({"messages": messages, "max_tokens": max_tokens, **given})

    config = InferenceConfig(
        model_name_or_path="org/model",
        model_max_context=context,
        rollouts_per_document=1,
        max_concurrent_generations=5000,
        max_concurrent_documents=5000,
        metric_interval=120,
        tp=1,
        server_log_folder=str(out / name / "logs" / "server_logs"),
        model_kwargs={
            "revision": "main",
            "dtype": "bfloat16",
            "max_num_seqs": 2048,
            "block-size": 16,
            "gpu-memory-utilization": 0.9,
            "speculative_config": '{"method": "suffix", "num_speculative_tokens": 32}',
            "distributed-executor-backend": "ray",
            "optimization-level": 3,
        },
        **server,
    )
    inference = LocalPipelineExecutor(
        pipeline=[
            HuggingFaceDatasetReader(dataset, {"name": None, "split": "train"}, text_key="prompt", limit=20),
            InferenceRunner(
                rollout_fn=rollout,
                config=config,
                records_per_chunk=7,
                checkpoints_local_dir=str(out / name / "checkpoints"),
                skip_bad_requests=True,
                output_writer=ParquetWriter(
                    str(out / "data" / name), "${rank}_${chunk_index}.parquet", expand_metadata=True, batch_size=10
                ),
            ),
        ],
        logging_dir=str(out / name / "logs"),
        tasks=2,
        workers=1,
    )
    inference.run()


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    for name, template in settings["templates"].items():
        main(settings["dataset"], Path(settings["out"]), name, template, settings["server"])
