"""A job of several tasks over a server: the same documents, as one task and as many."""

import argparse
import json
import time

from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceRunner, LocalPipelineExecutor
from datatrove_ckpt.readers import JsonlReader

AT_ONCE = 64
"""Requests in flight."""


def tasks_parser(documentation, documents):
    made = argparse.ArgumentParser(description=documentation)
    made.add_argument("--documents", type=int, default=documents)
    made.add_argument("--tasks", type=int, nargs="+", default=[1, 10, 40])
    return made


def make_input(folder, tasks, rows):
    """The same documents, in the same order, in as many files as there are tasks."""
    folder.mkdir(parents=True)
    size = -(-len(rows) // tasks)
    for task in range(tasks):
        mine = rows[task * size : (task + 1) * size]
        (folder / f"{task:03d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mine))


def run_tasks(folder, rollout, config, rows, **executor):
    """Returns the seconds of the job."""
    make_input(folder / "input", executor["tasks"], rows)
    writer = JsonlWriter(
        str(folder / "output"), "${rank}_chunk_${chunk_index}.jsonl", compression=None
    )
    step = InferenceRunner(
        rollout, config, writer, checkpoints_local_dir=str(folder / "checkpoints")
    )
    pipeline = [JsonlReader(str(folder / "input")), step]
    began = time.monotonic()
    LocalPipelineExecutor(pipeline, logging_dir=str(folder / "logs"), **executor).run()
    return time.monotonic() - began
