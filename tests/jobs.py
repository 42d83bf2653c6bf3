"""Small jobs that several tests run: documents in, a counting server, chunk files out."""

import json
from contextlib import asynccontextmanager

import orjson
import pytest
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.errors import CkptError, DocumentFailed
from datatrove_ckpt.inference.servers.server import InferenceServer, lease_gpus

STOPS_SOON = {"server_patience_seconds": 0.1}
"""Config for servers that stop answering by design, where the rank's stop is waited for.

The start has more time.
"""


@asynccontextmanager
async def leased_gpus(config):
    (leases,) = (await lease_gpus([config])).values()
    try:
        yield leases
    finally:
        for lease in leases:
            lease.close()


def documents(number):
    return [Document(text=f"text {index}", id=f"id {index}") for index in range(number)]


def chat(content, **more):
    """The payload of one message of a user."""
    return {"messages": [{"role": "user", "content": content}], **more}


def texts_of(payload):
    """The texts of a request for vectors."""
    texts = payload["input"]
    return texts if isinstance(texts, list) else [texts]


async def ask(document, generate):
    """One request: the document's text."""
    return await generate(chat(document.text))


def fails_at(bad):
    """A rollout that fails at the documents with these ids, and asks nothing for them."""

    async def rollout(document, generate):
        if document.id in bad:
            raise ValueError(f"cannot make sense of {document.id}")
        return await ask(document, generate)

    return rollout


async def the_first_last(document, generate, others_committed):
    """The first document has its answer early, and is finished when the chunks after it are
    committed.
    """
    result = await ask(document, generate)
    if document.id == "id 0":
        await others_committed()
    return result


def rejects(texts, status=400):
    """For a server: what it says to documents with these texts, as long as they are among them."""
    return lambda payload, times: status if payload["messages"][-1]["content"] in texts else None


def rejects_documents(payload, times):
    """For a server: it rejects all documents, and not one word in place of their texts."""
    return None if '"JSON"' in json.dumps(payload) else 400


class Budget:
    """For a server: it refuses its key, which stops a rank, when so many requests are answered."""

    def __init__(self, left=0, status=401):
        self.left = left
        self.status = status

    def __call__(self, payload, times):
        self.left -= 1
        return None if self.left >= 0 else self.status


def config(server, **changes):
    settings = {
        "model_name_or_path": "fake",
        "server_patience_seconds": 60.0,
        **changes,
    }
    return InferenceConfig(server_type="endpoint", endpoint_url=server.url, **settings)


def writer(folder, compression=None, **changes):
    return JsonlWriter(
        str(folder / "output"),
        "${rank}_chunk_${chunk_index}.jsonl",
        compression=compression,
        **changes,
    )


def runner(folder, server, rollout=ask, **changes):
    """A runner with checkpoints below ``folder``; ``config`` holds changes to the config.

    ``server``: or the config, or those of several models.
    """
    changes.setdefault("checkpoints_local_dir", str(folder / "checkpoints"))
    changes.setdefault("output_writer", writer(folder))
    changes.setdefault("records_per_chunk", 2)
    settings = changes.pop("config", {})
    if not isinstance(server, InferenceConfig | dict):
        server = config(server, **settings)
    return InferenceRunner(rollout, server, **changes)


def run_job(folder, server, number, *rollout, **changes):
    """Runs so many documents."""
    runner(folder, server, *rollout, **changes).run(documents(number))


class FailsFirst:
    """Raises in a rollout of the first of two attempts."""

    now = True

    def __call__(self):
        if self.now:
            raise RuntimeError("not yet")

    def run_twice(self, folder, server, rollout, **changes):
        with pytest.raises(DocumentFailed, match="not yet"):
            run_job(folder, server, 1, rollout, **changes)
        self.now = False
        run_job(folder, server, 1, rollout, **changes)


def rows(folder, pattern="*.jsonl"):
    """What the output files below ``folder`` hold, in the order of their names.

    Python's own parser reads integers of any size.
    """
    files = sorted((folder / "output").glob(pattern))
    return [json.loads(line) for path in files for line in path.read_bytes().splitlines()]


def ids(folder, pattern="*.jsonl"):
    return [row["id"] for row in rows(folder, pattern)]


def results(folder):
    """What the rollouts of each document have returned."""
    return [row["metadata"]["rollout_results"] for row in rows(folder)]


def letters(folder, root=""):
    """The dead letters of rank 0. ``root``: of a retry."""
    path = folder / "checkpoints" / root / "00000" / "dead_letters.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


@asynccontextmanager
async def started_server(config):
    server = InferenceServer(config, 0)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class Refusing(Budget):
    """Counts what it refuses."""

    refused = 0

    def __call__(self, payload, times):
        status = super().__call__(payload, times)
        self.refused += status is not None
        return status


def in_pieces(folder, server, rollout, **changes):
    """Runs the job, which ends after each answer, until it is done.

    Returns the number of refused requests.
    """
    server._status = budget = Refusing()
    for _ in range(99):
        budget.left = 1
        try:
            run_job(folder, server, 2, rollout, **changes)
        except CkptError:
            continue
        return budget.refused
    raise AssertionError("it never ends")


def all_of(number):
    return [f"id {index}" for index in range(number)]
