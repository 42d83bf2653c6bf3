"""A script for datatrove's runner with a job before it: documents that are short enough are answered."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceResult, InferenceRunner
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

LONGEST = 12


def keep_short(documents: Iterator[Document], rank: int, world_size: int) -> Iterator[Document]:
    yield from (document for document in documents if len(document.text) < LONGEST)


async def answer(document: Document, generate: Any) -> InferenceResult:
    return await generate({"messages": [{"role": "user", "content": document.text}], "temperature": 0.5})


def main(url: str, out: str) -> None:
    short = LocalPipelineExecutor(
        pipeline=[
            JsonlReader("input"),
            keep_short,
            JsonlWriter(f"{out}/short", compression=None),
        ],
        tasks=2,
        logging_dir=f"{out}/logs/short",
    )
    inference = LocalPipelineExecutor(
        pipeline=[
            JsonlReader(f"{out}/short"),
            InferenceRunner(
                rollout_fn=answer,
                config=InferenceConfig(
                    server_type="endpoint",
                    model_name_or_path="fake",
                    endpoint_url=url,
                    max_concurrent_generations=3,
                    metric_interval=3600,
                ),
                output_writer=JsonlWriter(f"{out}/answers", "${rank}_chunk_${chunk_index}.jsonl", compression=None),
                checkpoints_local_dir=f"{out}/checkpoints",
                records_per_chunk=4,
            ),
        ],
        tasks=2,
        workers=2,
        logging_dir=f"{out}/logs/inference",
        depends=short,
    )
    inference.run()
    Path(out, "done").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
