"""What becomes of a document that fails: the rank stops, or the document becomes a dead letter.

``on_document_error="stop"`` (the default) stops at any failure but two: a request the server rejects, if
``skip_bad_requests`` says so, and one that kills servers, which would only kill the next one, too.
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
from datatrove_ckpt.readers.positions import position_state

OnDocumentError = Literal["stop", "dead_letter"]


class Failures:
    """The rule, and the count, of one rank in one life.

    Args:
        dead: dead letters of earlier lives.
        limit: dead letters at which the rank stops; None: no limit.
        kept: dead letters are kept somewhere. Without a checkpoint they are not, and only ``skip_bad_requests``,
            which asks for it, loses a document.
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
        """Dead letters are likely enough to keep each document in work as it was read."""
        return self._on_document_error == "dead_letter" or self._skip_bad_requests

    def letter_or_raise(
        self, read: SourceDocument, place: ChunkSlot, error: BaseException, payload_hashes: list[str]
    ) -> bytes:
        """The document's dead letter.

        Raises:
            DocumentFailed: the rank is to stop at this failure.
            TooManyDeadLetters: at this one, because of those before it.
            CkptError: a failure that is not the document's.
        """
        document = read.document
        if not self._is_letter(error):
            _stop(document, place, error)
        self._dead += 1
        if self._limit is not None and self._dead > self._limit:
            raise TooManyDeadLetters(
                f"{self._dead} documents of this rank failed, more than max_dead_letters={self._limit} allows. The "
                f"last one, {document.id!r}: {cause_of(error)}. Mend the cause and run the same command again; the "
                "others can be tried again with --retry-dead-letters once the rank is finished."
            ) from error
        logger.warning(f"Document {document.id!r} (number {place.ordinal}) is a dead letter: {cause_of(error)}")
        return dead_letter(
            document,
            read.as_read,
            error,
            ordinal=place.ordinal,
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
    """The error and what it comes from, whatever the rollout wrapped it in."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                yield from _causes(part)
        error = error.__cause__ or error.__context__


def _stop(document: Document, place: ChunkSlot, error: BaseException) -> NoReturn:
    if isinstance(error, CkptError):
        raise error
    raise DocumentFailed(
        f"Document {document.id!r} (number {place.ordinal} of this rank) failed: {cause_of(error)}. What other "
        "documents got is saved; mend the cause and run the same command again."
    ) from error
