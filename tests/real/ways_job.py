"""One attempt of a job whose answers are no plain texts: `python -m tests.real.ways_job FOLDER`,
with FOLDER/job.json.

It may be killed. Each request and each answer that was saved is a line of FOLDER/events, in their
order.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter
from loguru import logger

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.checkpoint.request_cache import AnswerKey, CachedRequest, RequestCache
from datatrove_ckpt.generation.generate import Requests
from datatrove_ckpt.rollouts import Generate, PromptRollout

LABELS = ["bad", "fair", "good"]


async def embed(document: Document, generate: Generate) -> object:
    return {"embedding": await generate.embed(document.text)}


async def classify(document: Document, generate: Generate) -> object:
    return asdict(await generate.classify(document.text, labels=LABELS))


async def judge(document: Document, generate: Generate) -> object:
    answer = await generate({"prompt": document.text, "max_tokens": 6, "temperature": 0})
    graded = f"Is this good? {answer.text} Answer:"
    grade = await generate.judge({"prompt": graded, "max_tokens": 2, "temperature": 0})
    return {"answer": answer, "grade": grade.text}


KINDS: dict[str, Callable[..., Awaitable[object]]] = {
    "embed": embed,
    "classify": classify,
    "judge": judge,
    "picture": PromptRollout(
        "What is it?", images="media", generation_params={"max_tokens": 6, "temperature": 0}
    ),
}


def log_event(kind: str, name: str) -> None:
    # One write, so that a kill tears no line.
    with Path("events").open("ab", buffering=0) as events:
        events.write(f"{kind} {name}\n".encode())


async def send(requests: Requests, key: AnswerKey, *more: Any) -> Any:
    log_event("asked", f"{requests._answers.doc_id} {key.payload_hash}")
    return await _send(requests, key, *more)


def put(cache: RequestCache, group: Iterable[CachedRequest]) -> None:
    _put(cache, group := list(group))
    for request in group:
        log_event("kept", f"{request.doc_id} {request.key.payload_hash}")


_send, Requests._send = Requests._send, send  # type: ignore[method-assign]
_put, RequestCache.put = RequestCache.put, put  # type: ignore[method-assign]


def texts(number: int) -> list[str]:
    """Of different lengths, in no order of length."""
    return [f"The bridge of town {n} has {n % 7} arches. " * (1 + n % 4) for n in range(number)]


def documents(kind: str, number: int) -> list[Document]:
    found = [Document(text=text, id=f"doc-{n}") for n, text in enumerate(texts(number))]
    if kind == "picture":
        from tests.integration.test_media import media, picture

        for n, document in enumerate(found):
            document.media = [media(picture(n, (56, 40 + n)))]
    return found


def main(folder: Path) -> None:
    os.chdir(folder)
    job = json.loads(Path("job.json").read_text())
    logger.remove()
    logger.add("runner.log", format="{time:HH:mm:ss} {level} {message}")
    several = job["kind"] == "judge"
    config: Any = (
        {name: InferenceConfig(**one) for name, one in job["config"].items()}
        if several
        else InferenceConfig(**job["config"])
    )
    runner = InferenceRunner(
        KINDS[job["kind"]],
        config,
        JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir="checkpoints",
        records_per_chunk=10,
    )
    runner.run(iter(documents(job["kind"], job["documents"])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
