"""What of the input each rank reads, once ``reshard`` has changed the number of tasks: ``shares.json``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import orjson
from datatrove.data import Document

from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.layout import SHARES
from datatrove_ckpt.generation.prefetch import DocumentSource
from datatrove_ckpt.readers.revisions import Revisions
from datatrove_ckpt.readers.shares import Shares
from datatrove_ckpt.readers.steps import StepRecord


def read_shares(root: Path) -> Shares | None:
    """The shares of all ranks below ``checkpoints_local_dir``; None if datatrove deals out the files.

    Raises:
        CheckpointCorrupt: the file holds none.
        StorageFailed: it cannot be read.
    """
    path = root / SHARES
    try:
        with explained("read", path):
            content = path.read_bytes() if path.exists() else None
    except FileNotFoundError:
        return None
    if content is None:
        return None
    try:
        return Shares.from_json(orjson.loads(content), path)
    except orjson.JSONDecodeError:
        return Shares.from_json(None, path)


class _Step(Protocol):
    """An ``InferenceRunner``, which stands above this room."""

    seek: bool | None
    steps_before: list[StepRecord] | None
    records_per_chunk: int
    retry_dead_letters: bool

    @property
    def checkpoints_root(self) -> Path: ...


def open_source(step: _Step, documents: Iterable[Document], keep_as_read: bool, rank: int | None) -> DocumentSource:
    """A rank's documents. To be called with the rank's lock, so that no ``reshard`` changes its share meanwhile.

    Args:
        rank: None: there is no checkpoint.

    Raises:
        CheckpointCorrupt, StorageFailed: ``shares.json`` cannot be read.
    """
    root = None if rank is None else step.checkpoints_root
    revisions = None if root is None else Revisions(root)
    # The dead letters that a retry reads are no part of the input that ranks share.
    shares = None if root is None or step.retry_dead_letters else read_shares(root)
    share = None if shares is None or rank is None else shares.of(rank)
    return DocumentSource(
        documents, keep_as_read, step.seek, step.steps_before, revisions, step.records_per_chunk, share
    )
