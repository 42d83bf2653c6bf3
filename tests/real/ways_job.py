"""One attempt of a job whose answers are no plain texts: `python -m tests.real.ways_job FOLDER`,
with FOLDER/job.json.

It may be killed. Each request and each answer that was saved is a line of FOLDER/events, in their
order.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.generation.requests import RolloutRequests
from datatrove_ckpt.rollouts import PromptRollout
from tests.jobs import runner

LABELS = ["bad", "fair", "good"]


async def embed(document, generate):
    return {"embedding": await generate.embed(document.text)}


async def classify(document, generate):
    return asdict(await generate.classify(document.text, labels=LABELS))


async def judge(document, generate):
    answer = await generate({"prompt": document.text, "max_tokens": 6, "temperature": 0})
    graded = f"Is this good? {answer.text} Answer:"
    grade = await generate.judge({"prompt": graded, "max_tokens": 2, "temperature": 0})
    return {"answer": answer, "grade": grade.text}


KINDS = {
    "embed": embed,
    "classify": classify,
    "judge": judge,
    "picture": PromptRollout(
        "What is it?", images="media", generation_params={"max_tokens": 6, "temperature": 0}
    ),
}


def log_event(kind, name):
    # One write, so that a kill tears no line.
    with Path("events").open("ab", buffering=0) as events:
        events.write(f"{kind} {name}\n".encode())


async def send(requests, key, *more):
    log_event("asked", f"{requests.answers.doc_id} {key.payload_hash}")
    return await _send(requests, key, *more)


def put(cache, group):
    _put(cache, group := list(group))
    for request in group:
        log_event("kept", f"{request.doc_id} {request.key.payload_hash}")


_send, RolloutRequests._send = RolloutRequests._send, send  # type: ignore[method-assign]
_put, RequestCache.put = RequestCache.put, put  # type: ignore[method-assign]


def texts(number):
    """Of different lengths, in no order of length."""
    return [f"The bridge of town {n} has {n % 7} arches. " * (1 + n % 4) for n in range(number)]


def documents(kind, number):
    found = [Document(text=text, id=f"doc-{n}") for n, text in enumerate(texts(number))]
    if kind == "picture":
        from tests.pictures import media, picture

        for n, document in enumerate(found):
            document.media = [media(picture(n, (56, 40 + n)))]
    return found


def main(folder):
    os.chdir(folder)
    job = json.loads(Path("job.json").read_text())
    logger.remove()
    logger.add("runner.log", format="{time:HH:mm:ss} {level} {message}")
    config = job["config"]
    if job["kind"] == "judge":
        config = {name: InferenceConfig(**one) for name, one in config.items()}
    else:
        config = InferenceConfig(**config)
    step = runner(Path(), config, KINDS[job["kind"]], records_per_chunk=10)
    step.run(iter(documents(job["kind"], job["documents"])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
