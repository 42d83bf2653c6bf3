"""Decides for each document that fails: the rank stops, or the document becomes a dead letter; and
advises what to do. The text of a server's error chooses only the advice.

A line of ``dead_letters.jsonl`` has a document's cause, and its data for a retry. A retry writes
the dead letters that no retry has taken to ``retry-00001/<rank>/input.jsonl``, and processes this
file like other input, with a checkpoint in that folder. A document that fails again waits for the
next retry.

A dead letter that a retry has taken stays a dead letter when its chunk is redone (after
``repair``): otherwise the document would be in the output twice.
"""

import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceError
from loguru import logger

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import likely_mistake, plural, safe_repr, safe_text
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.config.generation_params import max_tokens_of
from datatrove_ckpt.errors import (
    BadAnswer,
    CheckpointMismatch,
    CkptError,
    DocumentNotSerializable,
    RequestError,
    RequestFailed,
    RequestPoisoned,
    RequestRejected,
    ServerRefused,
    ServerUnavailable,
    TooManyDeadLetters,
    UnexpectedExit,
    causes,
)
from datatrove_ckpt.generation.datatrove_errors import DocumentFailed
from datatrove_ckpt.generation.prefetch import SourceDocument
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.generation.user_frames import user_frame_of
from datatrove_ckpt.generation.user_rollout import NotAwaitable, name_of
from datatrove_ckpt.output.document_codec import as_read, decode
from datatrove_ckpt.readers.inputs import position_state
from datatrove_ckpt.rollouts import InvalidAnswer, Payload

_ACCEPTED = {"accept_changes": True}
_AS_DEAD_LETTERS = {"on_document_error": "dead_letter"}
_RUN_AGAIN = "Fix the cause and run again."
_WITHOUT_SUCH = "To make dead letters of such documents, set on_document_error to dead_letter."

# The words of vLLM, SGLang, llama.cpp and OpenAI.
_TOO_LONG = re.compile(
    r"(?:context.(?:length|size|window)|max(?:imum)?.(?:model|context|sequence|input).len"
    r"|exceed_context_size|longer than the (?:model|maximum))(?:\D{0,20}(\d+))?",
    re.IGNORECASE,
)
_PROMPT_TOKENS = re.compile(
    r"(\d+) (?:(?:tokens )?(?:in|from) (?:the|your) (?:input|messages|prompt)"
    r"|(?:input|prompt) tokens)"
)


Letter = JsonObject
"""A line of ``dead_letters.jsonl``; its ``document`` is as ``documents.encode`` wrote it."""


LetterAttempt = tuple[int, int]
"""A document's ordinal, and the attempt that failed, counted from 1."""


def failure_of(error: BaseException) -> str | BaseException:
    if isinstance(error, InferenceError):
        failure: str | BaseException = error.error
        return failure
    return error


def cause_of(error: BaseException) -> str:
    failure = failure_of(error)
    text = safe_text(failure)
    if isinstance(failure, RequestRejected):
        text = failure.cause
    text = redact(text)
    if isinstance(failure, CkptError | str):
        return text
    return f"{type(failure).__name__}: {text}{likely_mistake(failure)}"


def dead_letter(
    source: SourceDocument, ordinal: int, error: BaseException, payload_hashes: list[str]
) -> bytes:
    document = source.document
    encoded = source.as_read or as_read(document).data
    earlier: Letter = getattr(document, "dead_letter", {})
    head: Letter = {
        "ordinal": earlier.get("ordinal", ordinal),
        "id": source.id,
        "error": cause_of(error),
        "kind": type(failure_of(error)).__name__,
        "attempts": earlier.get("attempts", 0) + 1,
        "position": earlier.get("position", position_state(document)),
        "payload_hashes": [digest for digest in payload_hashes if digest],
        "traceback": redact(safe_text("".join(traceback.format_exception(error)))),
    }
    return b'%s,"document":%s}' % (orjson.dumps(head)[:-1], encoded)


def describe_document(doc_id: str, ordinal: int) -> str:
    return f"document {safe_repr(doc_id)} (number {ordinal} of this task)"


def advice_for(
    error: BaseException, step: RunnerSettings
) -> tuple[str, list[Mapping[str, object]]]:
    advice, changes = _advice(error)
    if step.checkpoints_local_dir is None:
        return advice, changes
    is_ready_made = type(step.rollout_fn).__module__ == InvalidAnswer.__module__
    if not step.accept_changes and not is_ready_made:
        advice += (
            f" If you change the rollout {name_of(step.rollout_fn)} for that, set accept_changes."
        )
        return advice, [_ACCEPTED, *changes]
    if any(isinstance(cause, InvalidAnswer) for cause in causes(error)):
        advice = (
            f"These answers are saved, so the same command fails again. {_WITHOUT_SUCH} A new "
            "run may set invalid_answer: drop."
        )
        return advice, [_AS_DEAD_LETTERS]
    return advice, changes


def _advice(error: BaseException) -> tuple[str, list[Mapping[str, object]]]:
    rejected = next((cause for cause in causes(error) if isinstance(cause, RequestRejected)), None)
    if rejected is None:
        if any(isinstance(cause, RequestFailed) for cause in causes(error)):
            return f"{_RUN_AGAIN} {_WITHOUT_SUCH}", [_AS_DEAD_LETTERS]
        return _RUN_AGAIN, []
    advice, changes = _about_payload(rejected.body, getattr(error, "payload", None) or {})
    if changes:
        return advice, changes
    fault = "If the server was at fault, correct it"
    if rejected.remembered:
        fault = "The request was not sent this time"
    advice += f"{fault}; to send the request again, set retry_errors."
    return advice, [{"retry_errors": True}]


def _about_payload(rejection: str, payload: Payload) -> tuple[str, list[Mapping[str, object]]]:
    advice = ""
    if too_long := _TOO_LONG.search(rejection):
        context = int(too_long[1] or 0)
        max_tokens = max_tokens_of(payload)
        prompt = 1
        if prompt_match := _PROMPT_TOKENS.search(rejection):
            prompt = int(prompt_match[1])
        if max_tokens + prompt > context > prompt:
            lower = min(context // 2, context - prompt)
            advice = (
                f"max_tokens is {max_tokens}, and the model's context with the prompt is "
                f"{context}. Lower it, such as to {lower}, and set accept_changes."
            )
            return advice, [{"max_tokens": lower, **_ACCEPTED}]
        advice = (
            "The prompt is longer than the model's context. ChunkedRollout splits long documents. "
        )
    if "schema" in rejection.lower() and "response_format" in payload:
        advice = (
            "Correct the schema, and set accept_changes. A strict schema requires each property "
            "(type null if it may be missing) and additionalProperties: false."
        )
        return advice, [_ACCEPTED]
    return advice, []


def offer_skipping(error: BaseException) -> None:
    """Adds advice to the error: how to continue without documents whose requests are rejected.

    Only for a rank that has answers: otherwise all its requests may be rejected.
    """
    rejected = any(isinstance(cause, RequestRejected) for cause in causes(error))
    if isinstance(error, DocumentFailed) and rejected:
        error.advice = " To make dead letters of rejected documents, set skip_bad_requests."
        error.changes = [{"skip_bad_requests": True}, *error.changes]


def unanswered(doc_id: str, ordinal: int, error: CkptError, payload: Payload) -> CkptError:
    document = describe_document(doc_id, ordinal)
    if isinstance(error, ServerUnavailable):
        return ServerUnavailable(f"{error} A request of {document} is waiting.")
    if isinstance(error, ServerRefused):
        advice, changes = _about_payload(error.body, payload)
        if changes:
            error.advice = f" {advice}"
            error.changes = changes
        return error
    if not isinstance(error, RequestFailed):
        return error
    message = (
        f"A request of {document} has no answer. {error} Correct the server, and run again; or "
        "let the rollout return None for this document, and set accept_changes."
    )
    return DocumentFailed(message, error=error, changes=[_ACCEPTED])


@dataclass
class FailurePolicy:
    """The rule for one rank, and the number of its dead letters.

    Attributes:
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
        if not self.retried:
            return None
        earlier: Letter = getattr(source.document, "dead_letter", {})
        ordinal = earlier.get("ordinal", ordinal)
        line = self.retried.get((ordinal, earlier.get("attempts", 0) + 1))
        if line is not None and (other_id := orjson.loads(line)["id"]) != source.id:
            raise CheckpointMismatch(
                f"Document {ordinal} of this task is {safe_repr(source.id)}, but a retry of dead "
                f"letters has {safe_repr(other_id)} there: the input has changed. Restore it.",
                starts_over="with old results",
            )
        return line

    def dead_letter_or_raise(
        self,
        source: SourceDocument,
        ordinal: int,
        error: BaseException,
        payload_hashes: list[str],
        rejections: tuple[RequestRejected, ...],
    ) -> bytes:
        """Returns a line of ``dead_letters.jsonl``.

        Raises:
            DocumentFailed, CkptError: this failure stops the rank.
            TooManyDeadLetters: the dead letter would exceed the limit.
        """
        # The result may be an error that ``gather`` returned.
        if isinstance(error, DocumentNotSerializable):
            error = next(
                (cause for cause in causes(error) if isinstance(cause, InferenceError)),
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
                    isinstance(cause, RequestPoisoned)
                    or (isinstance(cause, BadAnswer) and not cause.is_dropped)
                    for cause in causes(error)
                )
            )
            or (self.step.skip_bad_requests and is_bad_request(error, rejections))
        )
        if isinstance(error, NotAwaitable) or not is_dead_letter:
            if isinstance(error, CkptError) and not isinstance(
                error, UnexpectedExit | RequestError
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
            raise TooManyDeadLetters(
                f"{plural(self.dead, 'document')} of this task failed "
                f"(max_dead_letters={limit}). The last, {name}: {cause}. Correct the cause, and "
                "run again. At the end, set retry_dead_letters."
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
    return isinstance(cause, BadAnswer) and cause.is_dropped


_BAD_REQUEST = "BadRequestError"


def is_bad_request(error: BaseException, rejections: tuple[RequestRejected, ...]) -> bool:
    """Whether an error means a rejected request.

    datatrove searches the whole text of an ``InferenceError``, payload included, for
    "BadRequestError". Here the word within a text counts only if the server has rejected a request
    of the document.
    """
    for cause in causes(error):
        if isinstance(cause, RequestRejected):
            return True
        text = safe_text(failure_of(cause))
        if any(str(rejection) in text for rejection in rejections):
            return True
        begins = text.removeprefix("Got ").startswith(_BAD_REQUEST)  # as datatrove's own errors
        if isinstance(cause, InferenceError) and (begins or (rejections and _BAD_REQUEST in text)):
            return True
    return False


# dead letters and their retries -------------------------------------------------------------------


def read_letters(path: Path) -> Iterator[Letter]:
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                yield orjson.loads(line)


def _attempt_of(letter: Letter) -> LetterAttempt:
    return letter["ordinal"], letter["attempts"]


def retried_dead_letters(root: Path, rank: int) -> dict[LetterAttempt, bytes]:
    return {
        _attempt_of(letter): orjson.dumps(letter)
        for folder in layout.folders_of(root, rank)
        for letter in read_letters(folder / layout.RETRY_INPUT)
    }


class DeadLetterRetry:
    """Iterates over the documents of a rank's dead letters."""

    def __init__(self, root: Path, number: int, rank: int) -> None:
        self.root = layout.retry_folder(root, number)
        self.prefix = f"retry{number}_"
        self.folder = layout.rank_folder(self.root, rank)
        self.input = self.folder / layout.RETRY_INPUT

    def __iter__(self) -> Iterator[Document]:
        for letter in read_letters(self.input):
            yield RetriedDocument(decode(orjson.dumps(letter.pop("document"))), letter)

    @property
    def is_finished(self) -> bool:
        done = sum(
            commit.counts.read for commit in read_commits(self.folder / layout.COMMITS).values()
        )
        letters = sum(1 for _ in read_letters(self.input))
        return done == letters and not (self.folder / layout.CACHE).exists()


def next_retry(root: Path, rank: int) -> DeadLetterRetry | None:
    """Resumes an interrupted retry, or starts a new retry. None: there is nothing to retry.

    Raises:
        CheckpointMismatch: the rank itself is not finished; its own documents come first.
    """
    folder = layout.rank_folder(root, rank)
    if (folder / layout.RUN).exists():
        read_run(folder / layout.RUN)
    if not layout.is_finished(folder):
        raise CheckpointMismatch(
            f"Task {rank} in {root} is not finished. Finish it first, without retry_dead_letters."
        )
    folders = [folder]
    last = 0
    for path in layout.retry_folders(root):
        number = int(path.name.removeprefix(layout.RETRIES))
        retry = DeadLetterRetry(root, number, rank)
        if not retry.input.exists():
            continue  # a retry of other ranks
        if not retry.is_finished:
            return retry
        folders.append(retry.folder)
        last = number
    retried = retried_dead_letters(root, rank)
    letters = [
        letter
        for each in folders
        for letter in read_letters(each / layout.DEAD_LETTERS)
        if _attempt_of(letter) not in retried
    ]
    if not letters:
        return None
    letters.sort(key=_attempt_of)  # chunks are committed in any order
    retry = DeadLetterRetry(root, last + 1, rank)
    files.disk.make_dirs(retry.folder, files.PRIVATE_FOLDER)
    files.disk.replace(retry.input, b"".join(orjson.dumps(letter) + b"\n" for letter in letters))
    return retry


class RetriedDocument(Document):  # type: ignore[misc]
    __slots__ = ("dead_letter",)

    def __init__(self, document: Document, letter: Letter) -> None:
        super().__init__(document.text, document.id, document.media, document.metadata)
        self.dead_letter = letter
