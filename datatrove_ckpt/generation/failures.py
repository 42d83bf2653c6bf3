"""Decides for each document that fails: the rank stops, or the document becomes a dead letter.

``on_document_error="stop"`` (the default) stops the rank at any failure, with two exceptions: a request that the server
rejects, if ``skip_bad_requests`` is set, and a request that kills servers, because it would kill the next one, too.

A failure of the server is never a document's: it stops the rank (``Scheduler.fail``) before anybody asks here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NoReturn

from loguru import logger

from datatrove_ckpt.checkpoint.chunks import ChunkSlot
from datatrove_ckpt.errors import (
    CkptError,
    DocumentFailed,
    RequestFailed,
    RequestPoisoned,
    RequestRejected,
    ServerUnavailable,
    TooManyDeadLetters,
    UnexpectedExit,
)
from datatrove_ckpt.formatting import plural, safe_repr
from datatrove_ckpt.generation.dead_letters import TakenLetters, cause_of, dead_letter
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
        taken: letters that retries have taken; None: there are no retries.
    """

    def __init__(
        self,
        on_document_error: OnDocumentError,
        skip_bad_requests: bool,
        dead: int,
        limit: int | None,
        kept: bool = True,
        taken: TakenLetters | None = None,
    ) -> None:
        self._kept = kept
        self._taken = taken
        self._on_document_error = on_document_error
        self._skip_bad_requests = skip_bad_requests
        self._dead = dead
        self._limit = limit

    @property
    def keep_as_read(self) -> bool:
        """Dead letters are likely, so keep the bytes of each document in work as it was read."""
        return self._on_document_error == "dead_letter" or self._skip_bad_requests

    def taken_letter(self, source: SourceDocument, slot: ChunkSlot) -> bytes | None:
        """The letter of a document that belongs to a retry, which is not to be processed here; None: process it.

        Raises:
            CheckpointMismatch: the retry has another document of this number.
        """
        if self._taken is None:
            return None
        return self._taken.get(source.document, source.id, slot.ordinal)

    def letter_or_raise(
        self, source: SourceDocument, slot: ChunkSlot, error: BaseException, payload_hashes: list[str]
    ) -> bytes:
        """The document's dead letter, as a line of ``dead_letters.jsonl``.

        Raises:
            DocumentFailed: the rule says that this failure stops the rank.
            TooManyDeadLetters: this would be a dead letter beyond the limit.
            CkptError: the rollout let one out, and the rule says that it stops the rank.
        """
        document, name = source.document, _named(source.id, slot)
        if isinstance(error, NotAwaitable) or not self._is_letter(error):
            _stop(name, error)
        self._dead += 1
        if self._limit is not None and self._dead > self._limit:
            raise TooManyDeadLetters(
                f"{plural(self._dead, 'document')} of this rank failed, more than max_dead_letters={self._limit} "
                f"allows. The last one, {name}: {cause_of(error)}. Fix the cause and run the same command again. When "
                "the rank is finished, --retry-dead-letters processes the dead letters again."
            ) from error
        logger.warning(f"D{name[1:]} becomes a dead letter: {cause_of(error)}")
        return dead_letter(
            document,
            source.id,
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


def _named(doc_id: str, slot: ChunkSlot) -> str:
    return f"document {safe_repr(doc_id)} (number {slot.ordinal} of this rank)"


def _stop(name: str, error: BaseException) -> NoReturn:
    if isinstance(error, CkptError) and not isinstance(error, UnexpectedExit):
        raise error
    raise DocumentFailed(
        f"D{name[1:]} failed: {cause_of(error)}. The answers of other documents are saved. "
        f"{_way_out(error)}Fix the cause and run the same command again."
    ) from error


# How vLLM, SGLang, llama.cpp and OpenAI word it. The words choose a hint, never what happens.
_TOO_LONG = re.compile(
    r"context.(length|size|window)|max(imum)?.(model|context|sequence|input).len|exceed_context_size"
    r"|longer than the (model|maximum)",
    re.IGNORECASE,
)


def _way_out(error: BaseException) -> str:
    """What to do about a rejected request, as sentences that end with a blank."""
    rejected = next((cause for cause in _causes(error) if isinstance(cause, RequestRejected)), None)
    if rejected is None:
        return ""
    way = (
        "skip_bad_requests=True makes a dead letter of each document whose request is rejected, and "
        'on_document_error="dead_letter" of each that fails. '
    )
    if _TOO_LONG.search(rejected.body):
        way = f"The prompt is longer than the model's context. ChunkedRollout splits long documents. {way}"
    if rejected.remembered:
        way += "The server was not asked this time: retry_errors=True (in a YAML file, retry_errors: true) asks again. "
    return way


def unanswered(doc_id: str, slot: ChunkSlot, error: CkptError) -> CkptError:
    """The error that stops the rank when a server has failed for a request of this document."""
    document = _named(doc_id, slot)
    if isinstance(error, RequestFailed):
        return DocumentFailed(
            f"A request of {document} has no answer. {error} The server's failure is not the document's, so it makes "
            "no dead letter. Fix the server and run the same command again. To go on without this document, let the "
            "rollout return None for it before any request, and set accept_changes=True."
        )
    if isinstance(error, ServerUnavailable):
        return ServerUnavailable(f"{error} One of the requests that wait is that of {document}.")
    return error
