"""What of the input each rank reads, once ``reshard`` has changed the number of tasks: ``shares.json``."""

from __future__ import annotations

from collections.abc import Iterable

from datatrove.data import Document

from datatrove_ckpt.checkpoint.shares import read_shares
from datatrove_ckpt.generation.prefetch import DocumentSource
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.readers.revisions import Revisions


def open_source(step: Step, documents: Iterable[Document], keep_as_read: bool, rank: int | None) -> DocumentSource:
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
