"""A job of long answers that are saved in pieces, and what of them a kill leaves."""

import shutil

import orjson

from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.testing import outputs

CACHE = "checkpoints/00000/replay.sqlite3"


def rows_in(folder):
    """The rows of the request cache, as a kill at this moment leaves them."""
    copy = folder.with_name(f"{folder.name} copied")
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for suffix in ("", "-wal"):
        path = folder / f"{CACHE}{suffix}"
        if path.exists():
            shutil.copy(path, copy)
    cache = RequestCache(copy / "replay.sqlite3")
    found = {ordinal: cache.answers(ordinal) for ordinal, _ in cache.answer_counts()}
    cache.close()
    return found


def tokens_in(folder):
    """The saved tokens of each document, in pieces or as an answer."""
    kept = {}
    for ordinal, rows in rows_in(folder).items():
        whole = [row for key, row in rows.items() if not key.is_piece]
        pieces = [orjson.loads(row.result)["half"] for key, row in rows.items() if key.is_piece]
        assert not (whole and pieces)
        kept[ordinal] = sum(map(len, pieces))
        if whole:
            kept[ordinal] = orjson.loads(whole[0].result)["usage"]["completion_tokens"]
    return kept


def answered(folder):
    """The output, without what a server says about its answers besides them."""
    rows = [
        orjson.loads(line)
        for data in outputs(folder / "output").values()
        for line in data.splitlines()
    ]
    for row in rows:
        for result in row["metadata"]["rollout_results"]:
            result["usage"].pop("completion_tokens_details")
    return rows


JOB = """
import sys
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.inference.client import half_answers

half_answers.STREAM_INTERVAL = 4
folder, url = sys.argv[1:]


async def ask_long(document, generate):
    message = {"role": "user", "content": document.text}
    return await generate({"messages": [message], "max_tokens": 2048, "temperature": 0})


config = InferenceConfig(
    "endpoint", "fake", endpoint_url=url, half_answers=True, max_concurrent_generations=2
)
writer = JsonlWriter(
    folder + "/output", "${rank}_chunk_${chunk_index}.jsonl", compression=None
)
InferenceRunner(
    ask_long,
    config,
    writer,
    records_per_chunk=9,
    checkpoints_local_dir=folder + "/checkpoints",
    drain_seconds=600,
).run([Document(text=f"text {index}", id=f"id {index}") for index in range(3)])
"""
