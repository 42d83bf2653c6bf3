"""``run --sample N``: the first documents of a job, sent as the job would send them, and written
elsewhere.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt.config import MonitoringConfig
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation.user_code import NotedRequest, NotedRequests, noting
from datatrove_ckpt.run_folder.run_plan import RunPlan


def take_sample(
    plan: RunPlan, number: int, folder: Path
) -> list[tuple[Document, list[NotedRequest]]]:
    """Sends the first documents to the first runner. Their results are a run's below ``folder``.

    Returns each document and its requests; without one, its text stands for the question.

    Raises:
        ConfigError: there is no InferenceRunner.
        CkptError: no document could be sent: see ``InferenceRunner.run``.
    """
    if not plan.runners:
        raise ConfigError("--sample: the pipeline has no InferenceRunner.")
    runner = plan.runners[0]
    documents: list[Document] | None = None
    for before in runner.before:
        documents = before(documents, 0, 1)
    first = list(islice(documents or (), number))
    texts = [document.text for document in first]
    asked: NotedRequests = {}
    step = runner.step.changed(
        rollout_fn=noting(runner.step.rollout_fn, asked),
        output_writer=JsonlWriter(
            str(folder / "output"), "${rank}_${chunk_index}.jsonl", compression=None
        ),
        checkpoints_local_dir=str(folder / "checkpoints"),
        checkpoints_remote_dir=None,
        records_per_chunk=number,
        on_document_error="dead_letter",
        skip_bad_requests=True,
        max_dead_letters=None,
        retry_dead_letters=False,
        monitoring=MonitoringConfig(),
        drain_seconds=0.0,
    )
    if first:
        step.run(first, 0, 1)
    return [
        (one, asked.get(id(one)) or [NotedRequest(text)])
        for one, text in zip(first, texts, strict=True)
    ]
