"""Decides for each document that fails: the rank stops, or the document becomes a dead letter.

``on_document_error="stop"`` (the default) stops the rank at any failure, with two exceptions: a request that the server
rejects, if ``skip_bad_requests`` is set, and a request that kills servers, because it would kill the next one, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NoReturn

from datatrove.data import Document
from loguru import logger

from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.errors import CkptError, DocumentFailed, RequestPoisoned, RequestRejected, TooManyDeadLetters
from datatrove_ckpt.generation.dead_letters import cause_of, dead_letter
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.generation.user_code import NotAwaitable
from datatrove_ckpt.readers.positions import position_state

OnDocumentError = Literal["stop", "dead_letter"]


class Failures:
    """The rule for one rank, and the number of its dead letters.

    Args:
        dead: dead letters of earlier attempts.
        limit: most dead letters before the rank stops; None: no limit.
        kept: dead letters are written somewhere. Without a checkpoint they are not; then a document is left out only
            if the user has set ``skip_bad_requests``.
    """

    def __init__(
        self,
        on_document_error: OnDocumentError,
        skip_bad_requests: bool,
        dead: int,
        limit: int | None,
        kept: bool = True,
    ) -> None:
        self._kept = kept
        self._on_document_error = on_document_error
        self._skip_bad_requests = skip_bad_requests
        self._dead = dead
        self._limit = limit

    @property
    def keep_as_read(self) -> bool:
        """Dead letters are likely, so keep the bytes of each document in work as it was read."""
        return self._on_document_error == "dead_letter" or self._skip_bad_requests

    def letter_or_raise(
        self, source: SourceDocument, slot: ChunkSlot, error: BaseException, payload_hashes: list[str]
    ) -> bytes:
        """The document's dead letter, as a line of ``dead_letters.jsonl``.

        Raises:
            DocumentFailed: the rule says that this failure stops the rank.
            TooManyDeadLetters: this would be a dead letter beyond the limit.
            CkptError: the rollout let one out, and the rule says that it stops the rank.
        """
        document = source.document
        if isinstance(error, NotAwaitable) or not self._is_letter(error):
            _stop(document, slot, error)
        self._dead += 1
        if self._limit is not None and self._dead > self._limit:
            raise TooManyDeadLetters(
                f"{self._dead} documents of this rank failed, more than max_dead_letters={self._limit} allows. The "
                f"last one, {document.id!r}: {cause_of(error)}. Fix the cause and run the same command again. When the "
                "rank is finished, --retry-dead-letters processes the dead letters again."
            ) from error
        logger.warning(f"Document {document.id!r} (number {slot.ordinal}) becomes a dead letter: {cause_of(error)}")
        return dead_letter(
            document,
            source.as_read,
            error,
            ordinal=slot.ordinal,
            position=position_state(document),
            payload_hashes=[digest for digest in payload_hashes if digest],
            earlier=getattr(document, "letter", None),
        )

    def _is_letter(self, error: BaseException) -> bool:
        causes = list(_causes(error))
        if self._kept and any(isinstance(cause, RequestPoisoned) for cause in causes):
            return True
        if self._skip_bad_requests and any(isinstance(cause, RequestRejected) for cause in causes):
            return True
        return self._on_document_error == "dead_letter"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and everything that it was raised from, exception groups included."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                yield from _causes(part)
        error = error.__cause__ or error.__context__


def _stop(document: Document, slot: ChunkSlot, error: BaseException) -> NoReturn:
    if isinstance(error, CkptError):
        raise error
    raise DocumentFailed(
        f"Document {document.id!r} (number {slot.ordinal} of this rank) failed: {cause_of(error)}. The answers of "
        "other documents are saved. Fix the cause and run the same command again."
    ) from error
