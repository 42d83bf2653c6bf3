"""The documents of a rank, as the runner would get them, without the effects that steps before it have."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.generation.prefetch import DocumentSource, SourceDocument
from datatrove_ckpt.readers.revisions import Revisions
from datatrove_ckpt.runner import InferenceRunner


class RankInput:
    """Reads a rank's input, as often as it is asked to.

    Args:
        executor: datatrove's or ours.
        index: of the runner in its pipeline.
        rank: the rank.
        writes: the commits of datasets may be noted in ``checkpoints_local_dir``.
    """

    def __init__(self, executor: Any, index: int, rank: int, writes: bool) -> None:
        self._executor = executor
        self._index = index
        self._rank = rank
        self._writes = writes

    async def documents(self, point: ResumePoint) -> AsyncGenerator[SourceDocument, None]:
        """The documents from ``point`` on."""
        step: InferenceRunner = self._executor.pipeline[self._index]
        revisions = Revisions(step.checkpoints_root) if self._writes else None
        size = step.records_per_chunk
        source = DocumentSource(self._open(), seek=step.seek, revisions=revisions, records_per_chunk=size)
        try:
            async for batch in source.batches(point):
                for document in batch:
                    yield document
        finally:
            source.close()

    def _open(self) -> Any:
        """As datatrove's executors connect the steps."""
        documents: Any = None
        for step in self._steps():
            if callable(step):
                documents = step(documents, self._rank, self._executor.world_size)
            elif isinstance(step, Sequence) and not isinstance(step, str):
                documents = step if documents is None else chain(documents, step)
        return documents if documents is not None else []

    def _steps(self) -> list[Any]:
        """Those since the runner before, if there is one. They write nothing."""
        steps: list[Any] = []
        for step in self._executor.pipeline[: self._index]:
            steps = [] if isinstance(step, InferenceRunner) else [*steps, step]
        copies = [deepcopy(step) for step in steps if not isinstance(step, DiskWriter)]
        for step in copies:
            if getattr(step, "exclusion_writer", None) is not None:
                step.exclusion_writer = None
        return copies
