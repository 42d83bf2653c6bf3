"""One attempt of a job on a real engine: `python -m tests.real.job FOLDER`, with FOLDER/job.json.
It may be killed.

Each request that is sent, each answer that came and each answer that was saved is a line of
FOLDER/events, in the order in which they happened. So a test can tell which requests were sent
twice, and whether they had been answered.
"""

import json
import os
import sys
from pathlib import Path

import orjson
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter
from loguru import logger

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.inference.client import client, routing
from datatrove_ckpt.inference.servers import host
from datatrove_ckpt.inference.servers.guardian import descendants


async def rollout(document, generate):
    """Asks for an exact number of tokens, so that a shorter answer is known to be incomplete."""
    result = await generate(
        {"prompt": document.text, "ignore_eos": True, "temperature": 0, "user": document.id}
    )
    log_event("answered", document.id)
    return result


def log_event(kind, name):
    descriptor = os.open("events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{kind} {name}\n".encode())
    os.close(descriptor)


async def post(transport, body, *others, **more):
    log_event("asked", orjson.loads(body)["user"])
    return await _post(transport, body, *others, **more)


_post, client.post = client.post, post


def put(cache, group):
    _put(cache, group := list(group))
    for request in group:
        log_event("kept", request.doc_id)


_put, RequestCache.put = RequestCache.put, put  # type: ignore[method-assign]


class StandingClock:
    """The time that supervision sees. It passes, one second per call, only while a process of the
    server is stopped.

    So a stopped server hangs, and a server that is slow, on a machine that is busy or suspended,
    does not.
    """

    def __init__(self):
        self._now = 1000.0

    def monotonic(self):
        self._now += any(_is_stopped(process.pid) for process in descendants(os.getpid()))
        return self._now


def _is_stopped(pid):
    try:
        return ") T " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False  # it has ended


def main(folder):
    os.chdir(folder)
    job = json.loads(Path("job.json").read_text())
    if job["standing_clock"]:
        host.time = routing.time = StandingClock()  # type: ignore[attr-defined, assignment]
    logger.remove()
    logger.add("runner.log", format="{time:HH:mm:ss} {level} {message}")
    documents = [
        Document(text=f"A short story about the number {n}.", id=f"doc-{n}")
        for n in range(job["documents"])
    ]
    documents += [
        Document(text="word " * 2000, id=f"too-long-{n}") for n in range(job.get("too_long", 0))
    ]
    runner = InferenceRunner(
        rollout,
        InferenceConfig(**job["config"], default_generation_params={"max_tokens": job["tokens"]}),
        JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir="checkpoints",
        records_per_chunk=50,
        skip_bad_requests=True,
    )
    runner.run(iter(documents))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
