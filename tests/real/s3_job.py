"""A job whose output goes to S3: `python -m tests.real.s3_job job.json`. Tests also kill it.

job.json holds the endpoint of the model (url), the folders (input, output, checkpoints, logs),
tasks and workers, the size of a document's text and of a chunk, and may change how long and in
which parts is uploaded.
"""

import base64
import functools
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from loguru import logger
from s3fs import S3FileSystem  # noqa: F401 (so that forked processes need not import it)

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.common import retrying
from datatrove_ckpt.output import targets
from datatrove_ckpt.process.task_errors import QuietErrors
from datatrove_ckpt.readers import ParquetReader


@functools.cache
def noise(number, size):
    """Text that hardly compresses, the same in every process."""
    return base64.b85encode(random.Random(number).randbytes(size * 4 // 5)).decode()


class Documents(PipelineStep):
    """Documents out of nothing, dealt out to the ranks."""

    name, type = "documents", "READER"

    def __init__(self, number, size):
        super().__init__()
        self.number, self.size = number, size

    def run(self, data, rank=0, world_size=1):
        for number in range(rank, self.number, world_size):
            yield Document(id=f"doc-{number}", text=noise(number, self.size))


async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.id}]})


def reader(job):
    if "input" not in job:
        return Documents(job.get("documents", 8), job.get("size", 100))
    found = ParquetReader(job["input"])
    found.add_file_path = False  # which says where it was read
    return found


def writer(output, kind):
    if kind == "parquet":
        return ParquetWriter(output, "${rank}_chunk_${chunk_index}.parquet", compression=None)
    return JsonlWriter(
        output, "${rank}_chunk_${chunk_index}.jsonl", compression=kind if kind == "gzip" else None
    )


def runner(job, rollout=rollout):
    return InferenceRunner(
        rollout,
        InferenceConfig(
            "endpoint",
            "fake",
            endpoint_url=job["url"],
            max_concurrent_generations=job.get("at_once", 8),
        ),
        writer(job["output"], job.get("kind", "plain")),
        checkpoints_local_dir=job["checkpoints"],
        records_per_chunk=job.get("chunk", 4),
    )


def run(job):
    retrying.STORAGE = replace(
        retrying.STORAGE, patience=job.get("retry_seconds", retrying.STORAGE.patience)
    )
    targets.PART_BYTES = job.get("part", targets.PART_BYTES)
    step = runner(job)
    documents = reader(job)
    if "logs" not in job:
        step.run(documents.run(None))
        return
    LocalPipelineExecutor(
        [documents, step],
        tasks=job.get("tasks", 1),
        workers=job.get("workers", 1),
        logging_dir=job["logs"],
    ).run()


def run_in_fork(job, environment, log):
    """Runs the job in a forked process, which starts at once and has a session of its own."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    logger.remove()
    logger.add(sys.stderr)
    run(job)


if __name__ == "__main__":
    QuietErrors()
    run(json.loads(Path(sys.argv[1]).read_text()))
