"""A script for datatrove's runner whose rollouts share a process pool."""

import asyncio
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceResult, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter


def page_payload(text: str, page: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": f"[{page}] {text}"}]}]}


@contextmanager
def pool(workers: int) -> Any:
    with ProcessPoolExecutor(max_workers=workers) as processes:
        yield {"processes": processes}


async def by_page(document: Document, generate: Any, processes: ProcessPoolExecutor) -> list[InferenceResult]:
    loop = asyncio.get_running_loop()

    async def one(page: int) -> InferenceResult:
        return await generate(await loop.run_in_executor(processes, page_payload, document.text, page))

    return await asyncio.gather(*[one(page) for page in (1, 2)], return_exceptions=True)


if __name__ == "__main__":
    out = sys.argv[1]
    runner = InferenceRunner(
        by_page,
        InferenceConfig(server_type="dummy", model_name_or_path="m"),
        JsonlWriter(f"{out}/output", "${rank}_chunk_${chunk_index}.jsonl", compression=None),
        shared_context=partial(pool, workers=2),
        records_per_chunk=3,
        checkpoints_local_dir=f"{out}/checkpoints",
    )
    documents = [Document(text=f"text {number}", id=str(number)) for number in range(5)]
    LocalPipelineExecutor(pipeline=[documents, runner], logging_dir=f"{out}/logs", tasks=1).run()
