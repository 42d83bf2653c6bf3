"""Decides for each document that fails: the rank stops, or the document becomes a dead letter.

``on_document_error="stop"`` (the default) stops the rank, except at a rejected request with
``skip_bad_requests``, at a bad answer by its setting (``on_loop: dead_letter``), and at a request
that kills servers. A server's failure always stops the rank (``DocumentAnswers.fail``).

A dead letter that a retry has taken stays a dead letter when its chunk is redone (after
``repair``): otherwise the document would be in the output twice.
"""

from dataclasses import dataclass

import orjson
from datatrove.pipeline.inference.types import InferenceError
from loguru import logger

from datatrove_ckpt import errors
from datatrove_ckpt.common.formatting import plural, safe_repr, safe_text
from datatrove_ckpt.generation.datatrove_errors import DocumentFailed
from datatrove_ckpt.generation.dead_letters import (
    Letter,
    LetterAttempt,
    cause_of,
    dead_letter,
    failure_of,
)
from datatrove_ckpt.generation.failure_advice import advice_for, describe_document
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.generation.user_frames import user_frame_of
from datatrove_ckpt.generation.user_rollout import NotAwaitable


@dataclass
class FailurePolicy:
    """The rule for one rank, and the number of its dead letters.

    Attributes:
        dead: number of dead letters of all attempts.
        retried: dead letters that retries have taken, as lines. Their documents are not processed
            here.
    """

    step: RunnerSettings
    dead: int
    retried: dict[LetterAttempt, bytes]

    def retried_letter(self, source: SourceDocument, ordinal: int) -> bytes | None:
        """Returns the dead letter if a retry has taken it, so that the document is not processed.

        Raises:
            CheckpointMismatch: the retry has another document of this number.
        """
        earlier: Letter = getattr(source.document, "dead_letter", {})
        ordinal = earlier.get("ordinal", ordinal)
        line = self.retried.get((ordinal, earlier.get("attempts", 0) + 1))
        if line is not None and (other_id := orjson.loads(line)["id"]) != source.id:
            raise errors.CheckpointMismatch(
                f"Document {ordinal} of this task is {safe_repr(source.id)}, but a retry of "
                f"dead letters has {safe_repr(other_id)} under this number: the input was changed "
                "since. Restore it.",
                starts_over="with old results",
            )
        return line

    def dead_letter_or_raise(
        self,
        source: SourceDocument,
        ordinal: int,
        error: BaseException,
        payload_hashes: list[str],
        rejections: list[errors.RequestRejected],
    ) -> bytes:
        """Returns the document's dead letter, as a line of ``dead_letters.jsonl``.

        Args:
            error: the error of a rollout of the document.
            rejections: the requests of the document that the server has rejected.

        Raises:
            DocumentFailed, CkptError: this failure stops the rank.
            TooManyDeadLetters: the dead letter would exceed the limit.
        """
        # The result may be an error that ``gather`` returned.
        if isinstance(error, errors.DocumentNotSerializable):
            error = next(
                (cause for cause in errors.causes(error) if isinstance(cause, InferenceError)),
                error,
            )
        name = describe_document(source.id, ordinal)
        cause = f"{cause_of(error).rstrip('.: ')}{user_frame_of(error)}"
        is_kept = self.step.checkpoints_local_dir is not None
        is_dead_letter = (
            self.step.on_document_error == "dead_letter"
            or (
                is_kept
                and any(
                    isinstance(cause, errors.RequestPoisoned)
                    or (isinstance(cause, errors.BadAnswer) and not cause.is_dropped)
                    for cause in errors.causes(error)
                )
            )
            or (self.step.skip_bad_requests and is_bad_request(error, rejections))
        )
        if isinstance(error, NotAwaitable) or not is_dead_letter:
            if isinstance(error, errors.CkptError) and not isinstance(
                error, errors.UnexpectedExit | errors.RequestError
            ):
                raise error
            advice, changes = advice_for(error, self.step)
            raise DocumentFailed(
                f"D{name[1:]} failed: {cause}. The answers of other documents are saved. {advice}",
                source.document,
                failure_of(error),
                getattr(error, "payload", None),
                changes,
            ) from error
        self.dead += 1
        limit = self.step.max_dead_letters
        if limit is not None and self.dead > limit:
            raise errors.TooManyDeadLetters(
                f"{plural(self.dead, 'document')} of this task failed, more than "
                f"max_dead_letters={limit} allows. The last failure, {name}: {cause}. Fix the "
                "cause and run the same command again. When the task is finished, "
                "retry_dead_letters processes the dead letters again."
            ) from error
        logger.warning(f"D{name[1:]} becomes a dead letter: {cause}")
        return dead_letter(source, ordinal, error, payload_hashes)


def drops(error: BaseException) -> bool:
    """Returns whether a rollout raises nothing but bad answers that are dropped.

    An error into which the user's code converts a bad answer is an error.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(drops, error.exceptions))
    cause = getattr(error, "error", None)
    return isinstance(cause, errors.BadAnswer) and cause.is_dropped


_BAD_REQUEST = "BadRequestError"


def is_bad_request(error: BaseException, rejections: list[errors.RequestRejected]) -> bool:
    """Returns whether a rollout's error means a rejected request.

    datatrove searches the whole text of an ``InferenceError``, payload included, for
    "BadRequestError". Here the word within a text counts only if the server has rejected a request
    of the document.
    """
    for cause in errors.causes(error):
        if isinstance(cause, errors.RequestRejected):
            return True
        text = safe_text(failure_of(cause))
        if any(str(rejection) in text for rejection in rejections):
            return True
        begins = text.removeprefix("Got ").startswith(_BAD_REQUEST)  # as datatrove's own errors
        if isinstance(cause, InferenceError) and (begins or (rejections and _BAD_REQUEST in text)):
            return True
    return False
