"""The documents of a rank, taken from datatrove's generator by one thread, in small batches.

Readers block: on a disk, on S3, on gzip. So they run in a thread of their own; but one hop to a thread and back costs
more than reading a document does (measured: 90 % of datatrove's resume time), hence batches. A batch ends early when
the reader is slow, so that no document waits for others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.checkpoint.recovery import ResumePoint
from datatrove_ckpt.documents import fingerprint
from datatrove_ckpt.errors import CheckpointMismatch

_BATCH_DOCUMENTS = 64
_BATCH_CHARACTERS = 2**20
_BATCH_SECONDS = 0.02


class Read(NamedTuple):
    """A document and its fingerprint, taken before anything could change it."""

    document: Document
    fingerprint: str


class DocumentSource:
    """Reads ahead by one batch."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = iter(documents)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="datatrove-ckpt reader")

    async def skip(self, point: ResumePoint) -> None:
        """Passes the documents that are done, checking on the way that they are the ones that were done.

        Raises:
            CheckpointMismatch: the input is shorter than it was, or another.
        """
        if point.next_ordinal:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._skip, point)

    async def batches(self) -> AsyncIterator[list[Read]]:
        loop = asyncio.get_running_loop()
        upcoming = loop.run_in_executor(self._thread, self._batch)
        while batch := await upcoming:
            upcoming = loop.run_in_executor(self._thread, self._batch)
            yield batch

    def close(self) -> None:
        """Ends the thread, without waiting for a reader that is blocked."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _batch(self) -> list[Read]:
        batch: list[Read] = []
        characters, started = 0, 0.0
        for document in self._documents:
            started = started or time.monotonic()
            batch.append(Read(document, fingerprint(document)))
            characters += len(document.text)
            if (
                len(batch) == _BATCH_DOCUMENTS
                or characters > _BATCH_CHARACTERS
                or time.monotonic() - started > _BATCH_SECONDS
            ):
                break
        return batch

    def _skip(self, point: ResumePoint) -> None:
        started = time.monotonic()
        for ordinal in range(point.next_ordinal):
            document = next(self._documents, None)
            if document is None:
                raise CheckpointMismatch(
                    f"The input ended after {ordinal} documents, but {point.next_ordinal} were done before: it has "
                    "shrunk. Restore it, or start with another checkpoints_local_dir."
                )
            if ordinal in point.milestones and point.milestones[ordinal] != fingerprint(document):
                raise CheckpointMismatch(
                    f"Document {ordinal} of this rank, {document.id!r}, is not the one that was done there before: "
                    "the input, or a step before this one, has changed. Restore it, or start with another "
                    "checkpoints_local_dir."
                )
        logger.info(
            f"Read past {point.next_ordinal} documents that are done in {time.monotonic() - started:.1f} s, because "
            "this reader cannot seek."
        )
