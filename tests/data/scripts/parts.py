"""A script for datatrove's runner that is no production: long documents in parts, a process pool."""

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


async def in_parts(document: Document, generate: Any) -> str:
    texts: list[str] = []
    before = ""
    for start in range(0, len(document.text), 40):
        part = document.text[start : start + 40]
        messages = [
            {"role": "user", "content": f"Go on formally:\n\n{before}{part}"},
            {"role": "assistant", "content": texts[-1] if texts else ""},
        ]
        result: InferenceResult = await generate({"messages": messages, "continue_final_message": True, "echo": False})
        texts.append(result.text)
        before = part
    return "\n".join(texts)


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


def main(out: str) -> None:
    documents = [Document(text=f"What is the weather in town {n}? " * 3, id=str(n)) for n in range(5)]
    config = InferenceConfig(server_type="dummy", model_name_or_path="m", default_generation_params={"temperature": 0})

    def runner(name: str, rollout: Any, **settings: Any) -> InferenceRunner:
        writer = JsonlWriter(f"{out}/{name}", "${rank}_chunk_${chunk_index}.jsonl", compression=None)
        folder = f"{out}/{name}-checkpoints"
        return InferenceRunner(
            rollout, config, writer, records_per_chunk=3, checkpoints_local_dir=folder, **settings
        )

    steps = {
        "parts": runner("parts", in_parts),
        "pool": runner("pool", by_page, shared_context=partial(pool, workers=2)),
    }
    for name, step in steps.items():
        LocalPipelineExecutor(pipeline=[documents, step], logging_dir=f"{out}/{name}-logs", tasks=1).run()


if __name__ == "__main__":
    main(sys.argv[1])
